//! How far a jump goes, and how often there is another.

/// How the length of jumps is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Controller {
    /// One jump of this length.
    Constant {
        /// In lengths of the direction.
        tau: f32,
    },
    /// Jumps while the loss falls.
    LineSearch {
        /// The first, in lengths of the direction.
        tau: f32,
        /// Each jump is so many times as long as the one before; 1 repeats it.
        growth: f32,
        /// Jumps of one phase, at most.
        jumps: u32,
    },
    /// A recurrent state-space model chooses one jump, or none.
    Rssm {
        /// The middle of the lengths that it chooses from.
        tau: f32,
    },
}

impl Controller {
    /// The length of the next jump after so many that were accepted; none if there is none. `chosen` is what a controller that
    /// learns has chosen.
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
        assert_eq!(lengths(Controller::Constant { tau: 3.0 }), [3.0]);
        let search = |growth| Controller::LineSearch { tau: 0.5, growth, jumps: 4 };
        assert_eq!(lengths(search(1.0)), [0.5; 4]);
        assert_eq!(lengths(search(2.0)), [0.5, 1.0, 2.0, 4.0]);
        assert_eq!(lengths(Controller::Rssm { tau: 3.0 }), [0.75], "as it was chosen");
    }
}
