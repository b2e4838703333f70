use super::{Finished, RunError};
use crate::{
    Alarm, Guess, Judgement, Jump, Phase, Prediction, RankFigures, TrainError, Trainer, UpdatesSeen,
};
use std::path::Path;
use storm_device::{PlanDevice, Trace};
use storm_exec::ExecError;
use storm_model::Unit;
use storm_plan::{PerTier, Plan};

/// A finished step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepEvent {
    /// Step number, from 1.
    pub step: u64,
    /// Before the update.
    pub loss: f32,
    /// Fraction of targets predicted correctly, for a classifier.
    pub accuracy: Option<f32>,
    /// Before clipping.
    pub gradient_norm: f32,
    /// Learning rate of the update.
    pub learning_rate: f32,
    /// The unit of the model's input: tokens or images.
    pub unit: Unit,
    /// Units read in this step.
    pub step_units: u64,
    /// Units read in all steps.
    pub units: u64,
    /// Time from requesting data to the loss.
    pub seconds: f64,
    /// Part of `seconds` spent waiting for data.
    pub data_wait_seconds: f64,
    /// Phase of the step, in a run that predicts.
    pub phase: Option<Phase>,
}

/// Any other event of a run.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// Steps are about to start, from after `step` to `steps`.
    Started {
        /// Steps made before.
        step: u64,
        /// Steps of the whole run.
        steps: u64,
    },
    /// A checkpoint was skipped on resume.
    CheckpointSkipped {
        /// Its step.
        step: u64,
        /// Why it cannot be used.
        problem: &'a str,
    },
    /// The run resumes on another device or with other libraries than it was saved with, so bits may differ.
    DeviceChanged {
        /// Device and libraries then.
        before: &'a str,
        /// Device and libraries now.
        now: &'a str,
    },
    /// The model was evaluated on held-out data.
    Evaluated {
        /// The last step before it.
        step: u64,
        /// Mean over all targets.
        loss: f64,
        /// Fraction of targets predicted correctly, for a classifier.
        accuracy: Option<f64>,
        /// Whether this is the best evaluation so far.
        is_best: bool,
        /// Time it took.
        seconds: f64,
    },
    /// The model was tested on held-out data that evaluations do not read.
    Tested {
        /// The last step before it.
        step: u64,
        /// The first held-out row that was read, and the one behind the last.
        rows: [u64; 2],
        /// Mean over all targets.
        loss: f64,
        /// Fraction of targets predicted correctly, for a classifier.
        accuracy: Option<f64>,
        /// Time it took.
        seconds: f64,
    },
    /// The model classified a fixed set of images after an evaluation.
    Viewed {
        /// The last step before it.
        step: u64,
        /// The model's guess for each image.
        guesses: &'a [Guess],
        /// Time it took.
        seconds: f64,
    },
    /// The run prepared a prediction: copied weights, or measured a held-out loss for the trend.
    PredictionPrepared {
        /// The last step before it.
        step: u64,
        /// Time it took.
        seconds: f64,
    },
    /// A learned controller received statistics about the update of the step before.
    UpdatesSeen {
        /// The last step before it.
        step: u64,
        /// The statistics, by parameter group.
        updates: UpdatesSeen,
    },
    /// A jump moved the weights along a direction, and back if it did not help.
    Jumped {
        /// The last step before it.
        step: u64,
        /// The jump's length and outcome.
        jump: Jump,
    },
    /// All jumps between two steps were made.
    Predicted {
        /// The last step before them.
        step: u64,
        /// Their overall result.
        prediction: Prediction,
    },
    /// The correction steps after jumps are done: the jumps were kept, or were undone together with these steps.
    PredictionJudged {
        /// The last of these steps.
        step: u64,
        /// The decision.
        judgement: Judgement,
    },
    /// Steps wait for data: reading is slower than computing. Reported once.
    DataLimited {
        /// The last step.
        step: u64,
        /// Fraction of the time of recent steps spent waiting.
        wait_share: f64,
        /// How fast data is read, in bytes of model input.
        bytes_per_second: f64,
    },
    /// Timings of ranks for a step that they made together. Reported for one step per half second.
    Ranks {
        /// The step.
        step: u64,
        /// Some or all ranks, in order.
        ranks: &'a [RankFigures],
    },
    /// A stop was requested on another rank. A checkpoint follows, and the run ends.
    StopOnRank {
        /// The last step.
        step: u64,
        /// The rank.
        rank: u32,
    },
    /// Device memory is not as planned. If the alarm is critical, a checkpoint follows.
    MemoryAlarm {
        /// The last step before it.
        step: u64,
        /// The rank whose memory it is, if there are several.
        rank: Option<u32>,
        /// What is wrong.
        alarm: Alarm,
    },
    /// A checkpoint is about to be written.
    Saving {
        /// Its step.
        step: u64,
    },
    /// A checkpoint is on disk.
    Saved {
        /// Its step.
        step: u64,
        /// Its folder.
        path: &'a Path,
        /// Time to write it.
        seconds: f64,
        /// Time that steps were paused for it.
        pause_seconds: f64,
        /// Part of `pause_seconds` spent waiting for the checkpoint before it, which was still being written.
        before_seconds: f64,
    },
    /// A checkpoint could not be written, in a run that ends for another reason.
    SaveFailed {
        /// Its step.
        step: u64,
        /// The cause.
        problem: &'a str,
    },
    /// The run has ended.
    Finished(&'a Finished),
    /// The trained model generated text.
    Sampled {
        /// The last step before it.
        step: u64,
        /// The prompt.
        prompt: &'a str,
        /// The generated continuation.
        text: &'a str,
    },
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// All steps were made.
    Completed,
    /// A stop was requested.
    Requested,
    /// Evaluations stopped improving.
    NoGain,
    /// Device memory ran short: the run can resume from its checkpoint with a plan that needs less.
    MemoryShort(Alarm),
}

/// What an observer can inspect after a step.
pub trait Observed {
    /// The current plan.
    fn plan(&self) -> &Plan;

    /// Memory allocated in each tier.
    fn memory_taken(&self) -> PerTier<usize>;

    /// Device memory the process holds, as reported by the driver where there is one.
    ///
    /// # Errors
    /// From the driver.
    fn device_bytes_in_use(&self) -> Result<u64, RunError>;

    /// Time and memory of all ranks in the last step; empty in a run with one rank.
    fn ranks(&self) -> &[RankFigures];

    /// Turns recording of steps on or off. Has no effect where recording is free and always on.
    fn set_recording(&mut self, recording: bool);

    /// The trace of the last recorded step; `None` if the device does not record. Waits until the queues are empty.
    ///
    /// # Errors
    /// From the device.
    fn trace(&mut self) -> Result<Option<Trace>, RunError>;
}

impl<D: PlanDevice> Observed for Trainer<D> {
    fn plan(&self) -> &Plan {
        Trainer::plan(self)
    }

    fn memory_taken(&self) -> PerTier<usize> {
        Trainer::memory_taken(self)
    }

    fn device_bytes_in_use(&self) -> Result<u64, RunError> {
        let in_use = self.device().memory_in_use_bytes().map_err(ExecError::from);
        Ok(in_use.map_err(TrainError::from)?)
    }

    fn ranks(&self) -> &[RankFigures] {
        self.rank_figures()
    }

    fn set_recording(&mut self, recording: bool) {
        Trainer::set_recording(self, recording);
    }

    fn trace(&mut self) -> Result<Option<Trace>, RunError> {
        Ok(Trainer::trace(self)?)
    }
}

/// Receives the events of a run. An error ends the run.
pub trait Observer {
    /// Called after every step.
    ///
    /// # Errors
    /// The observer failed, for example to write to a file.
    fn step(&mut self, step: &StepEvent, observed: &mut dyn Observed) -> Result<(), RunError>;

    /// Called for every other event.
    ///
    /// # Errors
    /// Like [`Observer::step`].
    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError>;
}
