//! Builds a program from the config of an image classifier, and initializes its parameters.

use super::config::ImageConfig;
use super::network::{Network, network};
use super::parameters::parameters;
use crate::{BuildOptions, Initialization, ModelError, Packing};
use storm_graph::Program;

/// Augmentation of training images. It depends only on the run's seed, the epoch and the image's
/// index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Augmentation {
    /// Whether half of the images are mirrored.
    pub flip: bool,
    /// Pixels of padding on each side before a random crop of the original size. 0 for none.
    pub crop: usize,
    /// Side of a square that is blanked out. 0 for none.
    pub cutout: usize,
}

/// Builds the forward program of an image classifier.
///
/// Inputs: `images` (B, H, W, C) u8, `samples` (B, 3) i32 (the low and high half of an image's
/// index, and the epoch). For the loss, `targets` (B) i32 and `denominator`. The trainer fills the
/// others.
///
/// # Errors
/// The config is not valid, or a batch of this size is too large.
pub(crate) fn build(config: &ImageConfig, options: &BuildOptions) -> Result<Program, ModelError> {
    config.validate()?;
    let refuse = |field: &'static str, value: String, rule: &str| {
        Err(ModelError::InvalidConfig { field, value, rule: rule.to_owned() })
    };
    if options.batch == 0 || options.sequence != 1 {
        let sizes = format!("{} × {}", options.batch, options.sequence);
        return refuse("batch × sequence", sizes, "at least 1 picture, each by itself");
    }
    if options.packing != Packing::Single {
        return refuse("packing", "segments".to_owned(), "single for pictures");
    }
    let [height, width] = config.image_size;
    let Augmentation { crop, cutout, .. } = options.augmentation;
    if crop >= height.min(width) || cutout > height.min(width) {
        let sizes = format!("crop {crop}, cutout {cutout}");
        return refuse("augmentation", sizes, "smaller than the pictures");
    }
    let Network { sections, stages, .. } = network(config, options)?;
    Ok(Program::new(sections, stages)?)
}

/// Initialization of the parameter called `name` in a section, as in PyTorch's modules.
pub(crate) fn initialization(config: &ImageConfig, name: &str) -> Initialization {
    // Apart from norms, only convolutions without a norm have a bias. They run once, so their name
    // identifies them.
    let is_of_norm = ["norm", "bn1", "bn2", "downsample.1"]
        .iter()
        .any(|norm| name.rsplit_once('.').is_some_and(|(module, _)| module.ends_with(norm)));
    match name.rsplit_once('.') {
        Some((_, "running_mean")) => Initialization::Constant(0.0),
        Some((_, "running_var")) => Initialization::Constant(1.0),
        Some((_, "weight")) if is_of_norm => Initialization::Constant(1.0),
        Some((_, "bias")) if is_of_norm => Initialization::Constant(0.0),
        Some((module, "bias")) => {
            let weight = format!("{module}.weight");
            let spec = parameters(config).into_iter().find(|spec| spec.name == weight);
            let inputs = spec.map_or(1, |spec| spec.row_elements());
            Initialization::Uniform { bound: (1.0 / (inputs as f64).sqrt()) as f32 }
        }
        _ => Initialization::UniformByRow,
    }
}
