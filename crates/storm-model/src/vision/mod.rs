//! Image classifiers: small convolutional networks and residual networks for small images.

mod build;
mod config;
mod draft;
mod files;
mod network;
mod parameters;
mod presets;

pub use build::Augmentation;
pub(crate) use build::{build, initialization};
pub use config::{IMAGE_MODEL_TYPE, ImageConfig, ImageNetwork};
pub use files::ImageDirectory;
pub(crate) use files::save;
pub(crate) use parameters::parameters;
pub use presets::{image_preset, image_preset_names};
