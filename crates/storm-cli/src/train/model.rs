//! Resolves the model of a run: a preset, a directory or a model on a hub.

use super::data::DataForm;
use super::options::{Given, Settings};
use super::values::OverlongArg;
use crate::lora::LoraArg;
use crate::model_tokenizer::Weights as TokenizerWeights;
use crate::{UsageError, model};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use storm_hub::Wanted;
use storm_model::{
    AdapterDirectory, AnyModel, Element, HfConfig, HfDirectory, ImageDirectory, ModelConfig,
    ModelError, ParameterSource, ParameterSpec, image_preset, preset,
};

/// A model to train, and where its weights come from.
pub(super) struct Model {
    /// The name as given; for a hub model, with its commit.
    pub(super) name: String,
    /// The directory, if the model is one.
    directory: PathBuf,
    pub(super) config: AnyModel,
    /// `None` for fresh weights.
    pub(super) weights: Option<Weights>,
}

/// The weights a run starts from.
pub(super) enum Weights {
    Language(Box<HfDirectory>),
    Image(Box<ImageDirectory>),
}

impl Weights {
    /// The directory, for a language model.
    pub(super) fn language(&self) -> Option<&HfDirectory> {
        match self {
            Weights::Language(directory) => Some(directory),
            Weights::Image(_) => None,
        }
    }
}

impl ParameterSource for Weights {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        match self {
            Weights::Language(directory) => directory.load_rows(spec, rows, dest),
            Weights::Image(directory) => directory.load_rows(spec, rows, dest),
        }
    }

    fn starts_fresh(&self, spec: &ParameterSpec) -> bool {
        match self {
            Weights::Language(directory) => directory.starts_fresh(spec),
            Weights::Image(directory) => directory.starts_fresh(spec),
        }
    }
}

/// Finds a preset, of a language model or an image classifier.
fn preset_of_any(name: &str) -> Result<AnyModel, ModelError> {
    match image_preset(name) {
        Some(config) => Ok(config.into()),
        None => Ok(preset(name)?.into()),
    }
}

/// What is known about a model before its weights are downloaded and before the data's vocabulary is known.
pub(super) struct Outline {
    pub(super) name: String,
    pub(super) config: AnyModel,
    /// Whether the weights are fresh: the config is a preset's, which still takes its shape and vocabulary from the
    /// options and the data.
    pub(super) is_fresh: bool,
}

impl Outline {
    /// Reads the config of the named model. From a hub, downloads nothing else.
    pub(super) fn new(settings: &Settings) -> Result<Outline> {
        let name = named(settings)?;
        let located = model::locate_quietly(&name, Wanted::Config)?;
        let (name, directory) = match located {
            Some(located) => (located.name, located.directory),
            None => (name.clone(), PathBuf::from(name)),
        };
        if !directory.is_dir() {
            return Ok(Outline { config: preset_of_any(&name)?, name, is_fresh: true });
        }
        check_shape(settings)?;
        if ImageDirectory::is_one(&directory) {
            let config = ImageDirectory::read_config(&directory)?.into();
            return Ok(Outline { name, config, is_fresh: false });
        }
        let config = HfConfig::of_directory(&directory)
            .with_context(|| format!("cannot use {}", directory.display()))?;
        Ok(Outline { name, config: config.model.into(), is_fresh: false })
    }

    /// The config for data of this form.
    pub(super) fn for_data(&self, settings: &Settings, form: &DataForm) -> Result<AnyModel> {
        for_data(settings, &self.name, self.config.clone(), self.is_fresh, form)
    }
}

/// Fits the config to the data. A fresh model takes the data's vocabulary or classes; existing weights must already
/// support them.
fn for_data(
    settings: &Settings,
    name: &str,
    config: AnyModel,
    is_fresh: bool,
    form: &DataForm,
) -> Result<AnyModel> {
    match (config, form) {
        (AnyModel::Language(config), &DataForm::Tokens { vocabulary, is_packed }) => {
            check_text_options(settings)?;
            let config = match is_fresh {
                true => fresh(settings, *config, vocabulary)?,
                false if is_packed => knowing(name, *config, vocabulary)?,
                false => *config,
            };
            Ok(with_adapters(settings, config)?.into())
        }
        (AnyModel::Image(mut config), DataForm::Images { shape, classes, normalization }) => {
            check_image_options(settings)?;
            if is_fresh {
                config = normalization.apply(config.for_images(*shape, *classes));
                config.validate()?;
            }
            config.check_images(*shape, *classes)?;
            Ok(config.into())
        }
        (AnyModel::Language(_), DataForm::Images { .. }) => Err(UsageError(format!(
            "{name} reads text, and the dataset holds pictures; give an image classifier, such as small-cnn or \
             resnet-18, or a dataset of text"
        ))
        .into()),
        (AnyModel::Image(_), DataForm::Tokens { .. }) => Err(UsageError(format!(
            "{name} reads pictures, and the data is text; give a folder of pictures, a dataset of them, or a language \
             model"
        ))
        .into()),
    }
}

/// The config of a directory, if its vocabulary covers the data's.
fn knowing(name: &str, config: ModelConfig, vocabulary: usize) -> Result<ModelConfig, UsageError> {
    if vocabulary > config.vocab_size {
        let problem = format!(
            "the data has {vocabulary} different tokens, and {name} knows {}; pack the data with the model's own \
             tokenizer.json",
            config.vocab_size
        );
        return Err(UsageError(problem));
    }
    Ok(config)
}

/// Refuses options that apply only to language models.
fn check_image_options(settings: &Settings) -> Result<(), UsageError> {
    let Settings { layers, width, heads, kv_heads, mlp_width, .. } = settings;
    let shape = [layers, width, heads, kv_heads, mlp_width].iter().any(|shape| shape.is_some());
    let given = [
        ("layers, width, heads, kv-heads and mlp-width", shape),
        ("lora", settings.lora.is_some()),
        ("tokenizer", settings.tokenizer.is_some()),
        ("chat-template", settings.chat_template.is_some()),
        ("seq", settings.seq != Given::default().resolve().seq),
        ("tokens-per-step", settings.tokens_per_step.is_some()),
        ("sample-tokens", settings.sample_tokens > 0),
        ("overlong", settings.overlong != OverlongArg::Drop),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((key, _)) => {
            Err(UsageError(format!("{key} is for language models; leave it out for pictures")))
        }
        None => Ok(()),
    }
}

/// Refuses options that apply only to images.
fn check_text_options(settings: &Settings) -> Result<(), UsageError> {
    let given =
        [("flip", settings.flip), ("crop", settings.crop > 0), ("cutout", settings.cutout > 0)];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((key, _)) => {
            Err(UsageError(format!("{key} is for datasets of pictures; leave it out for text")))
        }
        None => Ok(()),
    }
}

/// Adds the adapters the run asks for. An adapter directory has already been checked against the model.
fn with_adapters(settings: &Settings, config: ModelConfig) -> Result<ModelConfig> {
    let config = match &settings.adapter {
        Some(path) => AdapterDirectory::open(path)?.apply_to(&config)?,
        None => settings.lora.iter().try_fold(config, |config, lora| lora.apply_to(config))?,
    };
    Ok(settings.base.apply_to(config)?)
}

/// Copies the options of the adapter the run starts from into `given`, so that the run can resume even if that
/// directory changes or disappears.
pub(super) fn take_adapter(given: &mut Given, base: &AnyModel) -> Result<()> {
    let Some(path) = &given.adapter else { return Ok(()) };
    let Some(base) = base.language() else {
        return Err(UsageError("adapters are for language models; leave out adapter".into()).into());
    };
    let adapted = AdapterDirectory::open(path)?.apply_to(base)?;
    let Some(adapters) = &adapted.adapters else { return Ok(()) };
    let lora = LoraArg::of_options(&adapters.options)?;
    if given.lora.as_ref().is_some_and(|given| *given != lora) {
        let problem = format!("{} has its own options; leave out lora", path.display());
        return Err(UsageError(problem).into());
    }
    given.lora = Some(lora);
    Ok(())
}

fn named(settings: &Settings) -> Result<String> {
    settings.model.clone().ok_or_else(|| {
        let problem =
            "give a model: a preset (see `storm model list`), a directory, or a name on the hub";
        UsageError(problem.to_owned()).into()
    })
}

/// Refuses shape options for existing weights.
fn check_shape(settings: &Settings) -> Result<(), UsageError> {
    let Settings { layers, width, heads, kv_heads, mlp_width, .. } = settings;
    if [layers, width, heads, kv_heads, mlp_width].iter().any(|shape| shape.is_some()) {
        let problem = "layers, width, heads, kv-heads and mlp-width are for presets; weights from a \
                       directory have their own shape";
        return Err(UsageError(problem.to_owned()));
    }
    Ok(())
}

impl Model {
    /// Resolves the named model, before the data's vocabulary is known.
    pub(super) fn new(settings: &Settings) -> Result<Model> {
        let name = named(settings)?;
        let located = model::locate(&name, Wanted::All)?;
        let (name, directory) = match located {
            Some(located) => (located.name, located.directory),
            None => (name.clone(), PathBuf::from(name)),
        };
        match directory.is_dir() {
            true => Model::of_directory(settings, name, directory),
            false => Ok(Model { config: preset_of_any(&name)?, name, directory, weights: None }),
        }
    }

    fn of_directory(settings: &Settings, name: String, directory: PathBuf) -> Result<Model> {
        check_shape(settings)?;
        if ImageDirectory::is_one(&directory) {
            let weights = ImageDirectory::open(&directory)?;
            let config = weights.config().into();
            return Ok(Model {
                name,
                directory,
                config,
                weights: Some(Weights::Image(Box::new(weights))),
            });
        }
        let weights = model::open(&directory)?;
        let dropout = weights.config().dropout();
        if !dropout.is_empty() {
            let fields: Vec<String> =
                dropout.iter().map(|(field, share)| format!("{field} = {share}")).collect();
            eprintln!(
                "warning: {name} asks for dropout ({}); STORM trains without it",
                fields.join(", ")
            );
        }
        let config = weights.model().into();
        Ok(Model { name, directory, config, weights: Some(Weights::Language(Box::new(weights))) })
    }

    /// The model for data of this form.
    pub(super) fn for_data(self, settings: &Settings, form: &DataForm) -> Result<Model> {
        let Model { name, directory, config, weights } = self;
        let config = for_data(settings, &name, config, weights.is_none(), form)?;
        Ok(Model { name, directory, config, weights })
    }

    /// The base model to record in the adapter's PEFT config.
    pub(super) fn base(&self) -> String {
        match self.directory.canonicalize() {
            // A hub name, which PEFT expects without the revision.
            _ if !Path::new(&self.name).exists() => {
                self.name.split('@').next().unwrap_or_default().to_owned()
            }
            Ok(path) => path.display().to_string(),
            Err(_) => self.name.clone(),
        }
    }

    /// The directory and vocabulary that determine the tokenizer; `None` for fresh weights.
    pub(super) fn of_tokenizer(&self) -> Option<TokenizerWeights<'_>> {
        let vocabulary = self.config.language()?.vocab_size;
        self.weights.as_ref().map(|_| TokenizerWeights { directory: &self.directory, vocabulary })
    }

    /// The directory that the weights come from.
    pub(super) fn source(&self) -> Option<PathBuf> {
        self.weights.as_ref().map(|_| self.directory.clone())
    }
}

/// The config of a run that started from a preset, rebuilt from its recorded options.
pub(crate) fn config_of_record(
    record: &BTreeMap<String, String>,
    vocabulary: usize,
) -> Result<ModelConfig> {
    let size = |key: &str| record.get(key)?.parse::<NonZeroUsize>().ok();
    let given = Given {
        layers: size("layers"),
        width: size("width"),
        heads: size("heads"),
        kv_heads: size("kv-heads"),
        mlp_width: size("mlp-width"),
        seq: size("seq"),
        ..Given::default()
    };
    let base = preset(record.get("model").map_or("", String::as_str))?;
    Ok(fresh(&given.resolve(), base, vocabulary)?)
}

/// The preset with the shape options applied, for this vocabulary.
fn fresh(
    settings: &Settings,
    mut config: ModelConfig,
    vocabulary: usize,
) -> Result<ModelConfig, ModelError> {
    config.vocab_size = vocabulary;
    if let Some(layers) = settings.layers {
        config.layer_count = layers.get();
    }
    if let Some(width) = settings.width {
        config.hidden_size = width.get();
        // Saturate rather than overflow: validation refuses sizes that are far too large.
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
    config.validate()?;
    Ok(config)
}
