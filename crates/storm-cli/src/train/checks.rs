//! Checks that run before anything is downloaded, packed, measured or planned.

use super::data;
use super::device::{self, DeviceKind};
use super::model;
use super::options::Settings;
use super::schedule;
use super::values::OptimizerArg;
use crate::forced::UpdateArg;
use crate::precision::{MomentsArg, check_fp8};
use crate::save_mode::SaveModeArg;
use crate::size::show;
use crate::{OverBudget, UsageError, disk, hardware, host_memory, lengths, memory_limits};
use anyhow::Result;
use std::num::NonZeroUsize;
use std::path::Path;
use storm_device::cpu::THREADS_MAX;
use storm_model::{AnyModel, Packing};
use storm_train::{StepSize, TrainOptions, checkpoint_bytes};

/// A run of a billion steps takes decades; a larger number is a typo.
const STEPS_MAX: u64 = 1_000_000_000;

/// Longer than any model supports, and short enough that products with other sizes do not overflow.
const SEQ_MAX: usize = 1 << 24;

const EPOCHS_MAX: f64 = 1e6;
const SAMPLE_TOKENS_MAX: usize = 1 << 20;

/// Refuses options that are invalid for every model and dataset.
pub(super) fn settings(settings: &Settings) -> Result<()> {
    name(settings.name.as_deref().unwrap_or_default())?;
    for check in [counts, shares, optimizer] {
        check(settings)?;
    }
    if settings.steps.is_some() && settings.epochs.is_some() {
        let problem = "steps and epochs both set the length of a run; give one of them";
        return Err(UsageError(problem.to_owned()).into());
    }
    // With epochs, the number of steps depends on the data, which is not open yet. Check the longest run instead.
    let steps = settings.epochs.map_or(schedule::steps_given(settings), |_| STEPS_MAX);
    schedule::of(settings, steps)?;
    if let Some(predict) = &settings.predict {
        predict.options(steps)?;
        if settings.save_mode == SaveModeArg::Background {
            let problem = "save-mode = \"background\" cannot save what predictions are undone to, which changes during \
                           steps; leave out save-mode, or predict";
            return Err(UsageError(problem.to_owned()).into());
        }
    }
    if let Some(hardware) = &settings.hardware {
        hardware::named_or_found(Some(hardware))?;
    }
    if settings.test_leave.is_some() && !settings.test {
        let problem = "test-leave is for test = true; set that, or leave test-leave out";
        return Err(UsageError(problem.to_owned()).into());
    }
    if settings.on_disk.is_some() && settings.disk.is_none() {
        let problem = "on-disk needs disk; give a folder on a local disk";
        return Err(UsageError(problem.to_owned()).into());
    }
    Ok(())
}

fn name(name: &str) -> Result<(), UsageError> {
    let is_plain = !name.is_empty()
        && name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c))
        && !name.starts_with('.');
    match is_plain {
        true => Ok(()),
        false => Err(UsageError(format!(
            "`{name}` is not a valid name for a run: use letters, digits, - _ and ."
        ))),
    }
}

fn counts(settings: &Settings) -> Result<(), UsageError> {
    let count = |value: Option<NonZeroUsize>| value.map_or(0, |value| value.get() as u64);
    let steps = settings.steps.map_or(0, Into::into);
    for (key, value, most) in [
        ("steps", steps, STEPS_MAX),
        ("seq", settings.seq.get() as u64, SEQ_MAX as u64),
        ("threads", count(settings.threads), THREADS_MAX as u64),
        ("sample-tokens", settings.sample_tokens as u64, SAMPLE_TOKENS_MAX as u64),
    ] {
        if value > most {
            let problem = format!("{key} is {value}; it can be at most {most}");
            return Err(UsageError(problem));
        }
    }
    Ok(())
}

fn shares(settings: &Settings) -> Result<(), UsageError> {
    let refuse = |key: &str, value: f64, range: &str| {
        Err(UsageError(format!("{key} is {value}; it must be {range}")))
    };
    if !(0.0..1.0).contains(&settings.held_out) {
        return refuse("held-out", settings.held_out, "a share from 0 to less than 1");
    }
    if !(settings.temperature >= 0.0 && settings.temperature.is_finite()) {
        return refuse("temperature", settings.temperature, "a number that is not negative");
    }
    if !(0.0..1.0).contains(&settings.label_smoothing) {
        let range = "at least 0 and less than 1";
        return refuse("label-smoothing", settings.label_smoothing, range);
    }
    if let Some(epochs) = settings.epochs
        && !(epochs > 0.0 && epochs <= EPOCHS_MAX)
    {
        return refuse("epochs", epochs, "more than 0 and at most a million");
    }
    Ok(())
}

/// Kernels take these numbers as f32, so they are checked as f32.
fn optimizer(settings: &Settings) -> Result<(), UsageError> {
    let Settings { beta1, beta2, epsilon, weight_decay, clip, .. } = settings;
    let is_beta = |value: f32| (0.0..1.0).contains(&value);
    let is_positive = |value: f32| value > 0.0 && value.is_finite();
    let is_size = |value: f32| value >= 0.0 && value.is_finite();
    let is_norm = |value: f32| value > 0.0 || *clip == 0.0;
    for (key, value, is_good, range) in [
        ("beta1", beta1, is_beta(*beta1 as f32), "at least 0 and less than 1"),
        ("beta2", beta2, is_beta(*beta2 as f32), "at least 0 and less than 1"),
        ("epsilon", epsilon, is_positive(*epsilon as f32), "positive, and a number of 32 bits"),
        (
            "weight-decay",
            weight_decay,
            is_size(*weight_decay as f32),
            "a number of 32 bits that is not negative",
        ),
        ("clip", clip, is_norm(*clip as f32), "positive, or 0 to leave gradients as they are"),
    ] {
        if !is_good {
            return Err(UsageError(format!("{key} is {value}; it must be {range}")));
        }
    }
    method(settings)?;
    match settings.update == Some(UpdateArg::InBackward) && *clip != 0.0 {
        true => Err(UsageError(format!(
            "update = \"in-backward\" applies gradients before their norm is known, and clip is {clip}; set clip = 0, \
             or choose another update"
        ))),
        false => Ok(()),
    }
}

/// Refuses options that belong to the other optimizer.
fn method(settings: &Settings) -> Result<(), UsageError> {
    let Settings { optimizer, momentum, nesterov, moments, .. } = settings;
    let problem = match optimizer {
        OptimizerArg::Adamw if momentum.is_some() || nesterov.is_some() => {
            "momentum and nesterov are for optimizer = \"sgd\"; set that, or leave them out"
        }
        OptimizerArg::Adamw => return Ok(()),
        OptimizerArg::Sgd if momentum.is_some_and(|m| !(0.0..1.0).contains(&(m as f32))) => {
            "momentum must be at least 0 and less than 1"
        }
        OptimizerArg::Sgd
            if *nesterov == Some(true) && momentum.is_some_and(|m| m as f32 == 0.0) =>
        {
            "nesterov needs a momentum; set one, or leave nesterov out"
        }
        OptimizerArg::Sgd if *moments != MomentsArg::Full => {
            "moments = \"int8\" is for optimizer = \"adamw\"; leave it out"
        }
        OptimizerArg::Sgd => return Ok(()),
    };
    Err(UsageError(problem.to_owned()))
}

/// What is known about a run before anything slow happens.
pub(super) struct Outline<'a> {
    pub(super) settings: &'a Settings,
    pub(super) folder: &'a Path,
    pub(super) kind: DeviceKind,
    pub(super) model: &'a model::Outline,
    pub(super) data: &'a data::Outline,
}

impl Outline<'_> {
    /// Refuses a run whose model, data, device, memory or disk does not fit its options.
    pub(super) fn check(&self, options: &TrainOptions, step: StepSize) -> Result<()> {
        let settings = self.settings;
        if self.model.is_fresh && settings.lora.is_some() {
            let problem = format!(
                "adapters need trained weights, and {} is a preset without any; give a model with weights: a \
                 directory, or a name on the hub",
                self.model.name
            );
            return Err(UsageError(problem).into());
        }
        // A tokenizer for a preset may add tokens, but every vocabulary covers at least all bytes.
        let config = self.model.for_data(settings, &self.data.form())?;
        settings.activation_codec.check(&config)?;
        check_fp8(&config, options, step)?;
        settings.cpu_products.check(self.kind, settings.precision)?;
        device::check_size(settings.device, self.kind, config.parameter_count())?;
        self.check_positions(&config)?;
        let ram = memory_limits::host(settings.ram.map(|size| size.0))?;
        if self.kind == DeviceKind::Cpu {
            host_memory::threads(settings.threads.map(NonZeroUsize::get), ram.bytes)?;
        }
        let unit_bytes = host_memory::of_unit(&config);
        host_memory::check_step(host_memory::of_step(step, options, unit_bytes), ram.bytes)?;
        check_disk(self.folder, checkpoint_bytes(&config, options)?)
    }

    /// Checks that the model has enough positions. Rows of plain text are `seq` long; the lengths of samples are known
    /// only after packing.
    fn check_positions(&self, model: &AnyModel) -> Result<(), UsageError> {
        let Some(config) = model.language() else { return Ok(()) };
        let seq = self.settings.seq.get();
        match self.data.packing() {
            Packing::Single => lengths::check_positions(seq, seq, config.max_positions),
            Packing::Segments => Ok(()),
        }
    }
}

/// Refuses a disk without room for one checkpoint.
fn check_disk(folder: &Path, checkpoint_bytes: u64) -> Result<()> {
    // If the free space cannot be queried, the first write reports the problem.
    let Some(free) = disk::free_bytes_for(folder) else { return Ok(()) };
    if free >= checkpoint_bytes {
        return Ok(());
    }
    Err(OverBudget(format!(
        "a checkpoint takes {}, and the disk of {} has {} free; free some, or put the run on another disk with --runs",
        show(checkpoint_bytes),
        folder.display(),
        show(free)
    ))
    .into())
}
