//! The facts on a run's page besides its charts, for `storm train` and `storm report`.

use crate::model::grouped;
use crate::size;
use crate::streams::duration;
use crate::train;
use std::collections::BTreeMap;
use storm_model::Unit;
use storm_train::{History, Pictures, RunFacts, Tested};

/// The facts of a run, from its settings and metrics alone.
pub(crate) fn facts(
    name: &str,
    settings: &BTreeMap<String, String>,
    budgets: [Option<u64>; 2],
    history: &History,
    pictures: Pictures,
) -> RunFacts {
    let sample_hint = match settings.get("sample-tokens").map(String::as_str) {
        _ if unit(history) == Unit::Images => None,
        None | Some("0") => Some(format!(
            "This run generates no text. Set sample-tokens = 200 to generate some at its end, or run `storm sample \
             runs/{name}` at any time."
        )),
        Some(_) => Some("The run generates text at its end, and has not ended yet.".to_owned()),
    };
    RunFacts {
        title: format!("Run {name}"),
        rows: rows(settings, budgets, history),
        settings: train::by_heading(settings),
        budgets,
        sample_hint,
        pictures,
    }
}

/// The unit of the model's input: tokens or images.
fn unit(history: &History) -> Unit {
    history.last().map_or(Unit::Tokens, |last| last.throughput.unit())
}

fn rows(
    settings: &BTreeMap<String, String>,
    [device_budget, host_budget]: [Option<u64>; 2],
    history: &History,
) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    let mut row = |what: &str, value: Option<String>| {
        rows.extend(value.map(|value| (what.to_owned(), value)));
    };
    let setting = |key: &str| settings.get(key).filter(|value| !value.is_empty()).cloned();
    let number = |key: &str| settings.get(key).and_then(|value| value.parse().ok()).map(grouped);
    row("model", setting("model"));
    row("data", setting("data"));
    if let Some(last) = history.last() {
        let of = number("steps").map_or(String::new(), |steps| format!(" of {steps}"));
        row("steps", Some(format!("{}{of}", grouped(last.step))));
        row("epochs", setting("epochs"));
        let unit = last.throughput.unit();
        row(unit.name(), Some(grouped(last.throughput.total())));
        row("last loss", Some(format!("{:.4}", last.loss)));
        row("last accuracy", last.accuracy.map(|share| percent(f64::from(share))));
    }
    row("best held-out loss", history.best_loss().map(|loss| format!("{loss:.4}")));
    row("best held-out accuracy", history.best_accuracy().map(percent));
    let test = history.test();
    let after = |test: Tested| format!(" after step {}", grouped(test.step));
    row("test loss", test.map(|test| format!("{:.4}{}", test.loss, after(test))));
    row("test accuracy", test.and_then(|test| test.accuracy).map(percent));
    row("duration", Some(time(history)));
    row("speed", speed(history));
    row("step", step_shape(settings, unit(history)));
    row("learning rate", schedule(settings));
    row("precision", setting("precision"));
    row("seed", setting("seed"));
    row("device budget", device_budget.map(size::show));
    row("host budget", host_budget.map(size::show));
    row("storm", Some(env!("CARGO_PKG_VERSION").to_owned()));
    rows
}

/// The total time, over all processes of the run.
fn time(history: &History) -> String {
    let (steps, others) = (history.step_seconds(), history.other_seconds());
    match others >= 1.0 {
        true => {
            let (all, others) = (duration(steps + others), duration(others));
            format!("{all}, {others} of it for evaluations and checkpoints")
        }
        false => duration(steps + others),
    }
}

fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

/// Average throughput: all tokens or images over the time of all steps.
fn speed(history: &History) -> Option<String> {
    let read = history.last()?.throughput;
    let speed = read.total() as f64 / history.step_seconds();
    speed.is_finite().then(|| format!("{} {}/s", grouped(speed.round() as u64), read.unit()))
}

fn step_shape(settings: &BTreeMap<String, String>, unit: Unit) -> Option<String> {
    let get = |key: &str| settings.get(key).map(String::as_str);
    if unit == Unit::Images {
        let [batch, accumulate] = ["batch", "accumulate"].map(|key| get(key).unwrap_or("1"));
        return Some(format!("{batch} × {accumulate} images"));
    }
    let sequence = get("seq")?;
    match (get("batch"), get("accumulate"), get("tokens-per-step")) {
        (None, None, Some(tokens)) => Some(format!("{tokens} tokens, sequences of {sequence}")),
        (batch, accumulate, _) => Some(format!(
            "{} × {} of {sequence} tokens",
            batch.unwrap_or("1"),
            accumulate.unwrap_or("1")
        )),
    }
}

fn schedule(settings: &BTreeMap<String, String>) -> Option<String> {
    let mut words = settings.get("learning-rate")?.clone();
    if let Some(schedule) = settings.get("schedule") {
        words.push_str(&format!(", {schedule}"));
    }
    if let Some(warmup) = settings.get("warmup").filter(|warmup| *warmup != "0") {
        words.push_str(&format!(", {warmup} steps of warmup"));
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_told_in_short_and_in_full() {
        let pairs = [
            ("model", "gpt2"),
            ("steps", "2000"),
            ("seq", "128"),
            ("batch", "8"),
            ("learning-rate", "0.004"),
            ("schedule", "cosine"),
            ("warmup", "40"),
            ("sample-tokens", "0"),
            ("unknown", "1"),
        ];
        let settings = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let facts = facts("a", &settings, [Some(5 << 30), None], &History::new(), Pictures::None);
        let of = |rows: &[(String, String)], what: &str| {
            rows.iter().find(|(name, _)| name == what).map(|(_, value)| value.clone())
        };
        let short = |what: &str| of(&facts.rows, what).unwrap_or_default();
        assert_eq!(short("step"), "8 × 1 of 128 tokens");
        assert_eq!(short("learning rate"), "0.004, cosine, 40 steps of warmup");
        assert_eq!((short("device budget"), short("duration")), ("5.00 GiB".into(), "0:00".into()));
        assert_eq!(of(&facts.rows, "speed"), None);
        let headings: Vec<&str> = facts.settings.iter().map(|(of, _)| of.as_str()).collect();
        assert_eq!(headings[..3], ["Run", "Model", "Data"]);
        assert_eq!(of(&facts.settings[0].1, "steps"), Some("2000".to_owned()));
        let hint = facts.sample_hint.expect("a hint");
        assert!(hint.contains("storm sample runs/a"), "{hint}");
    }
}
