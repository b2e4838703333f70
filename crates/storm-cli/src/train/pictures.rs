//! Classifies sample images from the held-out part: a few after every evaluation, more at the end.

use super::setup::Setup;
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use storm_data::Split;
use storm_data::records::{Order, RecordBatch, RecordLoader, RecordLoaderOptions, RecordSet};
use storm_model::{AnyModel, ImageDirectory};
use storm_train::{Guess, History, NamedInputs, Picture, Pictures, Shown, Viewer};

/// Images classified at the end of the run.
const PICTURES_MAX: u64 = 32;

/// Images classified after every evaluation: the first ones of those shown at the end.
const VIEWED_MAX: u64 = 8;

/// Classifying after evaluations may use one part in this many of host memory.
const VIEWER_SHARE: u64 = 16;

/// Host memory for classifying images after every evaluation. 0 for other models, and if it would exceed the limit.
pub(super) fn viewer_bytes(model: &AnyModel, ram_bytes: u64) -> Result<u64> {
    let Some(config) = model.image() else { return Ok(0) };
    let bytes = Viewer::memory_bytes(config, VIEWED_MAX as usize)?;
    Ok(if bytes <= ram_bytes / VIEWER_SHARE { bytes } else { 0 })
}

/// The viewer that classifies images after every evaluation, if the run has memory for it.
pub(super) fn viewer(setup: &Setup) -> Result<Option<Viewer>> {
    let (Some(set), Some(config)) = (setup.data.records(), setup.model.config.image()) else {
        return Ok(None);
    };
    let has_room = viewer_bytes(&setup.model.config, setup.request.ram.bytes)? > 0;
    if !has_room || set.records(Split::Held) == 0 {
        return Ok(None);
    }
    let batch = batch(setup, set, VIEWED_MAX)?;
    Ok(Some(Viewer::new(config, batch.samples.len(), inputs(&batch)?)?))
}

/// Classifies some of the held-out images with the saved model.
pub(super) fn look(setup: &Setup, model: &Path, step: u64, history: &History) -> Result<Pictures> {
    let Some(set) = setup.data.records() else { return Ok(Pictures::None) };
    if set.records(Split::Held) == 0 {
        return Ok(Pictures::None);
    }
    let batch = batch(setup, set, PICTURES_MAX)?;
    let count = batch.samples.len();
    setup.style.say(&format!("classifying {count} held-out pictures …"));
    let images = batch.column("images").context(MISSING)?;
    let targets = batch.column("targets").and_then(|column| column.to_i32()).context(MISSING)?;
    let directory = ImageDirectory::open(model)?;
    let config = directory.config();
    let guesses = Viewer::new(config, count, inputs(&batch)?)?.look_with(&directory)?;
    let [height, width] = config.image_size;
    let names = &set.manifest().class_names;
    let name = |class: usize| names.get(class).cloned().unwrap_or_else(|| class.to_string());
    let pictures = guesses.iter().enumerate().map(|(row, guess)| {
        let [low, high, _] = batch.samples[row];
        Picture {
            number: u64::from(low as u32) | u64::from(high as u32) << 32,
            shape: [height, width, config.channels],
            pixels: images.row(row).to_vec(),
            class: name(targets[row] as usize),
            predicted: name(guess.class as usize),
            probability: guess.probability,
        }
    });
    let named = |guess: &Guess| (name(guess.class as usize), guess.probability);
    let views = history.views().filter(|view| view.step < step);
    let views = views.map(|view| (view.step, view.guesses.iter().map(named).collect()));
    let (pictures, views) = (pictures.collect(), views.collect());
    Ok(Pictures::Shown(Shown { step, pictures, views }))
}

const MISSING: &str = "the dataset has no pictures with classes";

/// Up to `most` held-out images, chosen by the seed. A smaller batch is a prefix of a larger one.
fn batch(setup: &Setup, set: &Arc<RecordSet>, most: u64) -> Result<RecordBatch> {
    let count = set.records(Split::Held).min(most) as usize;
    let options = RecordLoaderOptions {
        part: Split::Held,
        order: Order::Global,
        ..RecordLoaderOptions::training(count, setup.settings.seed.0, setup.settings.data_ram.0)
    };
    let mut batch = RecordBatch::default();
    RecordLoader::new(Arc::clone(set), options)?.next_batch(&mut batch)?;
    Ok(batch)
}

/// The model's inputs from a batch.
fn inputs(batch: &RecordBatch) -> Result<NamedInputs> {
    let images = batch.column("images").context(MISSING)?;
    let targets = batch.column("targets").and_then(|column| column.to_i32()).context(MISSING)?;
    let samples: Vec<i32> = batch.samples.iter().flatten().copied().collect();
    Ok(NamedInputs::new(batch.samples.len())
        .with("images", images.bytes.clone())
        .with("samples", samples)
        .with("targets", targets))
}
