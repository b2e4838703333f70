//! Training under a memory budget, timed, beside what the plan predicted.

use super::run_args::RunArgs;
use crate::{progress, size};
use anyhow::{Context, Result};
use std::time::Instant;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_device::cuda::{CudaPlanDevice, CudaPlanOptions};
use storm_device::{PlanDevice, Trace};
use storm_model::ModelConfig;
use storm_plan::{Bottleneck, Budget, Decisions, HardwareProfile, Prediction, Tier};
use storm_train::{
    Batch, Notice, Preparation, Prepared, TrainOptions, Trainer, Trial, prepare, try_plan,
};

/// How many are timed.
const EVALUATIONS: usize = 3;

/// A training run to be timed.
pub(crate) struct PlannedRun<'a> {
    args: &'a RunArgs,
    pub(crate) config: ModelConfig,
    options: TrainOptions,
    pub(crate) budget: Budget,
    profile: HardwareProfile,
    batches: Vec<Batch>,
    /// Of the CPU device; none on a card.
    threads: Option<usize>,
}

/// What came of it.
pub(crate) struct Measured<D: PlanDevice> {
    pub(crate) trainer: Trainer<D>,
    /// The profile that the plan was made with: refined if it was off.
    pub(crate) profile: HardwareProfile,
    pub(crate) decisions: Decisions,
    pub(crate) prediction: Prediction,
    pub(crate) bottleneck: Bottleneck,
    pub(crate) step_seconds: f64,
    pub(crate) fastest_seconds: f64,
    /// Of the loss of a step's batches by forward passes alone.
    pub(crate) evaluation_seconds: f64,
    /// What the process holds of the device.
    pub(crate) vram_bytes: u64,
    pub(crate) loss: f32,
    /// A step after the timed ones, as the queues ran it.
    pub(crate) trace: Trace,
}

/// A device for benchmarks.
pub(crate) trait Benched: PlanDevice {
    /// Options for a run. A device of the run before may have something to keep.
    fn options(run: &PlannedRun<'_>, before: Option<Self>) -> Self::Options;

    /// What the process holds of it.
    fn vram_bytes(&self) -> Result<u64>;
}

impl Benched for CpuPlanDevice {
    fn options(run: &PlannedRun<'_>, _: Option<Self>) -> CpuPlanOptions {
        CpuPlanOptions { threads: run.threads, trace: true, ..CpuPlanOptions::default() }
    }

    fn vram_bytes(&self) -> Result<u64> {
        Ok(self.memory_taken()[Tier::DEVICE] as u64)
    }
}

impl Benched for CudaPlanDevice {
    fn options(run: &PlannedRun<'_>, before: Option<Self>) -> CudaPlanOptions {
        let show = |done: usize, all: usize| {
            let [done, all] = [done, all].map(|bytes| size::show(bytes as u64));
            progress::show(&format!("host memory: {done} of {all}"));
        };
        CudaPlanOptions {
            trace: true,
            vram_bytes: Some(run.budget[Tier::DEVICE]),
            copy_slowdown: run.args.slow_copies,
            multiprocessors: run.args.multiprocessors,
            progress: Some(Box::new(show)),
            // Host memory is slow to get. After an error of the card there is nothing to keep.
            kept: before.and_then(|device| device.keep().ok()),
            ..CudaPlanOptions::default()
        }
    }

    fn vram_bytes(&self) -> Result<u64> {
        Ok(self.memory_in_use()?.bytes)
    }
}

impl<'a> PlannedRun<'a> {
    pub(crate) fn new(args: &'a RunArgs, budget: Budget) -> Result<PlannedRun<'a>> {
        let config = args.config()?;
        Ok(PlannedRun {
            options: args.options(),
            budget,
            profile: args.profile(budget[Tier::DEVICE])?,
            batches: args.batches(&config)?,
            threads: args.threads()?,
            args,
            config,
        })
    }

    /// Plans, trains, and compares. If the first steps are not as predicted, it measures each
    /// instruction and plans once more.
    pub(crate) fn run<D: Benched>(&self, before: Option<D>) -> Result<Measured<D>> {
        let mut profile = self.profile.clone();
        let mut prepared = self.prepared(&profile, before)?;
        let predicted = prepared.prediction.step_seconds;
        if let Some(Trial { step_seconds, corrected: Some(corrected) }) =
            self.tried(&mut prepared.trainer, &profile, predicted)?
        {
            eprintln!(
                "a step takes {step_seconds:.3} s, not {predicted:.3}: planning with a corrected profile"
            );
            profile = corrected;
            prepared = self.prepared(&profile, Some(prepared.trainer.into_device()))?;
            self.tried(&mut prepared.trainer, &profile, prepared.prediction.step_seconds)?;
        }
        let Prepared { mut trainer, decisions, prediction, bottleneck } = prepared;
        let mut times = Vec::new();
        let mut loss = f32::NAN;
        for _ in 0..self.args.steps {
            let start = Instant::now();
            loss = trainer.step(&self.batches, 1e-5)?.loss;
            trainer.synchronize()?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(Measured {
            trace: self.recorded(&mut trainer)?,
            evaluation_seconds: self.evaluation_seconds(&mut trainer)?,
            vram_bytes: trainer.device().vram_bytes()?,
            step_seconds: times[times.len() / 2],
            fastest_seconds: times[0],
            trainer,
            profile,
            decisions,
            prediction,
            bottleneck,
            loss,
        })
    }

    /// A trainer that has made its first steps.
    pub(super) fn warm<D: Benched>(&self) -> Result<Trainer<D>> {
        let mut trainer = self.prepared(&self.profile, None)?.trainer;
        for _ in 0..self.args.warmup {
            self.step(&mut trainer)?;
        }
        Ok(trainer)
    }

    /// One step, to its end.
    pub(super) fn step<D: PlanDevice>(&self, trainer: &mut Trainer<D>) -> Result<()> {
        trainer.step(&self.batches, 1e-5)?;
        Ok(trainer.synchronize()?)
    }

    fn prepared<D: Benched>(
        &self,
        profile: &HardwareProfile,
        mut before: Option<D>,
    ) -> Result<Prepared<D>> {
        let begun = Instant::now();
        let preparation = Preparation {
            config: &self.config,
            options: &self.options,
            accumulate: self.args.accumulate,
            profile,
            budget: self.budget,
            forced: &self.args.forced.forced(),
        };
        let tell = |notice: Notice<'_>| {
            progress::show("");
            match notice {
                Notice::Planned(prediction) => eprintln!(
                    "planned for {}: {:.3} s a step in {} of device and {} of host memory",
                    profile.name,
                    prediction.step_seconds,
                    size::show(prediction.peak_bytes[Tier::DEVICE]),
                    size::show(prediction.peak_bytes[Tier::HOST]),
                ),
                Notice::Refused { reason, budget } => eprintln!(
                    "refused: {reason}\nplanning again within {} of device and {} of host memory",
                    size::show(budget[Tier::DEVICE]),
                    size::show(budget[Tier::HOST]),
                ),
            }
        };
        let device = || D::options(self, before.take());
        let prepared = prepare(&preparation, device, tell);
        progress::show("");
        let mut prepared = prepared.with_context(|| format!("cannot train {}", self.args.model))?;
        // It costs about a hundredth of a step's time on a GPU.
        prepared.trainer.set_recording(false);
        eprintln!("ready after {:.1} s", begun.elapsed().as_secs_f64());
        Ok(prepared)
    }

    /// Some steps that do not count, and what they show; none if none were asked for.
    fn tried<D: PlanDevice>(
        &self,
        trainer: &mut Trainer<D>,
        profile: &HardwareProfile,
        predicted_seconds: f64,
    ) -> Result<Option<Trial>> {
        let Some(before_timed) = self.args.warmup.checked_sub(1) else { return Ok(None) };
        let batches = &self.batches;
        Ok(Some(try_plan(trainer, batches, before_timed, profile, predicted_seconds)?))
    }

    /// How long the loss of a step's batches takes by forward passes alone.
    fn evaluation_seconds<D: PlanDevice>(&self, trainer: &mut Trainer<D>) -> Result<f64> {
        // The first applies the update that the last step left.
        trainer.evaluate(&self.batches)?;
        let mut times = Vec::new();
        for _ in 0..EVALUATIONS {
            let start = Instant::now();
            trainer.evaluate(&self.batches)?;
            trainer.synchronize()?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// One more step, as the queues ran it.
    fn recorded<D: PlanDevice>(&self, trainer: &mut Trainer<D>) -> Result<Trace> {
        trainer.set_recording(true);
        trainer.step(&self.batches, 1e-5)?;
        let trace = trainer.trace()?.context("the device records nothing")?;
        trainer.set_recording(false);
        Ok(trace)
    }
}
