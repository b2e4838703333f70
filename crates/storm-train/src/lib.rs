//! The training step: batches in, losses out, parameters updated.
//!
//! [`Trainer`] puts a model's program, its gradients and its optimizer on a device and runs steps of
//! one or more micro-batches. The loss of a step is normalized by the valid tokens of the whole
//! step, so that micro-batches of unequal length weigh as they should.

mod batch;
mod column;
mod error;
mod inference;
mod micro_batch;
mod optimizer;
mod planned;
mod precision;
mod prepare;
mod task;
mod trainer;
mod verify;
mod verify_plans;
mod weights;

pub use batch::Batch;
pub use error::TrainError;
pub use inference::Inference;
pub use micro_batch::{MicroBatch, TriedBatch, choose_micro_batch};
pub use optimizer::{DecayTargets, OptimizerOptions};
pub use planned::PlannedTrainer;
pub use precision::Precision;
pub use prepare::{Notice, Preparation, Prepared, prepare};
pub use task::{task_of_program, training_task};
pub use trainer::{StepReport, TrainOptions, Trainer};
pub use verify::{ModelReport, verify_models};
pub use verify_plans::{PlanReport, verify_plans};
