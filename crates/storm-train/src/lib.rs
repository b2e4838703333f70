//! The training step and the loop around it.
//!
//! [`Trainer`] runs steps of one or more micro-batches under a plan, within a memory budget. The loss of
//! a step is normalized by the valid tokens of the whole step, so every token has the same weight, however
//! long its micro-batch is. [`Run`] is the loop around the trainer, with schedules, evaluation and
//! checkpoints. [`ReferenceTrainer`] keeps everything in device memory and needs no plan: tests,
//! `storm verify` and comparisons check the trainer against it, bit by bit.
//!
//! # Custom models
//!
//! A model comes from a config ([`training_task`], [`Trainer::new`]) or is built layer by layer
//! ([`task_of_program`], [`Trainer::of_program`]):
//!
//! ```
#![doc = include_str!("../examples/custom_model.rs")]
//! ```

mod any_batch;
mod base_hash;
mod batch;
mod checkpoint;
mod choose;
mod data;
mod decode;
mod error;
mod evaluation;
mod feed;
mod forward;
mod generate;
mod guard;
mod inference;
mod input_rules;
mod launch;
mod losses;
mod micro_batch;
mod moments;
mod optimizer;
mod precision;
mod predict;
mod ranks;
mod record;
mod records;
mod reference;
mod run;
mod schedule;
mod staging;
mod task;
mod trainer;
mod unwritten;
mod viewer;
mod weights;

pub use any_batch::AnyBatch;
pub use base_hash::base_hash;
pub use batch::Batch;
pub use checkpoint::{
    Begun, Best, CheckpointError, Checkpoints, Disk, FileEntry, Keep, OutputFile, Progress,
    Retention, Saved, SavedWeights, Saver, Snapshot, StatePart, StateTensor, Storage,
    TrainingState, Verified, checkpoint_bytes,
};
pub use data::LoaderSource;
pub use decode::{Decoder, decoding_task};
pub use error::TrainError;
pub use evaluation::{Evaluation, evaluation_task};
pub use generate::{Generator, Sampling};
pub use guard::{Alarm, Guard, MemoryReading};
pub use inference::Inference;
pub use launch::{
    Correction, GuessedSplit, Launch, LaunchRequest, LaunchSite, Launched, Notice, Replanned,
    Shrunk, StepPlan, StepSize, TimedSplit, Trial, TrialOptions, try_plan,
};
pub use losses::{Found, Losses};
pub use micro_batch::{Entries, MicroBatch, NamedInputs, Values};
pub use moments::Moments;
pub use optimizer::{DecayTargets, OptimizerMethod, OptimizerOptions};
pub use precision::Precision;
pub use predict::{
    Accept, Controller, Direction, Expectation, Judgement, Jump, ParameterGroup, Phase,
    PhaseLengths, PredictOptions, PredictState, Prediction, PredictionCost, ProbeDevice,
    ProbeWeights, UpdateSeen, UpdatesSeen, Verdict, predict_bytes, predict_saved_bytes,
    prediction_seconds,
};
pub use ranks::{Exchange, Flat, Heard, RankFigures, Ranks};
pub use record::{
    Evaluated, History, LastPlan, Measure, MetricsFile, Part, PhaseTotals, Picture, Pictures,
    PlanFacts, Predictions, Recorder, RunFacts, Sample, Shown, Sink, StepRecord, TensorBoardFile,
    Tested, Throughput, View, read_metrics, write_report,
};
pub use records::RecordSource;
pub use reference::{ReferenceTrainer, StepReport, TrainOptions};
pub use run::{
    BatchSource, Event, Finished, Observed, Observer, OnAlarm, Run, RunError, RunOptions,
    StepEvent, Stop, StopReason,
};
pub use schedule::{Decay, Schedule};
pub use task::{MICRO_BATCHES_MAX, rank_task, task_of_program, training_task};
pub use trainer::{Initialized, NextStep, SourceStep, Trainer};
pub use viewer::{Guess, Viewer};
