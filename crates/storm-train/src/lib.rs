//! The training step: batches in, losses out, parameters updated.
//!
//! [`Trainer`] puts a model's program, its gradients and its optimizer on a device and runs steps of
//! one or more micro-batches. The loss of a step is normalized by the valid tokens of the whole
//! step, so that micro-batches of unequal length weigh as they should. [`PlannedTrainer`] does the same
//! under a plan, within a memory budget, and gives bitwise the same; [`Run`] is the loop around it, with
//! schedules, evaluation and checkpoints.
//!
//! # A model of one's own
//!
//! Models come from a config ([`training_task`], [`PlannedTrainer::new`]) or are built layer by layer
//! ([`task_of_program`], [`PlannedTrainer::of_program`]):
//!
//! ```
#![doc = include_str!("../examples/custom_model.rs")]
//! ```

mod batch;
mod checkpoint;
mod column;
mod data;
mod decode;
mod error;
mod evaluation;
mod forward;
mod generate;
mod guard;
mod inference;
mod micro_batch;
mod optimizer;
mod planned;
mod precision;
mod prepare;
mod record;
mod run;
mod schedule;
mod task;
mod trainer;
mod trial;
mod verify;
mod verify_plans;
mod weights;

pub use batch::Batch;
pub use checkpoint::{
    Begun, Best, CheckpointError, Checkpoints, Disk, Keep, OutputFile, Progress, Retention, Saved,
    SavedWeights, Saver, Snapshot, StatePart, StateTensor, Storage, TrainingState, Verified,
    checkpoint_bytes,
};
pub use data::LoaderSource;
pub use decode::Decoder;
pub use error::TrainError;
pub use evaluation::Evaluation;
pub use generate::{Generator, Sampling};
pub use guard::{Alarm, Guard, MemoryReading};
pub use inference::Inference;
pub use micro_batch::{MicroBatch, TriedBatch, choose_micro_batch};
pub use optimizer::{DecayTargets, OptimizerOptions};
pub use planned::PlannedTrainer;
pub use precision::Precision;
pub use prepare::{Notice, Preparation, Prepared, prepare};
pub use record::{
    History, Measure, MetricsFile, Recorder, RunFacts, Sink, StepRecord, TensorBoardFile,
    read_metrics, rewrite_report, write_report,
};
pub use run::{
    BatchSource, Event, Finished, Observed, Observer, OnAlarm, Run, RunError, RunOptions,
    StepEvent, Stop, StopReason,
};
pub use schedule::{Decay, Schedule};
pub use task::{MICRO_BATCHES_MAX, task_of_program, training_task};
pub use trainer::{StepReport, TrainOptions, Trainer};
pub use trial::{Trial, try_plan};
pub use verify::{ModelReport, verify_models};
pub use verify_plans::{PlanReport, verify_plans};
