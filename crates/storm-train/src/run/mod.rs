//! A training run from its first step to its last: data, steps, evaluations, checkpoints.
//!
//! A [`Run`] owns everything that changes, and reports to an [`Observer`]. What it does at a step depends only on the
//! step's number and on saved state, so that a run that stops and resumes is identical to one that never stopped.

mod data_watch;
mod error;
mod evaluate;
mod event;
mod finite;
mod memory;
mod predict;
mod save;
mod source;
mod stop;

pub use error::RunError;
pub use event::{Event, Observed, Observer, StepEvent, StopReason};
pub use source::BatchSource;
pub use stop::Stop;

use crate::predict::Predictor;
use crate::staging::Rate;
use crate::trainer::{NextStep, SourceStep};
use crate::{
    AnyBatch, Best, Checkpoints, Disk, Guard, Progress, Retention, Saver, Schedule, Storage,
    Trainer, TrainingState, Verified, Viewer,
};
use data_watch::DataWatch;
use memory::Watch;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;
use storm_data::records::LoaderStatistics;
use storm_device::PlanDevice;

/// The schedule and settings of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunOptions {
    /// Steps of the whole run.
    pub steps: u64,
    /// The learning-rate schedule.
    pub schedule: Schedule,
    /// Steps between evaluations; `None` evaluates only at the end.
    pub evaluate_every: Option<u64>,
    /// Most held-out data per evaluation, in steps' worth.
    pub evaluation_steps: u64,
    /// Ends the run after this many evaluations in a row without improvement.
    pub patience: Option<u32>,
    /// Steps between checkpoints; `None` saves only at the end.
    pub save_every: Option<u64>,
    /// Which checkpoints to keep.
    pub retention: Retention,
    /// Whether to save a checkpoint of the best evaluation.
    pub keep_best: bool,
    /// Every setting, recorded in checkpoints.
    pub settings: BTreeMap<String, String>,
    /// The device and its libraries, recorded in checkpoints.
    pub device: String,
}

/// A training run: the trainer, its data and its checkpoints.
pub struct Run<D: PlanDevice, S: Storage = Disk> {
    trainer: Trainer<D>,
    held_out: Option<Box<dyn BatchSource>>,
    saver: Saver<S>,
    options: RunOptions,
    progress: Progress,
    /// Micro-batch buffers for evaluations, reused.
    batches: Vec<AnyBatch>,
    /// The step of the newest checkpoint known to be on disk.
    saved: Option<u64>,
    /// How long steps waited for the checkpoint being written.
    pause: save::Pause,
    watch: Option<Watch>,
    on_alarm: OnAlarm,
    data_watch: DataWatch,
    predictor: Option<Predictor<D>>,
    viewer: Option<Viewer>,
}

/// What to do after saving a run because device memory ran short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnAlarm {
    /// Continue with the same plan.
    GoOn,
    /// Stop, so that the run can resume with a plan that needs less.
    Stop,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why it ended.
    pub reason: StopReason,
    /// Steps made in total.
    pub step: u64,
    /// Loss of the last step; `None` if no step was made.
    pub loss: Option<f32>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
}

impl<D: PlanDevice, S: Storage> Run<D, S> {
    /// A run at step 0. `data` must be at its first micro-batch and `held_out` at its start.
    ///
    /// # Errors
    /// From earlier work of the device.
    pub fn new(
        mut trainer: Trainer<D>,
        data: Box<dyn BatchSource>,
        held_out: Option<Box<dyn BatchSource>>,
        checkpoints: Checkpoints<S>,
        options: RunOptions,
    ) -> Result<Run<D, S>, RunError> {
        let progress = Progress {
            step: 0,
            updates: 0,
            units: 0,
            data: data.position(),
            best: None,
            evaluations_without_gain: 0,
            settings: options.settings.clone(),
            device: options.device.clone(),
            predict: None,
        };
        trainer.exchange_source(Some(data))?;
        let batches = vec![AnyBatch::default(); trainer.micro_batches()];
        Ok(Run {
            trainer,
            held_out,
            saver: Saver::new(checkpoints),
            options,
            progress,
            batches,
            saved: None,
            pause: save::Pause::default(),
            watch: None,
            on_alarm: OnAlarm::GoOn,
            data_watch: DataWatch::default(),
            predictor: None,
            viewer: None,
        })
    }

    /// Watches device memory from now on.
    pub fn watch(&mut self, guard: Guard, on_alarm: OnAlarm) {
        (self.watch, self.on_alarm) = (Some(Watch::new(guard)), on_alarm);
    }

    /// Classifies sample images after every evaluation.
    pub fn view(&mut self, viewer: Viewer) {
        self.viewer = Some(viewer);
    }

    /// Resumes from the newest usable checkpoint and returns its step; `None` if there is no checkpoint.
    ///
    /// # Errors
    /// Checkpoints exist but none is usable, one belongs to another run, the data changed, or from the device.
    pub fn resume(&mut self, observer: &mut dyn Observer) -> Result<Option<u64>, RunError> {
        let tensors = match &mut self.predictor {
            Some(predictor) => predictor.with_copies(&mut self.trainer).tensors(),
            None => TrainingState::tensors(&self.trainer),
        };
        let mut skipped = Vec::new();
        let checkpoints = self.saver.checkpoints();
        let newest =
            checkpoints.newest(&tensors, |step, error| skipped.push((step, error.to_string())));
        for (step, problem) in skipped {
            observer.event(&Event::CheckpointSkipped { step, problem: &problem })?;
        }
        let Some(verified) = newest? else { return Ok(None) };
        if verified.progress().device != self.options.device {
            observer.event(&Event::DeviceChanged {
                before: &verified.progress().device,
                now: &self.options.device,
            })?;
        }
        self.restore(&verified)?;
        Ok(Some(self.progress.step))
    }

    fn restore(&mut self, verified: &Verified) -> Result<(), RunError> {
        match &mut self.predictor {
            Some(predictor) => verified.restore(&mut predictor.with_copies(&mut self.trainer))?,
            None => verified.restore(&mut self.trainer)?,
        }
        self.restore_predictions(verified)?;
        self.trainer.resume_source(&verified.progress().data)?;
        self.progress = Progress {
            settings: self.options.settings.clone(),
            device: self.options.device.clone(),
            ..verified.progress().clone()
        };
        self.saved = Some(self.progress.step);
        Ok(())
    }

    /// Makes the remaining steps, until `stop` is requested. On success there is a checkpoint of the last step. In any
    /// case, no checkpoint is still being written on return.
    ///
    /// # Errors
    /// A non-finite loss or gradient, or from data, device or disk. Earlier checkpoints stay.
    pub fn train(
        &mut self,
        stop: &Stop,
        observer: &mut dyn Observer,
    ) -> Result<Finished, RunError> {
        let finished = self.go_on(stop, observer);
        if finished.is_err() {
            self.settle(observer);
        }
        finished
    }

    fn go_on(&mut self, stop: &Stop, observer: &mut dyn Observer) -> Result<Finished, RunError> {
        observer.event(&Event::Started { step: self.progress.step, steps: self.options.steps })?;
        let mut loss = None;
        let reason = loop {
            if self.progress.step >= self.options.steps {
                break StopReason::Completed;
            }
            if stop.is_requested() {
                break StopReason::Requested;
            }
            if let Some(rank) = self.trainer.stopping_rank() {
                observer.event(&Event::StopOnRank { step: self.progress.step, rank })?;
                break StopReason::Requested;
            }
            if self.is_out_of_patience() {
                break StopReason::NoGain;
            }
            if let Some(made) = self.step(observer)? {
                loss = Some(made.loss);
                self.look_at_predictions(made, observer)?;
            }
            self.look_at_save(observer)?;
            let step = self.progress.step;
            let is_last = step == self.options.steps;
            let due = |every: Option<u64>| every.is_some_and(|every| step.is_multiple_of(every));
            let mut is_best = false;
            if due(self.options.evaluate_every) || is_last {
                is_best = self.evaluate(observer)?;
            }
            let critical = self.look_at_memory(observer)?;
            if critical.is_some()
                || due(self.options.save_every)
                || (is_best && self.options.keep_best)
            {
                self.save(observer)?;
            }
            if critical.is_some() {
                // Wait for the save: whoever takes the memory may kill this process at any moment.
                self.finish_save(observer)?;
            }
            if let Some(alarm) = critical.filter(|_| self.on_alarm == OnAlarm::Stop && !is_last) {
                break StopReason::MemoryShort(alarm);
            }
        };
        self.finish_save(observer)?;
        if self.saved != Some(self.progress.step) {
            self.save(observer)?;
            self.finish_save(observer)?;
        }
        let Progress { step, best, .. } = self.progress;
        let checkpoint = self.saver.checkpoints().path(step);
        let finished = Finished { reason, step, loss, best, checkpoint };
        observer.event(&Event::Finished(&finished))?;
        Ok(finished)
    }

    /// Makes one step. `None` if it was undone at once, together with the jumps before it.
    fn step(&mut self, observer: &mut dyn Observer) -> Result<Option<StepEvent>, RunError> {
        let start = Instant::now();
        let learning_rate = self.options.schedule.rate(self.progress.step);
        let step = self.progress.step + 1;
        let next = if step < self.options.steps { NextStep::Follows } else { NextStep::None };
        let made = self.trainer.step_from_source(learning_rate, next)?;
        let SourceStep { report, data, wait_seconds } = made;
        if !(report.loss.is_finite() && report.gradient_norm.is_finite()) {
            if self.recover(step, observer)? {
                self.progress.step = step;
                return Ok(None);
            }
            let culprit = finite::first_bad(&mut self.trainer, report)?;
            self.settle(observer);
            let checkpoint = self.saved.map(|step| self.saver.checkpoints().path(step));
            let partly_updated = self.trainer.is_partly_updated();
            return Err(RunError::NotFinite { step, report, culprit, partly_updated, checkpoint });
        }
        if let Some(predictor) = &mut self.predictor {
            predictor.see_updates(&mut self.trainer)?;
        }
        let units = data.units as u64;
        self.progress.step = step;
        self.progress.updates = self.trainer.updates();
        self.progress.units += units;
        // The position after this step's data, before any data of the next.
        self.progress.data = data.position;
        let event = StepEvent {
            step,
            loss: report.loss,
            accuracy: report.accuracy,
            gradient_norm: report.gradient_norm,
            learning_rate,
            unit: self.trainer.unit(),
            step_units: units,
            units: self.progress.units,
            seconds: start.elapsed().as_secs_f64(),
            data_wait_seconds: wait_seconds,
            phase: self.predictor.as_ref().map(Predictor::phase),
        };
        observer.step(&event, &mut self.trainer)?;
        if let Some(wait_share) = self.data_watch.add(event.seconds, wait_seconds) {
            let Rate { bytes, seconds } = self.trainer.read_rate();
            let bytes_per_second = bytes as f64 / seconds.max(f64::MIN_POSITIVE);
            observer.event(&Event::DataLimited { step, wait_share, bytes_per_second })?;
        }
        Ok(Some(event))
    }

    fn is_out_of_patience(&self) -> bool {
        let without_gain = self.progress.evaluations_without_gain;
        self.options.patience.is_some_and(|patience| without_gain >= patience)
    }

    /// Makes a step that changes nothing, to observe things that only a running step shows.
    ///
    /// # Errors
    /// From data or device.
    pub fn rehearse(&mut self) -> Result<(), RunError> {
        let batches = &mut self.batches;
        self.trainer.borrow_source(|data| {
            let here = data.position();
            for batch in batches {
                data.next_batch(batch)?;
            }
            data.resume(&here)
        })?;
        self.trainer.evaluate(&self.batches)?;
        Ok(())
    }

    /// The progress of the run.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// The model.
    pub fn trainer(&mut self) -> &mut Trainer<D> {
        &mut self.trainer
    }

    /// Statistics of loading the training data since the run started, if they are counted.
    ///
    /// # Errors
    /// From the device, while data is still being read.
    pub fn loading(&mut self) -> Result<Option<LoaderStatistics>, RunError> {
        Ok(self.trainer.borrow_source(|data| Ok(data.statistics()))?.flatten())
    }

    /// Ends the run, and returns its trainer.
    pub fn into_trainer(self) -> Trainer<D> {
        self.trainer
    }

    /// Loads the model of the best evaluation, if that has a checkpoint. Returns whether it has.
    ///
    /// # Errors
    /// The checkpoint is unusable, or from the device.
    pub fn take_best(&mut self) -> Result<bool, RunError> {
        let Some(best) = self.progress.best.filter(|_| self.options.keep_best) else {
            return Ok(false);
        };
        let tensors = TrainingState::tensors(&self.trainer);
        let verified = self.saver.checkpoints().verify(best.step, &tensors)?;
        verified.restore(&mut self.trainer)?;
        Ok(true)
    }
}
