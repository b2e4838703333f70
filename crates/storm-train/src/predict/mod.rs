//! Predictive training: between full steps, weights are extrapolated along their recent direction,
//! without a backward pass. Jumps that do not lower the loss on held-out data are undone, bit for
//! bit.
//!
//! [`phases`] is the schedule of phases, [`direction`] the direction of a jump, [`modes`] the
//! linear algebra of one direction, [`jump`] the arithmetic of θ + τ·d, [`controller`] the length
//! of a jump, [`rssm`] the learned controller, [`updates`] the update statistics that it observes,
//! and [`paired`] the test of whether a loss fell. [`copies`] is the host memory, [`write`] writes
//! weights from it, [`held_out`] measures losses ([`int8`] with matrices in 8 bits), and
//! [`predictor`] runs predictions with a trainer.

mod controller;
mod copies;
mod direction;
mod held_out;
mod int8;
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
mod write;

pub use controller::{Controller, PredictionCost};
pub use copies::{predict_bytes, predict_saved_bytes};
pub use direction::Direction;
pub use int8::ProbeDevice;
pub use options::{Accept, PredictOptions, ProbeWeights};
pub use phases::{Phase, PhaseLengths};
pub(crate) use predictor::{BackTo, Made, Predictor};
pub use predictor::{Judgement, Jump, Prediction, Verdict, prediction_seconds};
pub(crate) use rssm::Calibration;
pub use rssm::Expectation;
pub use state::PredictState;
pub use updates::{ParameterGroup, UpdateSeen, UpdatesSeen};
