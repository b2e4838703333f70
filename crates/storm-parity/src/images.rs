//! Jobs of image classifiers.

use crate::job::{ImageBatch, SgdSettings};
use crate::tensors::{self, NamedTensor};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;
use storm_graph::DType;
use storm_model::{AnyModel, BuildOptions, ImageDirectory, SaveOptions, WeightDtype};
use storm_train::{Inference, Precision, ReferenceTrainer, TrainOptions};

pub(crate) fn logits(model: &Path, batch: &ImageBatch, output: &Path) -> Result<Value> {
    let directory = ImageDirectory::open(model)?;
    let options = BuildOptions::training(batch.rows(), 1, DType::F32);
    let mut inference = Inference::load(directory.config(), &options, &directory)?;
    let values = inference.logits(&batch.to_inputs())?;
    let shape = vec![batch.rows(), directory.config().classes];
    tensors::write(output, vec![NamedTensor { name: "logits".to_owned(), shape, values }])?;
    Ok(json!({}))
}

pub(crate) fn gradients(
    model: &Path,
    label_smoothing: f32,
    batch: &ImageBatch,
    output: &Path,
) -> Result<Value> {
    let directory = ImageDirectory::open(model)?;
    let options =
        TrainOptions { label_smoothing, ..TrainOptions::new(batch.rows(), 1, Precision::F32) };
    let mut trainer = ReferenceTrainer::new(directory.config(), options)?;
    trainer.load(&directory)?;
    let loss = trainer.accumulate(&[batch.to_inputs()])?.loss;
    let mut gradients = Vec::new();
    for spec in AnyModel::from(directory.config()).parameters() {
        // Running statistics have no gradient.
        if let Ok(values) = trainer.read(&format!("{}.grad", spec.name)) {
            gradients.extend(tensors::to_hf(&spec, &values));
        }
    }
    tensors::write(output, gradients)?;
    Ok(json!({ "loss": loss }))
}

pub(crate) fn train(
    model: &Path,
    sgd: &SgdSettings,
    label_smoothing: f32,
    learning_rate: f32,
    steps: &[ImageBatch],
    save: &Path,
) -> Result<Value> {
    let directory = ImageDirectory::open(model)?;
    let rows = steps.first().map(ImageBatch::rows).context("the job has no step")?;
    let options = TrainOptions {
        optimizer: sgd.to_options(),
        label_smoothing,
        ..TrainOptions::new(rows, 1, Precision::F32)
    };
    let mut trainer = ReferenceTrainer::new(directory.config(), options)?;
    trainer.load(&directory)?;
    let (mut losses, mut accuracies) = (Vec::new(), Vec::new());
    for (index, batch) in steps.iter().enumerate() {
        let report = trainer.step(&[batch.to_inputs()], learning_rate)?;
        ensure!(report.loss.is_finite(), "step {index} is not finite: {report:?}");
        losses.push(report.loss);
        accuracies.push(report.accuracy);
    }
    let options = SaveOptions { dtype: WeightDtype::F32, ..SaveOptions::default() };
    trainer.save(save, &options)?;
    Ok(json!({ "losses": losses, "accuracies": accuracies }))
}
