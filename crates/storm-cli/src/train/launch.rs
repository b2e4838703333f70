//! Connects `storm train` to the launch of a trainer, and reports what the launch decided.

use super::data::RunData;
use super::device::{CpuUse, DeviceKind, Trains};
use super::options::Settings;
use super::output::{Style, print};
use super::ranks::Crew;
use super::setup::Setup;
use crate::disk_tier::DiskTier;
use crate::predict::PredictArg;
use crate::{progress, size, tuning};
use anyhow::Result;
use serde_json::json;
use storm_host::ScratchPath;
use storm_model::Unit;
use storm_plan::{Budget, Tier};
use storm_train::{
    Alarm, AnyBatch, Correction, GuessedSplit, Initialized, Launch, LaunchSite, Launched, Notice,
    OnAlarm, Replanned, RunError, Shrunk, StepPlan, StepSize, TimedSplit, Trainer,
};

/// Trials expected to take longer than this are announced.
const ANNOUNCED_SECONDS: f64 = 2.0;

/// Approximate number of steps in a trial, for estimating its time.
const TRIAL_STEPS: f64 = 4.0;

/// Builds the first trainer, with the plan that was shown or a faster one found by trials.
pub(super) fn first<D: Trains>(setup: &mut Setup) -> Result<Trainer<D>> {
    let (launch, mut site) = site(setup);
    let Launched { trainer, splits, .. } = launch.start::<D>(&mut site, None)?;
    setup.splits = splits;
    setup.settle();
    say_split(setup);
    say_disk(setup, trainer.device().disk_path());
    Ok(trainer)
}

/// Prints the chosen micro-batch size and why, if the user left it open.
fn say_split(setup: &Setup) {
    let Setup { request, launch, splits, style, machine_kind, .. } = setup;
    if !matches!(request.step, StepSize::Tokens(_)) {
        return;
    }
    let StepPlan { batch, accumulate, .. } = launch.plan();
    let why = match (splits.len(), machine_kind) {
        (2.., _) => format!("the fastest of those tried: {}", shown(splits)),
        (_, DeviceKind::Cpu) => "by prediction: on the CPU no others are tried".to_owned(),
        (1, DeviceKind::Cuda) => "by prediction: no other size comes close to it".to_owned(),
        (_, DeviceKind::Cuda) => "by prediction: the run is too short to try others".to_owned(),
    };
    let rows = request.config.unit().rows();
    style.say(&format!("micro-batches: {accumulate} × {batch} {rows}, {why}"));
    if *style == Style::Json {
        let split = |split: &TimedSplit| {
            json!({
                "batch": split.batch, "accumulate": split.accumulate,
                "predicted_seconds": split.predicted_seconds, "step_seconds": split.step_seconds,
            })
        };
        let tried: Vec<_> = splits.iter().map(split).collect();
        let object = json!({
            "event": "micro_batches", "batch": batch, "accumulate": accumulate, "tried": tried,
        });
        print(&object.to_string());
    }
}

/// Prints how the run uses its disk, and by which I/O path.
fn say_disk(setup: &Setup, path: Option<ScratchPath>) {
    let Some(disk) = &setup.request.disk else { return };
    let planned = &setup.launch.plan().planned;
    let words = disk.use_words(planned, &setup.request.forced);
    setup.style.say(&words.unwrap_or_else(|| DiskTier::UNUSED.to_owned()));
    if let Some(path) = path {
        setup.style.say(&format!("the disk is accessed by {path}"));
    }
    if setup.style == Style::Json {
        let mut object = disk.json(Some(planned));
        object["event"] = json!("disk");
        object["path"] = json!(path.map(|path| path.to_string()));
        print(&object.to_string());
    }
}

/// Micro-batch splits with their measured and predicted times.
pub(super) fn shown(splits: &[TimedSplit]) -> String {
    let split = |split: &TimedSplit| {
        let TimedSplit { batch, accumulate, predicted_seconds, step_seconds } = split;
        format!(
            "{accumulate} of {batch} took {step_seconds:.3} s (predicted {predicted_seconds:.3})"
        )
    };
    splits.iter().map(split).collect::<Vec<_>>().join(", ")
}

/// Builds a trainer with a smaller budget, for a run that saved and stopped because device memory ran short. Prints
/// what happens if memory runs short again.
pub(super) fn within_less<D: Trains>(
    setup: &mut Setup,
    trainer: Trainer<D>,
    alarm: Alarm,
) -> Result<(Trainer<D>, OnAlarm)> {
    let (launch, mut site) = site(setup);
    let Shrunk { trainer, is_smaller } = launch.shrink::<D>(&mut site, trainer, alarm)?;
    if is_smaller {
        let bytes = size::show(launch.budget()[Tier::DEVICE]);
        setup.style.say(&format!("{alarm}: planned again for {bytes} of device memory"));
        return Ok((trainer, OnAlarm::Stop));
    }
    eprintln!("warning: {alarm}, and no plan fits in less: the run continues as it is");
    Ok((trainer, OnAlarm::GoOn))
}

fn site(setup: &mut Setup) -> (&mut Launch, Site<'_>) {
    let Setup { launch, settings, data, model, style, cpu, steps, request, crew, .. } = setup;
    let (style, cpu, steps) = (*style, *cpu, *steps);
    let unit = model.config.unit();
    let disk = request.disk.as_ref();
    let crew = crew.as_ref();
    (launch, Site { settings, data, unit, style, cpu, steps, disk, crew, making: None })
}

struct Site<'a> {
    settings: &'a Settings,
    data: &'a RunData,
    /// The unit of the model's input: tokens or images.
    unit: Unit,
    style: Style,
    cpu: CpuUse,
    /// Steps of the run.
    steps: u64,
    disk: Option<&'a DiskTier>,
    crew: Option<&'a Crew>,
    /// Progress of weight initialization.
    making: Option<progress::Bytes>,
}

impl<D: Trains> LaunchSite<D> for Site<'_> {
    fn device(&mut self, budget: Budget, plan: &StepPlan, before: Option<D>) -> D::Options {
        let run_seconds = plan.predicted_seconds() * self.steps as f64;
        let disk = DiskTier::options(self.disk);
        let tune_seconds = tuning::seconds(run_seconds);
        let options = D::options(self.cpu, budget, disk, tune_seconds, before, self.crew);
        // Predictions that measure held-out losses release the memory they do not need.
        match self.settings.predict.as_ref().and_then(PredictArg::releases) {
            Some(idle) => D::releasing(options, idle),
            None => options,
        }
    }

    fn batches(&mut self, batch: usize, accumulate: usize) -> Result<Vec<AnyBatch>, RunError> {
        let (mut source, _) = self.data.sources(self.settings, batch)?;
        let mut batches = vec![AnyBatch::default(); accumulate];
        for batch in &mut batches {
            source.next_batch(batch)?;
        }
        Ok(batches)
    }

    fn notice(&mut self, notice: Notice<'_>) {
        match notice {
            Notice::Committing(_) => self.making = None,
            Notice::Initializing(Initialized { done_bytes, total_bytes }) => self
                .making
                .get_or_insert_with(|| progress::Bytes::new("making weights", total_bytes))
                .show(done_bytes),
            Notice::Committed(_) => progress::show(""),
            Notice::Refused { reason, budget } => {
                let vram = size::show(budget[Tier::DEVICE]);
                let ram = size::show(budget[Tier::HOST]);
                eprintln!(
                    "warning: {reason}; planning with {vram} of device and {ram} of host memory"
                );
            }
            Notice::Trying(plan) => {
                if plan.predicted_seconds() * TRIAL_STEPS > ANNOUNCED_SECONDS {
                    let StepPlan { batch, accumulate, .. } = plan;
                    let rows = self.unit.rows();
                    self.style
                        .say(&format!("trying some steps of {accumulate} × {batch} {rows} …"));
                }
            }
            Notice::NotTried { split, reason } => {
                let GuessedSplit { batch, accumulate, .. } = split;
                let rows = self.unit.rows();
                eprintln!(
                    "warning: steps of {accumulate} × {batch} {rows} cannot be tried: {reason}"
                );
            }
            Notice::Corrected(correction) => self.style.say(&corrected(correction)),
        }
    }
}

fn corrected(correction: &Correction) -> String {
    let Correction { measured_seconds, predicted_seconds, corrected_seconds, outcome } = correction;
    let plan = match outcome {
        Replanned::Same => "the plan does not change",
        Replanned::Other => "another plan is faster",
        Replanned::Kept => "another plan was slower, so this one stays",
    };
    format!(
        "a step took {measured_seconds:.3} s, not {predicted_seconds:.3} s as predicted. With a profile corrected by \
         the measurement, {corrected_seconds:.3} s are predicted; {plan}"
    )
}
