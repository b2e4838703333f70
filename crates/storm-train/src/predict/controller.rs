//! Chooses the length of a jump, and how many to make.

/// How the length of jumps is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Controller {
    /// One jump of fixed length.
    Constant {
        /// Length, in units of the direction.
        tau: f32,
    },
    /// Repeated jumps while the loss falls.
    LineSearch {
        /// Length of the first jump, in units of the direction.
        tau: f32,
        /// Each jump is this many times as long as the previous one. 1 repeats the length.
        growth: f32,
        /// Maximum jumps per phase.
        jumps: u32,
    },
    /// A recurrent state-space model chooses one jump, or none.
    Rssm {
        /// The middle of the lengths to choose from.
        tau: f32,
        /// What a prediction costs.
        cost: PredictionCost,
    },
}

/// What the learned controller takes a prediction to cost. It is a setting and never read from a
/// clock during a run, so that a resumed run makes the same choices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum PredictionCost {
    /// As much as its forward passes, each a third of the work of training on the same micro-batch.
    #[default]
    Counted,
    /// The time of this many steps, such as [`prediction_seconds`](crate::prediction_seconds)
    /// divided by the time of a step.
    Steps(f64),
}

impl Controller {
    /// The length of the next jump after this many accepted ones. `None` to stop. `chosen` is the
    /// choice of a learned controller.
    pub(super) fn next(&self, accepted: u32, chosen: Option<f32>) -> Option<f32> {
        match *self {
            Controller::Constant { tau } => (accepted == 0).then_some(tau),
            Controller::Rssm { .. } => chosen.filter(|_| accepted == 0),
            Controller::LineSearch { tau, growth, jumps } => {
                let exponent = i32::try_from(accepted).unwrap_or(i32::MAX);
                (accepted < jumps).then(|| tau * growth.powi(exponent))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_as_asked() {
        let lengths = |controller: Controller| -> Vec<f32> {
            (0..9).map_while(|accepted| controller.next(accepted, Some(0.75))).collect()
        };
        let rssm = Controller::Rssm { tau: 3.0, cost: PredictionCost::Counted };
        assert_eq!(lengths(Controller::Constant { tau: 3.0 }), [3.0]);
        let search = |growth| Controller::LineSearch { tau: 0.5, growth, jumps: 4 };
        assert_eq!(lengths(search(1.0)), [0.5; 4]);
        assert_eq!(lengths(search(2.0)), [0.5, 1.0, 2.0, 4.0]);
        assert_eq!(lengths(rssm), [0.75], "as it was chosen");
    }
}
