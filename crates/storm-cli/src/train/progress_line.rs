//! Formats the progress of a run as one line that fits the terminal.

use crate::model::grouped;
use crate::size;
use crate::streams::duration;
use storm_model::Unit;
use storm_train::Phase;

/// Assumed width of a terminal that does not report one.
pub(super) const COLUMNS_DEFAULT: usize = 80;

/// The numbers shown after a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) step: u64,
    pub(super) steps: u64,
    /// Smoothed.
    pub(super) loss: f64,
    pub(super) held_out_loss: Option<f64>,
    /// Accuracy of a classifier: in training (smoothed), and held out.
    pub(super) accuracy: Option<f64>,
    pub(super) held_out_accuracy: Option<f64>,
    pub(super) learning_rate: f32,
    pub(super) gradient_norm: f32,
    /// Epochs so far.
    pub(super) epochs: f64,
    pub(super) unit: Unit,
    pub(super) units_per_second: f64,
    pub(super) seconds_left: f64,
    /// Used and budgeted.
    pub(super) device_bytes: [u64; 2],
    pub(super) host_bytes: [u64; 2],
    /// Fraction of copy time hidden behind compute.
    pub(super) hidden_share: Option<f64>,
    /// Only in a run that predicts.
    pub(super) phase: Option<Phase>,
}

/// A field and its rank. Fields with the highest rank are dropped first when there is no room.
type Field = (u8, String);

/// The line, with as many fields as fit.
pub(super) fn line(figures: &Figures, columns: usize) -> String {
    let mut fields = fields(figures);
    while length(&fields) > columns {
        let Some(least) = fields.iter().map(|(rank, _)| *rank).max().filter(|rank| *rank > 0)
        else {
            break;
        };
        fields.retain(|(rank, _)| *rank != least);
    }
    let words: Vec<String> = fields.into_iter().map(|(_, words)| words).collect();
    words.join(" ")
}

fn length(fields: &[Field]) -> usize {
    let words: usize = fields.iter().map(|(_, words)| words.chars().count() + 1).sum();
    words.saturating_sub(1)
}

fn fields(figures: &Figures) -> Vec<Field> {
    let of = |[taken, allowed]: [u64; 2]| format!("{}/{}", size::show(taken), size::show(allowed));
    let mut fields = vec![
        (0, format!("step {}/{}", figures.step, figures.steps)),
        (0, format!("loss {:.3}", figures.loss)),
    ];
    fields.extend(figures.phase.map(|phase| (1, phase.name().to_owned())));
    let percent = |share: f64| format!("{:.1}%", 100.0 * share);
    fields.extend(figures.accuracy.map(|share| (1, format!("acc {}", percent(share)))));
    fields.extend(figures.held_out_loss.map(|loss| match figures.held_out_accuracy {
        Some(share) => (6, format!("held-out {loss:.3} {}", percent(share))),
        None => (6, format!("held-out {loss:.3}")),
    }));
    fields.extend([
        (4, format!("lr {}", rate(figures.learning_rate))),
        (3, format!("norm {:.2}", figures.gradient_norm)),
        (5, format!("epoch {:.2}", figures.epochs)),
        (
            2,
            format!(
                "{} {}",
                grouped(figures.units_per_second.round() as u64),
                figures.unit.per_second()
            ),
        ),
        (1, format!("{} left", duration(figures.seconds_left))),
        (7, format!("device {}", of(figures.device_bytes))),
        (8, format!("host {}", of(figures.host_bytes))),
    ]);
    let hidden = |share: f64| (9, format!("copies {:.0}% hidden", 100.0 * share));
    fields.extend(figures.hidden_share.map(hidden));
    fields
}

/// `3e-4`, `2.5e-5`, `0`.
fn rate(rate: f32) -> String {
    let text = format!("{rate:.1e}");
    match rate {
        0.0 => "0".to_owned(),
        _ => text.replace(".0e", "e"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        Figures {
            step: 1000,
            steps: 1000,
            loss: 2.3456,
            held_out_loss: Some(2.5),
            accuracy: None,
            held_out_accuracy: None,
            learning_rate: 3e-4,
            gradient_norm: 0.534,
            epochs: 1.25,
            unit: Unit::Tokens,
            units_per_second: 12_345.0,
            seconds_left: 185.0,
            device_bytes: [12 << 30, 16 << 30],
            host_bytes: [30 << 30, 64 << 30],
            hidden_share: Some(0.98),
            phase: None,
        }
    }

    #[test]
    fn eighty_columns_hold_what_matters() {
        assert_eq!(
            line(&figures(), 80),
            "step 1000/1000 loss 2.346 lr 3e-4 norm 0.53 epoch 1.25 12,345 tok/s 3:05 left"
        );
        assert!(line(&figures(), 1000).ends_with("copies 98% hidden"));
        // A long run still shows how far it is, what it learns, and when it ends.
        let long =
            Figures { step: 123_456_789, steps: 1_000_000_000, seconds_left: 1e9, ..figures() };
        let shown = line(&long, 80);
        assert!(shown.contains("123456789/1000000000") && shown.contains("left"), "{shown}");
    }

    #[test]
    fn classifiers_show_what_they_find() {
        let image = Figures {
            accuracy: Some(0.6174),
            held_out_accuracy: Some(0.655),
            unit: Unit::Images,
            ..figures()
        };
        let shown = line(&image, 1000);
        let wanted = "loss 2.346 acc 61.7% held-out 2.500 65.5% lr";
        assert!(shown.contains(wanted) && shown.contains("12,345 images/s"), "{shown}");
    }

    #[test]
    fn phases_are_shown_where_there_are_some() {
        let predicting = Figures { phase: Some(Phase::Correct), ..figures() };
        assert!(line(&predicting, 80).starts_with("step 1000/1000 loss 2.346 correct "));
    }

    #[test]
    fn every_width_is_kept_while_there_is_something_to_drop() {
        for columns in 0..200 {
            let shown = line(&figures(), columns);
            let least = "step 1000/1000 loss 2.346";
            assert!(shown.starts_with(least) && shown.len() <= columns.max(least.len()), "{shown}");
        }
    }

    #[test]
    fn rates_are_short() {
        assert_eq!([3e-4, 2.5e-5, 1.0, 0.0].map(rate), ["3e-4", "2.5e-5", "1e0", "0"]);
    }
}
