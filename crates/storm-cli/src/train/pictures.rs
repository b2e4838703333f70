//! Held-out pictures with what the trained model takes them for.

use super::setup::Setup;
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use storm_data::Split;
use storm_data::records::{Order, RecordBatch, RecordLoader, RecordLoaderOptions, RecordSet};
use storm_graph::DType;
use storm_model::{BuildOptions, ImageDirectory};
use storm_train::{Inference, NamedInputs, Picture, Pictures};

/// How many are shown.
const PICTURES_MAX: u64 = 32;

/// Looks at some of the held-out pictures with the saved model, in f32 on the processor: the device may have no memory
/// to spare.
pub(super) fn look(setup: &Setup, model: &Path, step: u64) -> Result<Pictures> {
    let Some(set) = setup.data.records() else { return Ok(Pictures::None) };
    let count = set.records(Split::Held).min(PICTURES_MAX) as usize;
    if count == 0 {
        return Ok(Pictures::None);
    }
    setup.style.say(&format!("looking at {count} held-out pictures …"));
    let batch = batch(set, count, setup.settings.seed.0, setup.settings.data_ram.0)?;
    let missing = "the dataset has no pictures with classes";
    let images = batch.column("images").context(missing)?;
    let targets = batch.column("targets").and_then(|column| column.to_i32()).context(missing)?;
    let directory = ImageDirectory::open(model)?;
    let config = directory.config();
    let options = BuildOptions::training(count, 1, DType::F32);
    let mut inference = Inference::load(config, &options, &directory)?;
    let samples: Vec<i32> = batch.samples.iter().flatten().copied().collect();
    let inputs = NamedInputs::new(count)
        .with("images", images.bytes.clone())
        .with("samples", samples)
        .with("targets", targets.clone());
    let logits = inference.logits(&inputs)?;
    let [height, width] = config.image_size;
    let names = &set.manifest().class_names;
    let name = |class: usize| names.get(class).cloned().unwrap_or_else(|| class.to_string());
    let pictures = (0..count).map(|row| {
        let (class, probability) = best(&logits[row * config.classes..][..config.classes]);
        let [low, high, _] = batch.samples[row];
        Picture {
            number: u64::from(low as u32) | u64::from(high as u32) << 32,
            shape: [height, width, config.channels],
            pixels: images.row(row).to_vec(),
            class: name(targets[row] as usize),
            predicted: name(class),
            probability,
        }
    });
    Ok(Pictures::Shown { step, pictures: pictures.collect() })
}

/// Pictures of the held-out part, chosen by the seed.
fn batch(set: &Arc<RecordSet>, count: usize, seed: u64, data_ram: u64) -> Result<RecordBatch> {
    let options = RecordLoaderOptions {
        part: Split::Held,
        order: Order::Global,
        ..RecordLoaderOptions::training(count, seed, data_ram)
    };
    let mut batch = RecordBatch::default();
    RecordLoader::new(Arc::clone(set), options)?.next_batch(&mut batch)?;
    Ok(batch)
}

/// The class with the highest score, the first of equals, and its probability.
fn best(logits: &[f32]) -> (usize, f32) {
    let mut best = 0;
    for (class, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = class;
        }
    }
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - logits[best]).exp()).sum();
    (best, (1.0 / sum) as f32)
}

#[cfg(test)]
mod tests {
    use super::best;

    #[test]
    fn the_first_of_the_highest_scores_is_taken() {
        assert_eq!(best(&[1.0, 3.0, 3.0, -90.0]).0, 1);
        assert!((best(&[0.0, 0.0]).1 - 0.5).abs() < 1e-6);
        assert!((best(&[1000.0, 0.0]).1 - 1.0).abs() < 1e-6);
    }
}
