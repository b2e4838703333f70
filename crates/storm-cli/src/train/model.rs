//! Which model a run trains.

use super::options::Settings;
use crate::model_tokenizer::Weights;
use crate::{UsageError, model};
use anyhow::Result;
use std::path::{Path, PathBuf};
use storm_model::{HfDirectory, ModelConfig, preset};

/// A model to train, and where its weights come from.
pub(super) struct Model {
    pub(super) name: String,
    pub(super) config: ModelConfig,
    /// None: fresh weights.
    pub(super) weights: Option<HfDirectory>,
}

impl Model {
    /// The model as it is named, before the vocabulary of the data is known.
    pub(super) fn new(settings: &Settings) -> Result<Model> {
        let Some(name) = settings.model.clone() else {
            let problem = "give a model: a preset (see `storm model list`) or a directory";
            return Err(UsageError(problem.to_owned()).into());
        };
        match Path::new(&name).is_dir() {
            true => Model::of_directory(settings, name),
            false => Ok(Model { config: preset(&name)?, name, weights: None }),
        }
    }

    fn of_directory(settings: &Settings, name: String) -> Result<Model> {
        let Settings { layers, width, heads, kv_heads, mlp_width, .. } = settings;
        if [layers, width, heads, kv_heads, mlp_width].iter().any(|shape| shape.is_some()) {
            let problem = "layers, width, heads, kv-heads and mlp-width are for presets; weights from a \
                           directory have their own shape";
            return Err(UsageError(problem.to_owned()).into());
        }
        let directory = model::open(Path::new(&name))?;
        let dropout = directory.config().dropout();
        if !dropout.is_empty() {
            let fields: Vec<String> =
                dropout.iter().map(|(field, share)| format!("{field} = {share}")).collect();
            eprintln!(
                "warning: {name} asks for dropout ({}); STORM trains without",
                fields.join(", ")
            );
        }
        let config = directory.model().clone();
        Ok(Model { name, config, weights: Some(directory) })
    }

    /// The model for data of this vocabulary: fresh weights have as many tokens, those of a directory at least.
    pub(super) fn for_vocabulary(self, settings: &Settings, vocabulary: usize) -> Result<Model> {
        let Model { name, config, weights } = self;
        if weights.is_none() {
            let config = fresh(settings, config, vocabulary);
            config.validate()?;
            return Ok(Model { name, config, weights });
        }
        if vocabulary > config.vocab_size {
            let problem = format!(
                "the data has {vocabulary} different tokens, and {name} knows {}; pack the data with \
                 the model's own tokenizer.json",
                config.vocab_size
            );
            return Err(UsageError(problem).into());
        }
        Ok(Model { name, config, weights })
    }

    /// What ties the model to a tokenizer: none for fresh weights.
    pub(super) fn of_tokenizer(&self) -> Option<Weights<'_>> {
        let vocabulary = self.config.vocab_size;
        self.weights.as_ref().map(|_| Weights { directory: Path::new(&self.name), vocabulary })
    }

    /// The directory that the weights come from.
    pub(super) fn source(&self) -> Option<PathBuf> {
        self.weights.as_ref().map(|_| PathBuf::from(&self.name))
    }
}

/// A preset with another shape, for this vocabulary.
fn fresh(settings: &Settings, mut config: ModelConfig, vocabulary: usize) -> ModelConfig {
    config.vocab_size = vocabulary;
    if let Some(layers) = settings.layers {
        config.layer_count = layers.get();
    }
    if let Some(width) = settings.width {
        config.hidden_size = width.get();
        // What is far too large stays so, and is refused with the other sizes.
        config.intermediate_size = width.get().saturating_mul(4);
    }
    if let Some(heads) = settings.heads {
        config.query_heads = heads.get();
        config.kv_heads = heads.get();
    }
    if let Some(kv_heads) = settings.kv_heads {
        config.kv_heads = kv_heads.get();
    }
    if settings.width.is_some() || settings.heads.is_some() {
        config.head_dim = config.hidden_size / config.query_heads;
    }
    if let Some(mlp_width) = settings.mlp_width {
        config.intermediate_size = mlp_width.get();
    }
    if config.rotary.is_none() {
        // Learned positions beyond the sequence would never be trained.
        config.max_positions = settings.seq.get();
    }
    config
}
