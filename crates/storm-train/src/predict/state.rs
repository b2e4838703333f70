//! The metadata of predictions in a checkpoint, besides the copies.

use super::phases::Position;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The state of predictions: the phase, the trend and the undo point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PredictState {
    pub(super) position: Position,
    /// Whether the checkpoint has the weights at the start of the window.
    pub(super) has_reference: bool,
    /// Updates in the average.
    pub(super) averaged: u64,
    /// The held-out loss at the start of the full phase.
    pub(super) start: Option<Point>,
    /// The undo point, during a correction.
    pub(super) undo: Option<Undo>,
}

/// A held-out loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Point {
    /// Number of updates before it.
    pub(super) updates: u32,
    /// As bits, because decimal digits may not round-trip.
    loss_bits: u64,
}

impl Point {
    pub(super) fn new(updates: u32, loss: f64) -> Point {
        Point { updates, loss_bits: loss.to_bits() }
    }

    pub(super) fn loss(&self) -> f64 {
        f64::from_bits(self.loss_bits)
    }
}

/// The part of an undo point that is not in the copies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Undo {
    /// The loss before the jumps.
    pub(super) before: Point,
    /// The data position.
    pub(super) data: Value,
}

/// Extrapolates the loss linearly.
pub(super) fn extrapolated(start: &Point, before: &Point, updates: u32) -> f64 {
    let between = f64::from(before.updates.saturating_sub(start.updates).max(1));
    let after = f64::from(updates.saturating_sub(before.updates));
    before.loss() + (before.loss() - start.loss()) / between * after
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trend_goes_on_as_a_line() {
        let (start, before) = (Point::new(10, 3.0), Point::new(20, 2.0));
        assert_eq!(extrapolated(&start, &before, 25), 1.5);
        assert_eq!(extrapolated(&before, &Point::new(30, 2.5), 40), 3.0);
    }

    #[test]
    fn losses_are_read_back_to_the_bit() {
        for loss in [0.1, f64::NAN, f64::INFINITY, 2.0_f64.sqrt(), 5e-324] {
            let text = serde_json::to_string(&Point::new(3, loss)).expect("plain");
            let read: Point = serde_json::from_str(&text).expect("its own text");
            assert_eq!(read.loss().to_bits(), loss.to_bits());
        }
    }
}
