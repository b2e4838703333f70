//! Timed training under a memory budget, compared with the plan's prediction.

use super::energy::Energy;
use super::run_args::RunArgs;
use crate::disk_tier::DiskTier;
use crate::{progress, size, tuning};
use anyhow::{Context, Result};
use std::time::Instant;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_device::cuda::{CudaPlanDevice, CudaPlanOptions, PowerReading};
use storm_device::{PlanDevice, Trace};
use storm_model::ModelConfig;
use storm_plan::{Bottleneck, Budget, Decisions, HardwareProfile, Prediction, RankPlace, Tier};
use storm_train::{
    AnyBatch, Batch, Initialized, Launch, LaunchRequest, LaunchSite, Launched, Notice, RunError,
    StepPlan, StepSize, TrainOptions, Trainer, TrialOptions,
};

/// Number of evaluations to time.
const EVALUATIONS: usize = 3;

/// A training run to be timed.
pub(crate) struct PlannedRun<'a> {
    args: &'a RunArgs,
    pub(crate) config: ModelConfig,
    options: TrainOptions,
    pub(crate) budget: Budget,
    profile: HardwareProfile,
    batches: Vec<Batch>,
    /// Threads of the CPU device. `None` on a GPU.
    threads: Option<usize>,
    disk: Option<DiskTier>,
}

/// Results of a timed run.
pub(crate) struct Measured<D: PlanDevice> {
    pub(crate) trainer: Trainer<D>,
    /// The profile that the plan was made with. It is refined if it was off.
    pub(crate) profile: HardwareProfile,
    pub(crate) decisions: Decisions,
    pub(crate) prediction: Prediction,
    pub(crate) bottleneck: Bottleneck,
    pub(crate) step_seconds: f64,
    pub(crate) fastest_seconds: f64,
    /// `None` if the device does not report it.
    pub(crate) energy: Option<Energy>,
    /// Time to compute the loss of a step's batches by forward passes alone.
    pub(crate) evaluation_seconds: f64,
    /// Device memory that the process holds.
    pub(crate) vram_bytes: u64,
    pub(crate) loss: f32,
    /// Trace of a step after the timed ones.
    pub(crate) trace: Trace,
}

/// A device for benchmarks.
pub(crate) trait Benched: PlanDevice {
    /// Options for a run. They may reuse memory of the previous run's device.
    fn options(run: &PlannedRun<'_>, before: Option<Self>) -> Self::Options;

    /// Device memory that the process holds.
    fn vram_bytes(&self) -> Result<u64>;

    /// Number of CUDA graphs, and of kernels in them.
    fn graphs(&self) -> (usize, usize) {
        (0, 0)
    }

    /// Energy, power limit, and clock rate. `None` if the device does not report them.
    fn power(&self) -> Option<PowerReading> {
        None
    }
}

impl Benched for CpuPlanDevice {
    fn options(run: &PlannedRun<'_>, _: Option<Self>) -> CpuPlanOptions {
        CpuPlanOptions {
            threads: run.threads,
            trace: true,
            disk: DiskTier::options(run.disk.as_ref()),
            ..CpuPlanOptions::default()
        }
    }

    fn vram_bytes(&self) -> Result<u64> {
        Ok(self.memory_taken()[Tier::DEVICE] as u64)
    }
}

impl Benched for CudaPlanDevice {
    fn options(run: &PlannedRun<'_>, before: Option<Self>) -> CudaPlanOptions {
        CudaPlanOptions {
            trace: true,
            vram_bytes: Some(run.budget[Tier::DEVICE]),
            disk: DiskTier::options(run.disk.as_ref()),
            copy_slowdown: run.args.slow_copies,
            multiprocessors: run.args.multiprocessors,
            // Tuned algorithms are kept for the whole card, not for a part of it.
            tune_seconds: run.args.multiprocessors.map_or(run.args.tune, |_| 0.0),
            progress: Some(Box::new(|preparing| progress::show(&tuning::describe(preparing)))),
            // Host memory is slow to allocate. After a device error there is nothing to reuse.
            kept: before.and_then(|device| device.keep().ok()),
            ..CudaPlanOptions::default()
        }
    }

    fn vram_bytes(&self) -> Result<u64> {
        Ok(self.memory_in_use()?.bytes)
    }

    fn graphs(&self) -> (usize, usize) {
        CudaPlanDevice::graphs(self)
    }

    fn power(&self) -> Option<PowerReading> {
        CudaPlanDevice::power(self)
    }
}

/// What a launch needs from a benchmark, and its progress messages.
struct Site<'a> {
    run: &'a PlannedRun<'a>,
    /// When the current phase began.
    begun: Instant,
    /// Progress of making weights.
    making: Option<progress::Bytes>,
}

impl<D: Benched> LaunchSite<D> for Site<'_> {
    fn device(&mut self, _: Budget, _: &StepPlan, before: Option<D>) -> D::Options {
        D::options(self.run, before)
    }

    fn batches(&mut self, _: usize, _: usize) -> Result<Vec<AnyBatch>, RunError> {
        Ok(self.run.batches.iter().cloned().map(AnyBatch::from).collect())
    }

    fn notice(&mut self, notice: Notice<'_>) {
        if let Notice::Initializing(Initialized { done_bytes, total_bytes }) = notice {
            let bytes = || progress::Bytes::new("making weights", total_bytes);
            self.making.get_or_insert_with(bytes).show(done_bytes);
            return;
        }
        self.making = None;
        progress::show("");
        match notice {
            Notice::Committing(plan) => {
                let prediction = &plan.planned.prediction;
                eprintln!(
                    "planned: {:.3} s a step in {} of device and {} of host memory",
                    prediction.step_seconds,
                    size::show(prediction.peak_bytes[Tier::DEVICE]),
                    size::show(prediction.peak_bytes[Tier::HOST]),
                );
                let forced = self.run.args.forced.forced();
                let used = |disk: &DiskTier| disk.use_words(&plan.planned, &forced);
                if let Some(words) = self.run.disk.as_ref().and_then(used) {
                    eprintln!("{words}");
                }
            }
            Notice::Committed(_) => {
                eprintln!("ready after {:.1} s", self.begun.elapsed().as_secs_f64());
            }
            Notice::Refused { reason, budget } => eprintln!(
                "refused: {reason}\nplanning again within {} of device and {} of host memory",
                size::show(budget[Tier::DEVICE]),
                size::show(budget[Tier::HOST]),
            ),
            Notice::Initializing(_) | Notice::Trying(_) | Notice::NotTried { .. } => {}
            Notice::Corrected(correction) => eprintln!(
                "a step takes {:.3} s, not {:.3}: planned with a corrected profile for {:.3}",
                correction.measured_seconds,
                correction.predicted_seconds,
                correction.corrected_seconds
            ),
        }
        self.begun = Instant::now();
    }
}

impl<'a> PlannedRun<'a> {
    pub(crate) fn new(args: &'a RunArgs, budget: Budget) -> Result<PlannedRun<'a>> {
        let config = args.config()?;
        let disk = args.open_disk()?;
        if let Some(disk) = &disk {
            eprintln!("{}", disk.words());
        }
        let mut profile = args.profile(budget[Tier::DEVICE])?;
        DiskTier::in_profile(disk.as_ref(), &mut profile);
        Ok(PlannedRun {
            options: args.options(),
            budget: DiskTier::in_budget(disk.as_ref(), budget),
            profile,
            disk,
            batches: args.batches(&config)?,
            threads: args.threads()?,
            args,
            config,
        })
    }

    /// Plans, trains, and measures.
    pub(crate) fn run<D: Benched>(&self, before: Option<D>) -> Result<Measured<D>> {
        // The last warm-up step shows whether the profile is right.
        let trial =
            self.args.warmup.checked_sub(1).map(|warm_up| TrialOptions { warm_up, splits: 1 });
        let (launch, mut trainer) = self.launched(trial, before)?;
        for _ in 0..self.args.warmup {
            self.step(&mut trainer)?;
        }
        let mut times = Vec::new();
        let mut loss = f32::NAN;
        let mut power = vec![trainer.device().power()];
        for _ in 0..self.args.steps {
            let start = Instant::now();
            loss = trainer.step(&self.batches, 1e-5)?.loss;
            trainer.synchronize()?;
            times.push(start.elapsed().as_secs_f64());
            power.push(trainer.device().power());
        }
        let energy = Energy::of(&power, times.iter().sum());
        times.sort_by(f64::total_cmp);
        let planned = &launch.plan().planned;
        Ok(Measured {
            trace: self.recorded(&mut trainer)?,
            evaluation_seconds: self.evaluation_seconds(&mut trainer)?,
            vram_bytes: trainer.device().vram_bytes()?,
            step_seconds: times[times.len() / 2],
            fastest_seconds: times[0],
            energy,
            trainer,
            profile: launch.profile().clone(),
            decisions: planned.decisions.clone(),
            prediction: planned.prediction.clone(),
            bottleneck: planned.bottleneck(),
            loss,
        })
    }

    /// A trainer after its warm-up steps.
    pub(super) fn warm<D: Benched>(&self) -> Result<Trainer<D>> {
        let (_, mut trainer) = self.launched(None, None)?;
        for _ in 0..self.args.warmup {
            self.step(&mut trainer)?;
        }
        Ok(trainer)
    }

    /// Runs one step, and waits for it.
    pub(super) fn step<D: PlanDevice>(&self, trainer: &mut Trainer<D>) -> Result<()> {
        trainer.step(&self.batches, 1e-5)?;
        Ok(trainer.synchronize()?)
    }

    fn launched<D: Benched>(
        &self,
        trial: Option<TrialOptions>,
        before: Option<D>,
    ) -> Result<(Launch, Trainer<D>)> {
        let request = LaunchRequest {
            rank: RankPlace::default(),
            decided: None,
            model: self.config.clone().into(),
            options: self.options.clone(),
            step: StepSize::MicroBatches(self.args.accumulate),
            profile: self.profile.clone(),
            budget: self.budget,
            forced: self.args.forced.forced(),
            trial,
        };
        let mut site = Site { run: self, begun: Instant::now(), making: None };
        let failed = || format!("cannot train {}", self.args.model);
        let mut launch = Launch::new(request).with_context(failed)?;
        if let Some(disk) = &self.disk {
            disk.check_wear(&launch.plan().planned, self.args.accept_wear)?;
        }
        let launched = launch.start(&mut site, before);
        progress::show("");
        let Launched { mut trainer, .. } = launched.with_context(failed)?;
        if let (Some(_), Some(path)) = (&self.disk, trainer.device().disk_path()) {
            eprintln!("the disk is accessed by {path}");
        }
        // Recording costs about 1 % of a step's time on a GPU.
        trainer.set_recording(false);
        Ok((launch, trainer))
    }

    /// Time to compute the loss of a step's batches by forward passes alone.
    fn evaluation_seconds<D: PlanDevice>(&self, trainer: &mut Trainer<D>) -> Result<f64> {
        // The first one applies the update that the last step left pending.
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

    /// The trace of one more step.
    fn recorded<D: PlanDevice>(&self, trainer: &mut Trainer<D>) -> Result<Trace> {
        trainer.set_recording(true);
        trainer.step(&self.batches, 1e-5)?;
        let trace = trainer.trace()?.context("the device records nothing")?;
        trainer.set_recording(false);
        Ok(trace)
    }
}
