//! The config of an image classifier, as stored in config.json.

use super::network::network;
use crate::{BuildOptions, ModelError, ParameterSpec};
use serde::{Deserialize, Serialize};
use storm_graph::DType;

/// `model_type` in config.json of an image classifier.
pub const IMAGE_MODEL_TYPE: &str = "storm-image";

/// Hard limits, well above anything that trains in practice.
const SIDE_MAX: usize = 1024;
const CHANNELS_MAX: usize = 16;
const CLASSES_MAX: usize = 1 << 20;
const WIDTH_MAX: usize = 1 << 16;
const BLOCKS_MAX: usize = 256;
const STAGES_MAX: usize = 8;

/// An image classifier. Call [`ImageConfig::validate`] before use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageConfig {
    /// Always [`IMAGE_MODEL_TYPE`].
    model_type: String,
    /// Height and width of an image.
    pub image_size: [usize; 2],
    /// Channels of an image: 3 for RGB.
    pub channels: usize,
    /// Number of classes.
    pub classes: usize,
    /// The value subtracted from each channel. Pixel values are from 0 to 1.
    pub mean: Vec<f64>,
    /// The value that each channel is then divided by.
    pub std: Vec<f64>,
    /// The network.
    pub network: ImageNetwork,
}

/// The supported networks for images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "architecture", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ImageNetwork {
    /// 3×3 convolutions, each with ReLU and 2×2 max-pooling, then two dense layers.
    SmallCnn {
        /// Channels after each convolution.
        widths: Vec<usize>,
        /// Width of the first dense layer.
        hidden: usize,
        /// Dropout rate of its outputs in training.
        dropout: f64,
    },
    /// Nine weight layers, like the fast networks for CIFAR-10: a stem, three convolutions with
    /// max-pooling, residual blocks after the first and the last of them, and a linear head without
    /// bias, whose logits are scaled.
    Resnet9 {
        /// Channels of the stem and after each of the three convolutions.
        widths: [usize; 4],
        /// Factor applied to the logits.
        logit_scale: f64,
    },
    /// A 3×3 stem without pooling, then stages of basic blocks. Each stage but the first halves the
    /// image.
    Resnet {
        /// Channels of each stage. The stem has as many as the first stage.
        widths: Vec<usize>,
        /// Basic blocks of each stage.
        blocks: usize,
    },
}

impl ImageConfig {
    /// Mean and standard deviation of CIFAR-10's channels, as usually published.
    pub const CIFAR10: ([f64; 3], [f64; 3]) = ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]);

    /// A network for RGB images, normalized with the statistics of CIFAR-10.
    pub fn new(image_size: [usize; 2], classes: usize, network: ImageNetwork) -> ImageConfig {
        ImageConfig {
            model_type: IMAGE_MODEL_TYPE.to_owned(),
            image_size,
            channels: 3,
            classes,
            mean: ImageConfig::CIFAR10.0.to_vec(),
            std: ImageConfig::CIFAR10.1.to_vec(),
            network,
        }
    }

    /// Checks every number against hard limits.
    ///
    /// # Errors
    /// Names the field and its allowed values.
    pub fn validate(&self) -> Result<(), ModelError> {
        within("model_type", &self.model_type, self.model_type == IMAGE_MODEL_TYPE, || {
            format!("`{IMAGE_MODEL_TYPE}`")
        })?;
        for side in self.image_size {
            count("image_size", side, SIDE_MAX)?;
        }
        count("channels", self.channels, CHANNELS_MAX)?;
        count("classes", self.classes, CLASSES_MAX)?;
        for (field, values) in [("mean", &self.mean), ("std", &self.std)] {
            within(field, format!("{values:?}"), values.len() == self.channels, || {
                format!("one number for each of the {} channels", self.channels)
            })?;
            // Kernels use them as f32.
            let is_usable = |value: &f64| {
                let value = *value as f32;
                value.is_finite() && (field == "mean" || value > 0.0)
            };
            within(field, format!("{values:?}"), values.iter().all(is_usable), || {
                "finite, and positive for std".to_owned()
            })?;
        }
        self.validate_network()
    }

    fn validate_network(&self) -> Result<(), ModelError> {
        let (widths, halvings): (&[usize], usize) = match &self.network {
            ImageNetwork::SmallCnn { widths, hidden, dropout } => {
                count("hidden", *hidden, WIDTH_MAX)?;
                within("dropout", dropout, (0.0..1.0).contains(dropout), || {
                    "at least 0 and less than 1".to_owned()
                })?;
                (widths, widths.len())
            }
            ImageNetwork::Resnet9 { widths, logit_scale } => {
                let scale = *logit_scale as f32;
                let is_good = scale > 0.0 && scale.is_finite();
                within("logit_scale", logit_scale, is_good, || "positive".to_owned())?;
                (widths, 3)
            }
            ImageNetwork::Resnet { widths, blocks } => {
                count("blocks", *blocks, BLOCKS_MAX)?;
                (widths, widths.len().saturating_sub(1))
            }
        };
        count("the number of widths", widths.len(), STAGES_MAX)?;
        for &width in widths {
            count("widths", width, WIDTH_MAX)?;
        }
        // Sides are halved this many times, and at least one pixel must remain.
        let least = 1usize << halvings.min(STAGES_MAX);
        for side in self.image_size {
            within("image_size", side, side >= least, || {
                format!("at least {least} for this network")
            })?;
        }
        // This detects any other size that is too large, so that a validated config can be built.
        network(self, &BuildOptions::training(1, 1, DType::F32))?;
        Ok(())
    }

    /// The same network for images of another shape (H, W, channels) and this many classes.
    pub fn for_images(self, [height, width, channels]: [usize; 3], classes: usize) -> ImageConfig {
        let (mean, std) = match channels == self.channels {
            true => (self.mean, self.std),
            // The statistics are unknown: scale values to -1..1.
            false => (vec![0.5; channels], vec![0.5; channels]),
        };
        ImageConfig { image_size: [height, width], channels, classes, mean, std, ..self }
    }

    /// Checks that the images have the network's shape, and that there are not more classes than it
    /// has.
    ///
    /// # Errors
    /// Names the difference.
    pub fn check_images(&self, shape: [usize; 3], classes: usize) -> Result<(), ModelError> {
        let [height, width] = self.image_size;
        let own = [height, width, self.channels];
        within("the form of the pictures", format!("{shape:?}"), shape == own, || {
            format!("{own:?} (height, width, channels) for this network")
        })?;
        within("the number of classes", classes, classes <= self.classes, || {
            format!("at most {} for this network", self.classes)
        })
    }

    /// Number of layers with weights: convolutions and dense layers, without those of shortcuts.
    /// For a validated config.
    pub fn layer_count(&self) -> usize {
        match &self.network {
            ImageNetwork::SmallCnn { widths, .. } => widths.len() + 2,
            ImageNetwork::Resnet9 { .. } => 9,
            ImageNetwork::Resnet { widths, blocks } => 2 + 2 * widths.len() * blocks,
        }
    }

    /// Number of trained parameters, without running statistics. For a validated config.
    pub fn parameter_count(&self) -> u64 {
        let learns = |spec: &ParameterSpec| !spec.name.contains(".running_");
        let specs = super::parameters(self).into_iter().filter(learns);
        specs.map(|spec| spec.element_count() as u64).sum()
    }
}

fn count(field: &'static str, value: usize, most: usize) -> Result<(), ModelError> {
    within(field, value, (1..=most).contains(&value), || format!("from 1 to {most}"))
}

fn within(
    field: &'static str,
    value: impl ToString,
    is_good: bool,
    rule: impl FnOnce() -> String,
) -> Result<(), ModelError> {
    match is_good {
        true => Ok(()),
        false => Err(ModelError::InvalidConfig { field, value: value.to_string(), rule: rule() }),
    }
}
