use super::{GuessedSplit, StepPlan};
use crate::Initialized;
use storm_plan::Budget;

/// Progress of a launch, to show to the user.
#[derive(Clone, Copy, Debug)]
pub enum Notice<'a> {
    /// The launch starts to commit this plan to the device.
    Committing(&'a StepPlan),
    /// The model's parameters are being initialized.
    Initializing(Initialized),
    /// A trainer with this plan is ready.
    Committed(&'a StepPlan),
    /// The machine refused memory; a smaller plan follows.
    Refused {
        /// Who refused it, and why.
        reason: &'a str,
        /// The budget for the next plan.
        budget: Budget,
    },
    /// The launch starts timing steps of this plan.
    Trying(&'a StepPlan),
    /// A micro-batch size could not be tried; the launch continues with others.
    NotTried {
        /// The size.
        split: &'a GuessedSplit,
        /// Why it failed.
        reason: &'a str,
    },
    /// Steps did not take as long as predicted, so the profile was corrected.
    Corrected(&'a Correction),
}

/// A wrong prediction and its correction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Correction {
    /// Measured time of a step.
    pub measured_seconds: f64,
    /// Predicted time of a step.
    pub predicted_seconds: f64,
    /// Predicted time of a step of the final plan, with the corrected profile.
    pub corrected_seconds: f64,
    /// How the final plan was chosen.
    pub outcome: Replanned,
}

/// The result of replanning with a corrected profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replanned {
    /// The same decisions.
    Same,
    /// Another plan, which was not slower.
    Other,
    /// Another plan, which was slower, so the earlier one stays.
    Kept,
}
