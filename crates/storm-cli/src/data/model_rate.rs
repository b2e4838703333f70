//! Predicted rows per second of a model: images, or rows of tokens.

use crate::source::{AnySource, Which};
use crate::{UsageError, memory_limits};
use anyhow::{Result, anyhow};
use std::path::Path;
use storm_model::{
    AnyModel, ImageDirectory, image_preset, image_preset_names, preset, preset_names,
};
use storm_plan::{Budget, Forced, HardwareProfile, RankPlace};
use storm_train::{LaunchRequest, Precision, StepSize, TrainOptions};

/// Plans a step of a model, given by name or directory, on a machine with this profile. `sequence`
/// is the number of tokens per row. It is `None` for images.
pub(super) fn predicted(
    model: &str,
    batch: usize,
    sequence: Option<usize>,
    profile: &HardwareProfile,
) -> Result<f64> {
    let vram = memory_limits::device(None, profile).bytes;
    let ram = memory_limits::host(None)?.bytes;
    let config = match sequence {
        None => image_classifier(model)?,
        Some(_) => language_model(model)?,
    };
    let request = LaunchRequest {
        rank: RankPlace::default(),
        decided: None,
        model: config,
        options: TrainOptions::new(batch, sequence.unwrap_or(1), Precision::Bf16Stochastic),
        step: StepSize::MicroBatches(1),
        profile: profile.clone(),
        budget: Budget::new(vram, ram),
        forced: Forced::default(),
        trial: None,
    };
    let plan = request.plan().map_err(|error| anyhow!("cannot plan {model}: {error}"))?;
    Ok(batch as f64 / plan.predicted_seconds())
}

fn image_classifier(model: &str) -> Result<AnyModel> {
    if let Some(config) = image_preset(model) {
        return Ok(config.into());
    }
    let path = Path::new(model);
    if path.exists() {
        return Ok(ImageDirectory::read_config(path)?.into());
    }
    unknown(model, "image classifier", &image_preset_names().collect::<Vec<_>>())
}

fn language_model(model: &str) -> Result<AnyModel> {
    if let Ok(config) = preset(model) {
        return Ok(config.into());
    }
    let path = Path::new(model);
    if path.exists() {
        let model = AnySource::open(path, &Which::default())?.model();
        if model.image().is_none() {
            return Ok(model);
        }
    }
    unknown(model, "language model", &preset_names().collect::<Vec<_>>())
}

fn unknown(model: &str, kind: &str, known: &[&str]) -> Result<AnyModel> {
    Err(UsageError(format!(
        "{model} is not the name of a known {kind}, nor a directory of one; known names: {}",
        known.join(", ")
    ))
    .into())
}
