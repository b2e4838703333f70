//! Predictive training: between full steps, weights move along the direction in which they went, without a backward
//! pass. What does not lower the loss on held-out data is undone, bit by bit.
//!
//! [`phases`] is the order of phases, [`direction`] where weights go, [`modes`] one of its rules, [`jump`] the arithmetic of θ + τ·d, [`controller`]
//! how far, [`rssm`] is the controller that learns, [`updates`] is what it sees of updates, and [`paired`] says whether a loss fell. All of these are pure. [`copies`] is the host memory that it takes, and
//! [`predictor`] does it with a trainer.

mod controller;
mod copies;
mod direction;
mod jump;
mod modes;
mod options;
mod paired;
mod phases;
mod predictor;
mod probe;
mod rssm;
mod state;
mod updates;

pub use controller::Controller;
pub use copies::predict_bytes;
pub use direction::Direction;
pub use options::{Accept, PredictOptions};
pub use phases::{Phase, PhaseLengths};
pub(crate) use predictor::{BackTo, Made, Predictor};
pub use predictor::{Judgement, Jump, Prediction, Verdict};
pub(crate) use rssm::Calibration;
pub use rssm::Expectation;
pub use state::PredictState;
pub use updates::{ParameterGroup, UpdateSeen, UpdatesSeen};
