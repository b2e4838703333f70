//! The format of a job.

use anyhow::{Result, ensure};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use storm_graph::{AdamWParameters, IGNORE_INDEX, MomentumDirection, SgdParameters};
use storm_model::{IfExists, Packing, SaveOptions, WeightDtype};
use storm_train::{Batch, DecayTargets, NamedInputs, OptimizerMethod, OptimizerOptions, Precision};

/// What to run. Every `model` is a Hugging Face directory.
#[derive(Deserialize)]
#[serde(tag = "job", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Job {
    /// The logits of a batch in f32: tensor `logits` (B, T, V) in `output`.
    Logits {
        model: PathBuf,
        /// An adapter directory to apply to the model.
        adapter: Option<PathBuf>,
        batch: TokenBatch,
        output: PathBuf,
    },
    /// One backward pass over all micro-batches. Prints `loss` and `gradient_norm`. Every
    /// parameter's gradient goes to `output` under the name and in the layout of Hugging Face.
    Gradients {
        model: PathBuf,
        precision: PrecisionName,
        chunk_rows: usize,
        micro_batches: Vec<TokenBatch>,
        output: PathBuf,
    },
    /// Optimizer steps. Prints `losses` and `gradient_norms`, one per step.
    Train {
        model: PathBuf,
        precision: PrecisionName,
        chunk_rows: usize,
        /// Seed of stochastic rounding.
        seed: u64,
        optimizer: OptimizerSettings,
        steps: Vec<StepInput>,
        /// Where to save the trained model, if given.
        save: Option<SaveTarget>,
        /// An adapter directory: it is trained, and the model stays unchanged.
        adapter: Option<PathBuf>,
        /// Where to save the trained adapter, if given.
        save_adapter: Option<PathBuf>,
    },
    /// The logits of an image classifier in f32: tensor `logits` (B, classes) in `output`.
    ImageLogits { model: PathBuf, batch: ImageBatch, output: PathBuf },
    /// One backward pass of an image classifier in f32. Prints `loss`. The gradient of every
    /// trainable parameter goes to `output` under the name and in the layout of PyTorch.
    ImageGradients { model: PathBuf, label_smoothing: f32, batch: ImageBatch, output: PathBuf },
    /// Steps of SGD in f32 on an image classifier. Prints `losses` and `accuracies`, one per step.
    ImageTrain {
        model: PathBuf,
        sgd: SgdSettings,
        label_smoothing: f32,
        learning_rate: f32,
        steps: Vec<ImageBatch>,
        /// Where to save the trained model. It must not exist.
        save: PathBuf,
    },
    /// Opens a model and saves it to another directory.
    RoundTrip { model: PathBuf, save: SaveTarget },
}

/// Pictures and their classes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageBatch {
    /// (B, H, W, C), flat.
    images: Vec<u8>,
    /// (B)
    targets: Vec<i32>,
}

impl ImageBatch {
    pub(crate) fn rows(&self) -> usize {
        self.targets.len()
    }

    pub(crate) fn to_inputs(&self) -> NamedInputs {
        NamedInputs::new(self.rows())
            .with("images", self.images.clone())
            .with("targets", self.targets.clone())
            .with("samples", vec![0i32; 3 * self.rows()])
    }
}

/// SGD. Like PyTorch's, it decays all parameters.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SgdSettings {
    momentum: f32,
    nesterov: bool,
    weight_decay: f32,
}

impl SgdSettings {
    pub(crate) fn to_options(&self) -> OptimizerOptions {
        let &SgdSettings { momentum, nesterov, weight_decay } = self;
        let direction = match nesterov {
            true => MomentumDirection::Nesterov,
            false => MomentumDirection::Momentum,
        };
        OptimizerOptions {
            method: OptimizerMethod::Sgd(SgdParameters { momentum, direction, weight_decay }),
            decay: DecayTargets::All,
            max_norm: None,
            ..OptimizerOptions::default()
        }
    }
}

/// One optimizer step.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StepInput {
    pub(crate) learning_rate: f32,
    pub(crate) micro_batches: Vec<TokenBatch>,
}

/// Rows of token ids, all of the same length.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenBatch {
    /// (B, T)
    tokens: Vec<Vec<i32>>,
    /// (B, T), -100 at positions without a loss; not needed for logits.
    targets: Option<Vec<Vec<i32>>>,
    /// (B, T), if rows hold several samples.
    segments: Option<Vec<Vec<i32>>>,
}

impl TokenBatch {
    /// B and T.
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.tokens.len(), self.tokens.first().map_or(0, Vec::len))
    }

    pub(crate) fn packing(&self) -> Packing {
        match self.segments {
            Some(_) => Packing::Segments,
            None => Packing::Single,
        }
    }

    pub(crate) fn to_batch(&self) -> Result<Batch> {
        let (batch, sequence) = self.size();
        let flat = |name: &str, rows: &[Vec<i32>]| -> Result<Vec<i32>> {
            let fits = rows.len() == batch && rows.iter().all(|row| row.len() == sequence);
            ensure!(fits, "`{name}` is not {batch} rows of {sequence} entries");
            Ok(rows.concat())
        };
        let tokens = flat("tokens", &self.tokens)?;
        let targets = match &self.targets {
            Some(targets) => flat("targets", targets)?,
            None => vec![IGNORE_INDEX; tokens.len()],
        };
        Ok(match &self.segments {
            Some(segments) => Batch::packed(tokens, targets, flat("segments", segments)?, sequence),
            None => Batch::new(tokens, targets, sequence),
        })
    }
}

/// AdamW and clipping.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OptimizerSettings {
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    weight_decay: f32,
    decay: DecayName,
    /// `None` disables clipping.
    max_norm: Option<f32>,
}

impl OptimizerSettings {
    pub(crate) fn to_options(&self) -> OptimizerOptions {
        let &OptimizerSettings { beta1, beta2, epsilon, weight_decay, max_norm, .. } = self;
        let decay = match self.decay {
            DecayName::All => DecayTargets::All,
            DecayName::Matrices => DecayTargets::Matrices,
        };
        let adamw = AdamWParameters { beta1, beta2, epsilon, weight_decay };
        let method = OptimizerMethod::AdamW(adamw);
        OptimizerOptions { method, decay, max_norm, ..OptimizerOptions::default() }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DecayName {
    All,
    Matrices,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PrecisionName {
    F32,
    Bf16Master,
    Bf16Stochastic,
    Fp8,
}

impl From<PrecisionName> for Precision {
    fn from(name: PrecisionName) -> Precision {
        match name {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::Bf16Master => Precision::Bf16Master,
            PrecisionName::Bf16Stochastic => Precision::Bf16Stochastic,
            PrecisionName::Fp8 => Precision::Fp8,
        }
    }
}

/// A Hugging Face directory to write; it must not exist.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SaveTarget {
    pub(crate) directory: PathBuf,
    dtype: WeightDtypeName,
    /// Maximum bytes of weights per file. If absent, all weights go into one file.
    shard_bytes: Option<u64>,
}

impl SaveTarget {
    /// `source` is the directory from which the model was loaded.
    pub(crate) fn to_options<'a>(&self, source: &'a Path) -> SaveOptions<'a> {
        let dtype = match self.dtype {
            WeightDtypeName::F32 => WeightDtype::F32,
            WeightDtypeName::Bf16 => WeightDtype::Bf16,
        };
        let shard_bytes = self.shard_bytes.unwrap_or(u64::MAX);
        SaveOptions { dtype, shard_bytes, source: Some(source), if_exists: IfExists::Refuse }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum WeightDtypeName {
    F32,
    Bf16,
}
