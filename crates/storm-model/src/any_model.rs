//! A model of any kind: the one place where language models and image classifiers are told apart.

use crate::vision;
use crate::{
    Adapters, BuildOptions, Element, ImageConfig, Initialization, ModelConfig, ModelError,
    ParameterSpec, SaveOptions, WeightDtype,
};
use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use storm_graph::{Program, QuantizedFormat};

/// A model that can be trained, evaluated and saved.
#[derive(Debug, Clone, PartialEq)]
pub enum AnyModel {
    /// Reads tokens and says which follows each.
    Language(Box<ModelConfig>),
    /// Reads pictures and says which class each is of.
    Image(ImageConfig),
}

/// What a model reads, as throughput counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unit {
    /// A sample is a sequence of these.
    #[default]
    Tokens,
    /// A sample is one of these.
    Images,
}

impl Unit {
    /// `tokens`, `images`.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Tokens => "tokens",
            Unit::Images => "images",
        }
    }

    /// As a progress line has it: `tok/s`, `images/s`.
    pub fn per_second(self) -> &'static str {
        match self {
            Unit::Tokens => "tok/s",
            Unit::Images => "images/s",
        }
    }

    /// A key of JSON: `tokens_per_second`, `images_per_second`.
    pub fn per_second_key(self) -> &'static str {
        match self {
            Unit::Tokens => "tokens_per_second",
            Unit::Images => "images_per_second",
        }
    }

    /// A key of JSON: `tokens_per_step`, `images_per_step`.
    pub fn per_step_key(self) -> &'static str {
        match self {
            Unit::Tokens => "tokens_per_step",
            Unit::Images => "images_per_step",
        }
    }

    /// What a row of a batch is: `sequences`, `images`.
    pub fn rows(self) -> &'static str {
        match self {
            Unit::Tokens => "sequences",
            Unit::Images => "images",
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl AnyModel {
    /// What it reads.
    pub fn unit(&self) -> Unit {
        match self {
            AnyModel::Language(_) => Unit::Tokens,
            AnyModel::Image(_) => Unit::Images,
        }
    }

    /// The config of a language model.
    pub fn language(&self) -> Option<&ModelConfig> {
        match self {
            AnyModel::Language(config) => Some(config),
            AnyModel::Image(_) => None,
        }
    }

    /// The config of an image classifier.
    pub fn image(&self) -> Option<&ImageConfig> {
        match self {
            AnyModel::Language(_) => None,
            AnyModel::Image(config) => Some(config),
        }
    }

    /// Adapters beside the weights.
    pub fn adapters(&self) -> Option<&Adapters> {
        self.language()?.adapters.as_ref()
    }

    /// How frozen weights in 8 or 4 bits are stored.
    pub fn quantized(&self) -> Option<QuantizedFormat> {
        self.language()?.base.quantized()
    }

    /// Builds the forward program.
    ///
    /// # Errors
    /// The config is not valid for these options.
    pub fn build(&self, options: &BuildOptions) -> Result<Program, ModelError> {
        match self {
            AnyModel::Language(config) => crate::build(config, options),
            AnyModel::Image(config) => vision::build(config, options),
        }
    }

    /// How the parameter that a section calls `name` starts.
    pub fn initialization(&self, name: &str) -> Initialization {
        match self {
            AnyModel::Language(config) => crate::initialization(config, name),
            AnyModel::Image(config) => vision::initialization(config, name),
        }
    }

    /// Every parameter of a validated config with its full name.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        match self {
            AnyModel::Language(config) => crate::parameters(config),
            AnyModel::Image(config) => vision::parameters(config),
        }
    }

    /// Parameters of the model; tied ones count once. For a validated config.
    pub fn parameter_count(&self) -> u64 {
        match self {
            AnyModel::Language(config) => config.parameter_count(),
            AnyModel::Image(config) => config.parameter_count(),
        }
    }

    /// Whether it has gated units, whose inputs can wait for the backward pass in 8 bits.
    pub fn has_gated_units(&self) -> bool {
        self.language().is_some_and(|config| config.family.has_gated_units())
    }

    /// `model_type` in config.json.
    pub fn type_name(&self) -> &'static str {
        match self {
            AnyModel::Language(config) => config.family.model_type(),
            AnyModel::Image(_) => vision::IMAGE_MODEL_TYPE,
        }
    }

    /// How many layers it has: blocks of a language model, layers with weights of an image classifier.
    pub fn layer_count(&self) -> usize {
        match self {
            AnyModel::Language(config) => config.layer_count,
            AnyModel::Image(config) => config.layer_count(),
        }
    }

    /// What its weights are saved as, if nothing else is asked for, after training in this type.
    pub fn saved_dtype(&self, trained: WeightDtype) -> WeightDtype {
        match self {
            AnyModel::Language(_) => trained,
            // Running statistics lose digits in 16 bits, and the files are small.
            AnyModel::Image(_) => WeightDtype::F32,
        }
    }

    /// Saves the model: a language model as [`save`](crate::save) does, an image classifier as config.json and
    /// model.safetensors with the names and shapes that PyTorch's modules have.
    ///
    /// # Errors
    /// From the provider or the file system; an existing directory is left as it was.
    pub fn save<E, P>(
        &self,
        output: &Path,
        options: &SaveOptions<'_>,
        provider: P,
    ) -> Result<(), ModelError>
    where
        E: Element,
        P: FnMut(
            &ParameterSpec,
            Range<usize>,
            &mut [E],
        ) -> Result<(), Box<dyn Error + Send + Sync>>,
    {
        match self {
            AnyModel::Language(config) => crate::save(output, config, options, provider),
            AnyModel::Image(config) => vision::save(output, config, options, provider),
        }
    }
}

impl From<ModelConfig> for AnyModel {
    fn from(config: ModelConfig) -> AnyModel {
        AnyModel::Language(Box::new(config))
    }
}

impl From<&ModelConfig> for AnyModel {
    fn from(config: &ModelConfig) -> AnyModel {
        AnyModel::Language(Box::new(config.clone()))
    }
}

impl From<ImageConfig> for AnyModel {
    fn from(config: ImageConfig) -> AnyModel {
        AnyModel::Image(config)
    }
}

impl From<&ImageConfig> for AnyModel {
    fn from(config: &ImageConfig) -> AnyModel {
        AnyModel::Image(config.clone())
    }
}

impl From<&AnyModel> for AnyModel {
    fn from(model: &AnyModel) -> AnyModel {
        model.clone()
    }
}
