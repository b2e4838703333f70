//! The options of predictions, and their validation.

use super::modes::INTERVALS;
use super::{Controller, Direction, PhaseLengths, PredictionCost};
use crate::TrainError;

/// Which jumps are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accept {
    /// Jumps that lower the loss on held-out data and are not undone after their correction.
    IfLower,
    /// All jumps with finite weights. No loss is measured, and there is no correction. This is how
    /// an outer optimizer works.
    Always,
}

/// The weights that losses are measured with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProbeWeights {
    /// Those of the next step.
    #[default]
    AsTrained,
    /// The matrices of layers in 8 bits, see [`QuantizedFormat::Int8`](storm_graph::QuantizedFormat::Int8). The
    /// weights that are trained are not on the device meanwhile.
    Int8,
}

/// The options of predictions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictOptions {
    /// Steps of each phase.
    pub lengths: PhaseLengths,
    /// The direction of jumps.
    pub direction: Direction,
    /// The length of jumps.
    pub controller: Controller,
    /// Which jumps are kept.
    pub accept: Accept,
    /// The weights that losses are measured with.
    pub probe_weights: ProbeWeights,
    /// A jump is accepted if the probe loss falls by more than this many standard errors.
    pub noise: f64,
    /// Jumps are undone if the held-out loss is above its trend by more than this.
    pub margin: f64,
}

impl PredictOptions {
    /// Validates the options for a run of this many steps.
    ///
    /// # Errors
    /// Names the invalid option.
    pub fn check(&self, steps: u64) -> Result<(), TrainError> {
        let refuse = |problem: String| Err(TrainError::Option { option: "predict", problem });
        let PhaseLengths { warm_up, full, correct } = self.lengths;
        // Jumps that are always kept have no correction.
        let is_corrected = self.accept == Accept::IfLower;
        let phases = [("warm-up", warm_up), ("full", full), ("correct", correct)];
        for (name, length) in &phases[..if is_corrected { 3 } else { 2 }] {
            if *length == 0 {
                return refuse(format!("{name} is 0; every phase has at least one step"));
            }
        }
        if !is_corrected && matches!(self.controller, Controller::Rssm { .. }) {
            return refuse(
                "the controller rssm learns from losses, and none are measured".to_owned(),
            );
        }
        if !is_corrected && correct != 0 {
            return refuse(format!("correct is {correct}, and jumps that always stay have none"));
        }
        if !is_corrected && self.probe_weights != ProbeWeights::AsTrained {
            return refuse("probe-weights is for losses, and none are measured".to_owned());
        }
        let window = self.direction.window();
        if window == 0 || window > full {
            return refuse(format!(
                "window is {window}; it is at least 1, and at most the {full} steps of a full phase"
            ));
        }
        let intervals = INTERVALS as u64;
        if matches!(self.direction, Direction::Dmd { .. }) && !window.is_multiple_of(intervals) {
            return refuse(format!(
                "window is {window}; for direction = \"dmd\" it is a multiple of {intervals}"
            ));
        }
        let cycle = warm_up.saturating_add(full).saturating_add(correct);
        if cycle > steps {
            return refuse(format!(
                "warm-up, full and correct together take {cycle} steps, and the run has {steps}: nothing would be \
                 predicted; give shorter phases, or more steps"
            ));
        }
        if let Direction::Outer { momentum, .. } = self.direction
            && !(momentum > 0.0 && momentum < 1.0)
        {
            return refuse(format!("momentum is {momentum}; it is above 0 and below 1"));
        }
        if let Controller::Rssm { cost: PredictionCost::Steps(cost), .. } = self.controller
            && !(cost >= 0.0 && cost.is_finite())
        {
            return refuse(format!("cost is {cost}; it is a number of steps that is not negative"));
        }
        let (tau, growth, jumps) = match self.controller {
            Controller::Constant { tau } | Controller::Rssm { tau, .. } => (tau, 1.0, 1),
            Controller::LineSearch { tau, growth, jumps } => (tau, growth, jumps),
        };
        if !tau.is_finite() || tau == 0.0 || (tau < 0.0 && is_corrected) {
            return refuse(match is_corrected {
                true => format!("tau is {tau}; it is a number above 0"),
                false => format!("tau is {tau}; it is a number other than 0"),
            });
        }
        if !(growth >= 1.0 && growth.is_finite()) {
            return refuse(format!("growth is {growth}; it is a number from 1 on"));
        }
        if jumps == 0 {
            return refuse("jumps is 0; a phase has at least one".to_owned());
        }
        for (name, value) in [("noise", self.noise), ("margin", self.margin)] {
            if !(value >= 0.0 && value.is_finite()) {
                return refuse(format!("{name} is {value}; it is a number that is not negative"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let good = PredictOptions {
            lengths: PhaseLengths { warm_up: 4, full: 8, correct: 2 },
            direction: Direction::Outer { window: 8, momentum: 0.5 },
            controller: Controller::LineSearch { tau: 1.0, growth: 1.0, jumps: 5 },
            accept: Accept::IfLower,
            probe_weights: ProbeWeights::AsTrained,
            noise: 1.0,
            margin: 0.01,
        };
        good.check(14).expect("it makes sense");
        let lengths = good.lengths;
        let without = PhaseLengths { correct: 0, ..lengths };
        let controller = Controller::Constant { tau: -0.5 };
        let always =
            PredictOptions { accept: Accept::Always, lengths: without, controller, ..good };
        always.check(12).expect("a step back, as an outer optimizer makes it");
        let search = |tau, growth, jumps| PredictOptions {
            controller: Controller::LineSearch { tau, growth, jumps },
            ..good
        };
        let rssm = |cost| Controller::Rssm { tau: 1.0, cost: PredictionCost::Steps(cost) };
        let outer = |window, momentum| PredictOptions {
            direction: Direction::Outer { window, momentum },
            ..good
        };
        let cases = [
            (
                "warm-up is 0",
                PredictOptions { lengths: PhaseLengths { warm_up: 0, ..lengths }, ..good },
            ),
            ("full is 0", PredictOptions { lengths: PhaseLengths { full: 0, ..lengths }, ..good }),
            (
                "correct is 0",
                PredictOptions { lengths: PhaseLengths { correct: 0, ..lengths }, ..good },
            ),
            (
                "15 steps",
                PredictOptions { lengths: PhaseLengths { correct: 3, ..lengths }, ..good },
            ),
            ("window is 9", outer(9, 0.5)),
            ("window is 0", outer(0, 0.5)),
            (
                "window is 6; for direction",
                PredictOptions { direction: Direction::Dmd { window: 6 }, ..good },
            ),
            ("momentum is 1", outer(8, 1.0)),
            ("momentum is NaN", outer(8, f32::NAN)),
            ("tau is 0", search(0.0, 1.0, 5)),
            ("tau is inf", search(f32::INFINITY, 1.0, 5)),
            ("growth is 0.5", search(1.0, 0.5, 5)),
            ("jumps is 0", search(1.0, 1.0, 0)),
            ("noise is NaN", PredictOptions { noise: f64::NAN, ..good }),
            ("rssm learns", PredictOptions { controller: rssm(1.0), ..always }),
            ("cost is -1", PredictOptions { controller: rssm(-1.0), ..good }),
            ("cost is NaN", PredictOptions { controller: rssm(f64::NAN), ..good }),
            ("correct is 2, and", PredictOptions { accept: Accept::Always, ..good }),
            ("tau is -0.5", PredictOptions { controller, ..good }),
            (
                "tau is 0; it is a number other",
                PredictOptions { controller: Controller::Constant { tau: 0.0 }, ..always },
            ),
            (
                "probe-weights is for losses",
                PredictOptions { probe_weights: ProbeWeights::Int8, ..always },
            ),
            ("margin is -1", PredictOptions { margin: -1.0, ..good }),
        ];
        for (expected, options) in cases {
            let error = options.check(14).expect_err(expected).to_string();
            assert!(error.contains(expected) && error.starts_with("predict: "), "{error}");
        }
    }
}
