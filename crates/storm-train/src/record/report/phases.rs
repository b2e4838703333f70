//! Phases of a run that predicts: a color band, jumps as dots, and a table of totals per phase.

use super::super::{History, Predictions};
use super::chart::{Kind, Series, Steps};
use super::charts::in_range;
use super::unit::show_bytes;
use crate::{ParameterGroup, Phase, UpdateSeen};
use storm_exec::trace::page::{Cell, Table};

/// The color variable of a phase.
fn colour(phase: Phase) -> &'static str {
    match phase {
        Phase::WarmUp => "inputs",
        Phase::Full => "weights",
        Phase::Predict => "recomputed",
        Phase::Correct => "optimizer",
    }
}

/// The legend of the color band.
pub(super) fn legend() -> String {
    let chip = |phase: &Phase| {
        let (colour, name) = (colour(*phase), phase.name());
        format!("<i class=\"chip\" style=\"background:var(--{colour})\"></i> {name}")
    };
    // Other phases have no steps.
    let of_steps = [Phase::WarmUp, Phase::Full, Phase::Correct];
    let chips: Vec<String> = of_steps.iter().map(chip).collect();
    format!("<p class=\"hint\">The band over the loss: {}.</p>", chips.join(", "))
}

/// The first and last recorded step of each phase, with its color.
pub(super) fn band(history: &History) -> Vec<(u64, u64, &'static str)> {
    let mut band: Vec<(u64, u64, &'static str)> = Vec::new();
    for record in history.steps() {
        let Some(phase) = record.phase else { continue };
        let colour = colour(phase);
        match band.last_mut() {
            Some((_, to, last)) if *last == colour => *to = record.step,
            // Start where the one before ends, to leave no gap between thinned steps.
            Some(&mut (_, to, _)) => band.push((to, record.step, colour)),
            None => band.push((record.step, record.step, colour)),
        }
    }
    band
}

/// Predictions with the same outcome, drawn as dots in the loss chart.
pub(super) struct Jumps {
    pub(super) steps: Steps,
    name: &'static str,
    colour: &'static str,
    losses: Vec<f64>,
}

impl Jumps {
    pub(super) fn series(&self) -> Series<'_> {
        Series {
            name: self.name,
            colour: self.colour,
            kind: Kind::Dots,
            steps: &self.steps,
            values: self.losses.clone(),
        }
    }
}

/// The probe loss after predictions that moved the weights, and after those that did not.
pub(super) fn jumps(history: &History) -> Vec<Jumps> {
    let of = |key, name, colour, moved: bool| {
        let all = history.predictions().all().iter();
        let (steps, losses) = all
            .filter(|(_, prediction)| (prediction.accepted > 0) == moved)
            .map(|(step, prediction)| (*step, in_range(prediction.loss)))
            .unzip();
        Jumps { steps: Steps { key, steps }, name, colour, losses }
    };
    let both = [
        of("accepted", "probe, jumps accepted", "recomputed", true),
        of("refused", "probe, jumps refused", "memory-edge", false),
    ];
    both.into_iter().filter(|jumps| !jumps.losses.is_empty()).collect()
}

/// Totals of each phase; `None` if the run does not predict.
pub(super) fn table(history: &History) -> Option<Table> {
    let predictions = history.predictions();
    if predictions.is_empty() {
        return None;
    }
    let all: f64 = Phase::ALL.iter().map(|phase| predictions.of(*phase).seconds).sum();
    let row = |phase: Phase| {
        let totals = predictions.of(phase);
        let what = match phase {
            Phase::WarmUp | Phase::Full => String::new(),
            Phase::Predict => {
                let Predictions { accepted, refused, declined, .. } = predictions;
                let declined = match declined {
                    0 => String::new(),
                    count => format!(", none made {count} times"),
                };
                format!("{accepted} jumps accepted, {refused} refused{declined}")
            }
            Phase::Correct => format!("{} kept, {} undone", predictions.kept, predictions.undone),
        };
        let peak = |bytes: u64| match bytes {
            0 => String::new(),
            bytes => show_bytes(bytes as f64),
        };
        let cells = [
            totals.steps.to_string(),
            format!("{:.1} s", totals.seconds),
            format!("{:.1} %", 100.0 * totals.seconds / all.max(1e-12)),
            peak(totals.device_bytes_peak),
            peak(totals.process_bytes_peak),
            what,
        ];
        (phase.name().to_owned(), cells.map(Cell::Text).to_vec())
    };
    Some(Table {
        caption: "Phases, with their time and the most memory that was seen in their steps",
        columns: &["", "steps", "time", "share", "device memory", "process memory", ""],
        rows: Phase::ALL.map(row).to_vec(),
    })
}

/// Update statistics as a learned controller saw them; `None` in other runs.
pub(super) fn updates(history: &History) -> Option<Table> {
    let row = |group: &ParameterGroup| {
        let (mean, last) = history.predictions().updates(*group)?;
        let cells = |UpdateSeen { cosine, ratio }| {
            [Cell::Text(format!("{cosine:.3}")), Cell::Text(format!("{ratio:.2e}"))]
        };
        Some((group.name().to_owned(), [cells(mean), cells(last)].concat()))
    };
    let rows: Vec<(String, Vec<Cell>)> = ParameterGroup::ALL.iter().filter_map(row).collect();
    (!rows.is_empty()).then_some(Table {
        caption: "Updates by group of parameters: cosine to the update before, and norm divided by that of the weights",
        columns: &["", "mean cosine", "mean ratio", "last cosine", "last ratio"],
        rows,
    })
}

/// A learned controller's expectations of jumps compared with their outcomes; `None` in other runs.
pub(super) fn calibration(history: &History) -> Option<Table> {
    let calibration = history.predictions().calibration();
    let (brier, (expected, observed)) = (calibration.brier()?, calibration.changes()?);
    let reliability = calibration.reliability();
    let mut rows: Vec<(String, Vec<Cell>)> = reliability
        .into_iter()
        .map(|(jumps, probability, accepted)| {
            let cells = vec![
                Cell::Text(jumps.to_string()),
                Cell::Share(probability),
                Cell::Share(accepted),
            ];
            (format!("acceptance of about {:.0} %", 100.0 * probability), cells)
        })
        .collect();
    let text = |values: [String; 3]| values.map(Cell::Text).to_vec();
    let percent = |change: f64| format!("{:+.2} %", 100.0 * change.exp_m1());
    rows.push((
        "change of the loss".to_owned(),
        text([String::new(), percent(expected), percent(observed)]),
    ));
    let words = "0 is best, 0.25 a coin".to_owned();
    rows.push(("Brier score".to_owned(), text([String::new(), words, format!("{brier:.3}")])));
    Some(Table {
        caption: "What the controller expected of its jumps, and what happened",
        columns: &["", "jumps", "expected", "observed"],
        rows,
    })
}
