//! The images per second that a model is predicted to take.

use crate::{UsageError, memory_limits};
use anyhow::{Result, anyhow};
use std::path::Path;
use storm_model::{AnyModel, ImageConfig, ImageDirectory, image_preset, image_preset_names};
use storm_plan::{Budget, Forced, HardwareProfile, RankPlace};
use storm_train::{LaunchRequest, Precision, StepSize, TrainOptions};

/// Plans a step of a model, by its name or its directory, on a machine of this profile.
pub(super) fn predicted(model: &str, batch: usize, profile: &HardwareProfile) -> Result<f64> {
    let vram = memory_limits::device(None, profile).bytes;
    let ram = memory_limits::host(None)?.bytes;
    let request = LaunchRequest {
        rank: RankPlace::default(),
        decided: None,
        model: AnyModel::from(config(model)?),
        options: TrainOptions::new(batch, 1, Precision::Bf16Stochastic),
        step: StepSize::MicroBatches(1),
        profile: profile.clone(),
        budget: Budget::new(vram, ram),
        forced: Forced::default(),
        trial: None,
    };
    let plan = request.plan().map_err(|error| anyhow!("cannot plan {model}: {error}"))?;
    Ok(batch as f64 / plan.predicted_seconds())
}

fn config(model: &str) -> Result<ImageConfig> {
    if let Some(config) = image_preset(model) {
        return Ok(config);
    }
    let path = Path::new(model);
    if path.exists() {
        return Ok(ImageDirectory::read_config(path)?);
    }
    let known: Vec<&str> = image_preset_names().collect();
    Err(UsageError(format!(
        "{model} is no image classifier and no directory of one; by name there are {}",
        known.join(", ")
    ))
    .into())
}
