use super::{Finished, RunError};
use crate::{
    Alarm, Guess, Judgement, Jump, Phase, Prediction, RankFigures, TrainError, Trainer, UpdatesSeen,
};
use std::path::Path;
use storm_device::{PlanDevice, Trace};
use storm_exec::ExecError;
use storm_model::Unit;
use storm_plan::{PerTier, Plan};

/// A step that was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepEvent {
    /// Its number; the first is 1.
    pub step: u64,
    /// Before the update.
    pub loss: f32,
    /// Share of its targets that the model found, for one that classifies.
    pub accuracy: Option<f32>,
    /// Before clipping.
    pub gradient_norm: f32,
    /// It was applied with.
    pub learning_rate: f32,
    /// What the model reads.
    pub unit: Unit,
    /// Read in this step.
    pub step_units: u64,
    /// Read in all steps.
    pub units: u64,
    /// From asking for data to the loss.
    pub seconds: f64,
    /// Of these, how long it waited for data that was not read yet.
    pub data_wait_seconds: f64,
    /// That it belongs to, in a run that predicts.
    pub phase: Option<Phase>,
}

/// Anything else that happened.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// Steps are about to be made, from after `step` to `steps`.
    Started {
        /// Made before.
        step: u64,
        /// Of the whole run.
        steps: u64,
    },
    /// A checkpoint was passed over on resume.
    CheckpointSkipped {
        /// Its step.
        step: u64,
        /// Why it cannot be used.
        problem: &'a str,
    },
    /// The run goes on with something else than what it was saved with: bits may differ.
    DeviceChanged {
        /// Device and libraries then.
        before: &'a str,
        /// And now.
        now: &'a str,
    },
    /// Held-out data was looked at.
    Evaluated {
        /// After which step.
        step: u64,
        /// Mean over its targets.
        loss: f64,
        /// Share of them that the model found, for one that classifies.
        accuracy: Option<f64>,
        /// Whether no evaluation before was as good.
        is_best: bool,
        /// What it took.
        seconds: f64,
    },
    /// The model classified a fixed set of pictures after an evaluation.
    Viewed {
        /// After which step.
        step: u64,
        /// What it takes each for.
        guesses: &'a [Guess],
        /// What it took.
        seconds: f64,
    },
    /// A prediction was prepared: weights were copied, or a held-out loss was measured for the trend.
    PredictionPrepared {
        /// After which step.
        step: u64,
        /// What it took.
        seconds: f64,
    },
    /// A controller that learns saw what the update of the step before was like.
    UpdatesSeen {
        /// After which step.
        step: u64,
        /// By group of parameters.
        updates: UpdatesSeen,
    },
    /// Weights moved along a direction, and back if that did not help.
    Jumped {
        /// After which step.
        step: u64,
        /// How far, and what became of it.
        jump: Jump,
    },
    /// All jumps between two steps were made.
    Predicted {
        /// After which step.
        step: u64,
        /// What they came to.
        prediction: Prediction,
    },
    /// The steps after jumps were made: the jumps stay, or were undone with these steps.
    PredictionJudged {
        /// After which step.
        step: u64,
        /// Which of both.
        judgement: Judgement,
    },
    /// Steps wait for data: it is read more slowly than the device computes. Told once.
    DataLimited {
        /// After which step.
        step: u64,
        /// Share of the time of the last steps that they waited.
        wait_share: f64,
        /// How fast data is read, as the inputs of the model.
        bytes_per_second: f64,
    },
    /// What ranks took for a step that they made together. Told of one step in half a second.
    Ranks {
        /// Which step.
        step: u64,
        /// Some or all of them, in order.
        ranks: &'a [RankFigures],
    },
    /// Device memory is not as planned. If that is critical, a checkpoint follows.
    MemoryAlarm {
        /// After which step.
        step: u64,
        /// What is wrong.
        alarm: Alarm,
    },
    /// A checkpoint is about to be written.
    Saving {
        /// Of which step.
        step: u64,
    },
    /// A checkpoint is on the disk.
    Saved {
        /// Of which step.
        step: u64,
        /// Its folder.
        path: &'a Path,
        /// From its first byte to its last.
        seconds: f64,
        /// How long steps waited.
        pause_seconds: f64,
        /// Of these, for the checkpoint before it, which was still being written.
        before_seconds: f64,
    },
    /// A checkpoint could not be written, in a run that ends for another reason.
    SaveFailed {
        /// Of which step.
        step: u64,
        /// Why not.
        problem: &'a str,
    },
    /// The run is over.
    Finished(&'a Finished),
    /// The trained model wrote some text.
    Sampled {
        /// After which step.
        step: u64,
        /// What it begins with.
        prompt: &'a str,
        /// How the model goes on.
        text: &'a str,
    },
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// All steps were made.
    Completed,
    /// It was asked to stop.
    Requested,
    /// Evaluations did not get better any more.
    NoGain,
    /// Device memory got short: the run can go on from its checkpoint under a plan that needs less.
    MemoryShort(Alarm),
}

/// What an observer may look at after a step.
pub trait Observed {
    /// What runs.
    fn plan(&self) -> &Plan;

    /// What is taken in each tier.
    fn memory_taken(&self) -> PerTier<usize>;

    /// Device memory that the process holds, as the driver counts it where there is one.
    ///
    /// # Errors
    /// From the driver.
    fn device_bytes_in_use(&self) -> Result<u64, RunError>;

    /// Time and memory of all ranks in the last step; empty if one made it alone.
    fn ranks(&self) -> &[RankFigures];

    /// Whether steps from now on are recorded; where that costs nothing, they are anyway.
    fn set_recording(&mut self, recording: bool);

    /// What the queues did in the step that was recorded last; none if the device does not record.
    /// Waits until the queues are empty.
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

/// Whoever wants to know what a run does. An error ends the run.
pub trait Observer {
    /// A step was made.
    ///
    /// # Errors
    /// What is to be told cannot be told, to a file for example.
    fn step(&mut self, step: &StepEvent, observed: &mut dyn Observed) -> Result<(), RunError>;

    /// Something else happened.
    ///
    /// # Errors
    /// As [`Observer::step`].
    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError>;
}
