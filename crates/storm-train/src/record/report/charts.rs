//! The charts of a run.

use super::super::{Evaluated, History, StepRecord};
use super::chart::{Chart, Kind, Series, Steps};
use super::phases::{self, Jumps};
use super::unit::Unit;
use serde_json::{Map, Value, json};
use storm_exec::trace::page::for_script;

/// Larger values are treated as gaps: they would leave the chart without a scale.
const VALUE_MAX: f64 = 1e300;

/// Renders the charts of a run and their data for the script. `budgets` are device and host memory in bytes.
pub(super) fn to_html(budgets: [Option<u64>; 2], history: &History) -> String {
    let of_steps =
        Steps { key: "steps", steps: history.steps().map(|record| record.step).collect() };
    let of_evaluations = Steps {
        key: "evaluations",
        steps: history.evaluations().map(|found| found.step).collect(),
    };
    let jumps = phases::jumps(history);
    let charts = charts(budgets, history, &of_steps, &of_evaluations, &jumps);
    let figures: Vec<String> = charts.iter().map(Chart::to_html).collect();
    let steps: Map<String, Value> = [&of_steps, &of_evaluations]
        .into_iter()
        .chain(jumps.iter().map(|jumps| &jumps.steps))
        .map(|Steps { key, steps }| ((*key).to_owned(), json!(steps)))
        .collect();
    let data =
        json!({"steps": steps, "charts": charts.iter().map(Chart::to_json).collect::<Vec<_>>()});
    format!(
        "<div class=\"controls\" id=\"smoothing\" hidden><label>Smoothing <input type=\"range\" min=\"0\" \
         max=\"10\" value=\"5\"></label><output></output></div>\n\
         <div class=\"charts\">\n{}</div>\n\
         <p class=\"hint\">Point at a chart, or tap it, for the values of the nearest step; at a key to see its \
         line alone.</p>\n\
         <script type=\"application/json\" id=\"charts\">{}</script>\n\
         <script>\n\"use strict\";\n{{\n{}}}\n</script>\n",
        figures.concat(),
        for_script(&data.to_string()),
        include_str!("charts.js"),
    )
}

fn charts<'a>(
    budgets: [Option<u64>; 2],
    history: &History,
    of_steps: &'a Steps,
    of_evaluations: &'a Steps,
    jumps: &'a [Jumps],
) -> Vec<Chart<'a>> {
    let series = |name, colour, kind, of: &dyn Fn(&StepRecord) -> Option<f64>| {
        let value = |record: &StepRecord| of(record).map_or(f64::NAN, in_range);
        Series { name, colour, kind, steps: of_steps, values: history.steps().map(value).collect() }
    };
    let plain = |name, colour, of: &dyn Fn(&StepRecord) -> Option<f64>| {
        series(name, colour, Kind::Plain, of)
    };
    let noisy = |name, colour, of: &dyn Fn(&StepRecord) -> Option<f64>| {
        series(name, colour, Kind::Noisy, of)
    };
    let [device_budget, host_budget] = budgets.map(|budget| budget.map(|bytes| bytes as f64));
    let mut losses = vec![noisy("training", "forward", &|r| Some(f64::from(r.loss)))];
    if !of_evaluations.steps.is_empty() {
        losses.push(Series {
            name: "held out",
            colour: "gradients",
            kind: Kind::Dots,
            steps: of_evaluations,
            values: history.evaluations().map(|found| in_range(found.loss)).collect(),
        });
    }
    let chart = |title, series, limit, from_zero, unit| Chart {
        title,
        series,
        limit,
        from_zero,
        unit,
        band: Vec::new(),
    };
    let rates = vec![plain("applied", "recomputed", &|r| Some(f64::from(r.learning_rate)))];
    let speeds = vec![noisy("speed", "backward", &|r| Some(r.throughput.per_second()))];
    let norms = vec![noisy("before clipping", "optimizer", &|r| Some(f64::from(r.gradient_norm)))];
    let device = vec![plain("in use", "memory-edge", &|r| Some(r.device_bytes as f64))];
    let host = vec![
        plain("plan", "memory-edge", &|r| Some(r.host_bytes as f64)),
        plain("whole process", "inputs", &|r| r.process_bytes.map(|bytes| bytes as f64)),
    ];
    let shares = vec![
        noisy("copies hidden", "activations", &|r| r.hidden_share),
        noisy("compute busy", "weights", &|r| r.compute_share),
        noisy("waiting for data", "inputs", &|r| Some(r.data_wait_seconds / r.seconds.max(1e-9))),
    ];
    let speed = match history.last().map(|record| record.throughput.unit()) {
        Some(storm_model::Unit::Images) => "Images per second",
        _ => "Tokens per second",
    };
    losses.extend(jumps.iter().map(Jumps::series));
    let mut loss = chart("Loss", losses, None, false, Unit::Loss);
    loss.band = phases::band(history);
    let mut charts = vec![loss];
    if history.last().is_some_and(|record| record.accuracy.is_some()) {
        let mut found = vec![noisy("training", "forward", &|r| r.accuracy.map(f64::from))];
        if !of_evaluations.steps.is_empty() {
            let accuracy = |found: &Evaluated| found.accuracy.map_or(f64::NAN, in_range);
            found.push(Series {
                name: "held out",
                colour: "gradients",
                kind: Kind::Dots,
                steps: of_evaluations,
                values: history.evaluations().map(accuracy).collect(),
            });
        }
        charts.push(chart("Accuracy", found, None, true, Unit::Share));
    }
    charts.extend([
        chart("Learning rate", rates, None, true, Unit::LearningRate),
        chart("Gradient norm", norms, None, true, Unit::GradientNorm),
        chart(speed, speeds, None, true, Unit::PerSecond),
        chart("Device memory", device, device_budget, true, Unit::Bytes),
        chart("Host memory", host, host_budget, true, Unit::Bytes),
        chart("Overlap", shares, None, true, Unit::Share),
    ]);
    charts
}

pub(super) fn in_range(value: f64) -> f64 {
    if value.abs() < VALUE_MAX { value } else { f64::NAN }
}
