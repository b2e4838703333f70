//! Runs a job.

use crate::images;
use crate::job::{Job, OptimizerSettings, PrecisionName, SaveTarget, StepInput, TokenBatch};
use crate::tensors::{self, NamedTensor};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::Path;
use storm_graph::DType;
use storm_model::{
    AdaptedSource, AdapterDirectory, BuildOptions, HfDirectory, ParameterSpec, load_parameter,
    parameters,
};
use storm_train::{Batch, Inference, ReferenceTrainer, TrainOptions};

/// Runs a job; the value is for stdout.
pub(crate) fn run(job: &Job) -> Result<Value> {
    match job {
        Job::Logits { model, adapter, batch, output } => {
            logits(model, adapter.as_deref(), batch, output)
        }
        Job::Gradients { model, precision, chunk_rows, micro_batches, output } => {
            let (precision, chunk_rows) = (*precision, *chunk_rows);
            let setup = Setup { model, adapter: None, precision, chunk_rows };
            gradients(&setup, micro_batches, output)
        }
        Job::Train {
            model,
            precision,
            chunk_rows,
            seed,
            optimizer,
            steps,
            save,
            adapter,
            save_adapter,
        } => {
            let (precision, chunk_rows) = (*precision, *chunk_rows);
            let setup = Setup { model, adapter: adapter.as_deref(), precision, chunk_rows };
            train(&setup, *seed, optimizer, steps, save.as_ref(), save_adapter.as_deref())
        }
        Job::RoundTrip { model, save } => round_trip(model, save),
        Job::ImageLogits { model, batch, output } => images::logits(model, batch, output),
        Job::ImageGradients { model, label_smoothing, batch, output } => {
            images::gradients(model, *label_smoothing, batch, output)
        }
        Job::ImageTrain { model, sgd, label_smoothing, learning_rate, steps, save } => {
            let (smoothing, rate) = (*label_smoothing, *learning_rate);
            images::train(model, sgd, smoothing, rate, steps, save)
        }
    }
}

fn open(model: &Path) -> Result<HfDirectory> {
    HfDirectory::open(model).with_context(|| format!("cannot open the model {}", model.display()))
}

fn logits(
    model: &Path,
    adapter: Option<&Path>,
    batch: &TokenBatch,
    output: &Path,
) -> Result<Value> {
    let directory = open(model)?;
    let config = &directory.model().clone();
    let (rows, sequence) = batch.size();
    let options = BuildOptions {
        packing: batch.packing(),
        ..BuildOptions::training(rows, sequence, DType::F32)
    };
    let mut inference = match adapter {
        None => Inference::load(config, &options, &directory)?,
        Some(adapter) => {
            let adapter = AdapterDirectory::open(adapter)?;
            let config = adapter.apply_to(config)?;
            let source = AdaptedSource::new(&config, directory, adapter);
            Inference::load(&config, &options, &source)?
        }
    };
    let values = inference.logits(&batch.to_batch()?)?;
    let shape = vec![rows, sequence, config.vocab_size];
    tensors::write(output, vec![NamedTensor { name: "logits".to_owned(), shape, values }])?;
    Ok(json!({}))
}

/// What jobs of gradients and of training share.
struct Setup<'a> {
    model: &'a Path,
    adapter: Option<&'a Path>,
    precision: PrecisionName,
    chunk_rows: usize,
}

impl Setup<'_> {
    /// A trainer of the model for micro-batches of the shape of `first`.
    fn trainer(
        &self,
        directory: &HfDirectory,
        first: Option<&TokenBatch>,
        change: impl FnOnce(&mut TrainOptions),
    ) -> Result<ReferenceTrainer> {
        let first = first.context("the job has no micro-batch")?;
        let (batch, sequence) = first.size();
        let mut options = TrainOptions {
            packing: first.packing(),
            chunk_rows: self.chunk_rows,
            ..TrainOptions::new(batch, sequence, self.precision.into())
        };
        change(&mut options);
        let adapter = self.adapter.map(AdapterDirectory::open).transpose()?;
        let config = match &adapter {
            Some(adapter) => adapter.apply_to(directory.model())?,
            None => directory.model().clone(),
        };
        let mut trainer = ReferenceTrainer::new(&config, options)?;
        trainer.load(directory)?;
        if let Some(adapter) = &adapter {
            trainer.load_adapters(adapter)?;
        }
        Ok(trainer)
    }
}

fn to_batches(micro_batches: &[TokenBatch]) -> Result<Vec<Batch>> {
    micro_batches.iter().map(TokenBatch::to_batch).collect()
}

fn gradients(setup: &Setup<'_>, micro_batches: &[TokenBatch], output: &Path) -> Result<Value> {
    let directory = open(setup.model)?;
    let mut trainer = setup.trainer(&directory, micro_batches.first(), |_| {})?;
    let loss = trainer.accumulate(&to_batches(micro_batches)?)?.loss;
    // The update sums the gradients of a tied parameter's uses before it takes the norm.
    let gradient_norm = trainer.update(0.0)?;
    let mut gradients = Vec::new();
    for spec in parameters(directory.model()) {
        gradients.extend(tensors::to_hf(&spec, &trainer.read(&format!("{}.grad", spec.name))?));
    }
    tensors::write(output, gradients)?;
    Ok(json!({ "loss": loss, "gradient_norm": gradient_norm }))
}

fn train(
    setup: &Setup<'_>,
    seed: u64,
    optimizer: &OptimizerSettings,
    steps: &[StepInput],
    save: Option<&SaveTarget>,
    save_adapter: Option<&Path>,
) -> Result<Value> {
    let directory = open(setup.model)?;
    let first = steps.first().and_then(|step| step.micro_batches.first());
    let mut trainer = setup.trainer(&directory, first, |options| {
        options.seed = seed;
        options.optimizer = optimizer.to_options();
    })?;
    let (mut losses, mut gradient_norms) = (Vec::new(), Vec::new());
    for (index, step) in steps.iter().enumerate() {
        let report = trainer
            .step(&to_batches(&step.micro_batches)?, step.learning_rate)
            .with_context(|| format!("step {index}"))?;
        // JSON has no non-finite numbers. Without this check they would become null.
        let is_finite = report.loss.is_finite() && report.gradient_norm.is_finite();
        ensure!(is_finite, "step {index} is not finite: {report:?}");
        losses.push(report.loss);
        gradient_norms.push(report.gradient_norm);
    }
    if let Some(save) = save {
        trainer.save(&save.directory, &save.to_options(setup.model))?;
    }
    if let Some(output) = save_adapter {
        trainer.save_adapters(output, setup.model.to_str())?;
    }
    Ok(json!({ "losses": losses, "gradient_norms": gradient_norms }))
}

fn round_trip(model: &Path, save: &SaveTarget) -> Result<Value> {
    let directory = open(model)?;
    let config = directory.model();
    // The whole parameter that was requested last.
    let mut last = (String::new(), Vec::new());
    let provide = |spec: &ParameterSpec, range: Range<usize>, dest: &mut [f32]| {
        if last.0 != spec.name {
            last = (spec.name.clone(), vec![0.0; spec.element_count()]);
            load_parameter(&directory, spec, &mut last.1)?;
        }
        dest.copy_from_slice(&last.1[range]);
        Ok(())
    };
    storm_model::save(&save.directory, config, &save.to_options(model), provide)?;
    Ok(json!({}))
}
