//! A model of any kind. This is the one place that distinguishes language models and image
//! classifiers.

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
    /// Predicts the next token.
    Language(Box<ModelConfig>),
    /// Predicts the class of an image.
    Image(ImageConfig),
}

/// The unit in which throughput is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unit {
    /// A sample is a sequence of tokens.
    #[default]
    Tokens,
    /// A sample is one image.
    Images,
}

impl Unit {
    /// The plural name: `tokens`, `images`.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Tokens => "tokens",
            Unit::Images => "images",
        }
    }

    /// The unit in progress lines: `tok/s`, `images/s`.
    pub fn per_second(self) -> &'static str {
        match self {
            Unit::Tokens => "tok/s",
            Unit::Images => "images/s",
        }
    }

    /// The JSON key: `tokens_per_second`, `images_per_second`.
    pub fn per_second_key(self) -> &'static str {
        match self {
            Unit::Tokens => "tokens_per_second",
            Unit::Images => "images_per_second",
        }
    }

    /// The JSON key: `tokens_per_step`, `images_per_step`.
    pub fn per_step_key(self) -> &'static str {
        match self {
            Unit::Tokens => "tokens_per_step",
            Unit::Images => "images_per_step",
        }
    }

    /// The name for the rows of a batch: `sequences`, `images`.
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
    /// The unit of its throughput.
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

    /// LoRA adapters, if any.
    pub fn adapters(&self) -> Option<&Adapters> {
        self.language()?.adapters.as_ref()
    }

    /// The storage format of frozen weights in 8 or 4 bits.
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

    /// The initialization of the parameter called `name` in a section.
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

    /// Number of parameters. Tied parameters count once. For a validated config.
    pub fn parameter_count(&self) -> u64 {
        match self {
            AnyModel::Language(config) => config.parameter_count(),
            AnyModel::Image(config) => config.parameter_count(),
        }
    }

    /// Whether it has gated units, whose inputs can be kept for the backward pass in 8 bits.
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

    /// Number of layers: the blocks of a language model, or the layers with weights of an image
    /// classifier.
    pub fn layer_count(&self) -> usize {
        match self {
            AnyModel::Language(config) => config.layer_count,
            AnyModel::Image(config) => config.layer_count(),
        }
    }

    /// The default type of saved weights, after training in this type.
    pub fn saved_dtype(&self, trained: WeightDtype) -> WeightDtype {
        match self {
            AnyModel::Language(_) => trained,
            // Running statistics lose precision in 16 bits, and the files are small.
            AnyModel::Image(_) => WeightDtype::F32,
        }
    }

    /// Saves the model. A language model is saved as by [`save`](crate::save). An image classifier
    /// is saved as config.json and model.safetensors, with the names and shapes of PyTorch's
    /// modules.
    ///
    /// # Errors
    /// From the provider or the file system. An existing directory is unchanged.
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
