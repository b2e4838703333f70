use super::{GuessedSplit, StepPlan};
use crate::Initialized;
use storm_plan::Budget;

/// What happens while a launch goes on, for people.
#[derive(Clone, Copy, Debug)]
pub enum Notice<'a> {
    /// This plan is about to be put on the device.
    Committing(&'a StepPlan),
    /// Parameters of the model are being made.
    Initializing(Initialized),
    /// A trainer is ready under the plan.
    Committed(&'a StepPlan),
    /// The machine refused the memory; a plan within less follows.
    Refused {
        /// By whom and why.
        reason: &'a str,
        /// What is planned with now.
        budget: Budget,
    },
    /// Some steps are about to be made to see how long they take.
    Trying(&'a StepPlan),
    /// A size of micro-batches could not be tried: the launch goes on with others.
    NotTried {
        /// Which.
        split: &'a GuessedSplit,
        /// Why not.
        reason: &'a str,
    },
    /// Steps did not take as long as predicted: the profile was corrected.
    Corrected(&'a Correction),
}

/// A prediction that did not hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Correction {
    /// What a step took.
    pub measured_seconds: f64,
    /// What it should have taken.
    pub predicted_seconds: f64,
    /// What a step of the plan that stays is predicted to take now.
    pub corrected_seconds: f64,
    /// Which plan that is.
    pub outcome: Replanned,
}

/// What planning with a corrected profile came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replanned {
    /// To the same decisions.
    Same,
    /// To another plan, which was not slower.
    Other,
    /// To another plan, which was slower: the one before stays.
    Kept,
}
