//! LoRA: small trained matrices in addition to frozen weights.
//!
//! An adapted projection computes `x · Wᵀ + scale · (x · Aᵀ) · Bᵀ`. [`LoraOptions`] are the options
//! in PEFT's terms. [`Adapters`] are the resulting adapters of a model's projections. They are part
//! of its [`ModelConfig`](crate::ModelConfig), so code that builds, loads or runs a model includes
//! them.

mod adapters;
mod directory;
mod merge;
mod options;
mod peft;

pub use adapters::{AdaptedLinear, AdaptedSlice, Adapters, LayerAdapters, is_adapter};
pub use directory::{AdaptedSource, AdapterDirectory, is_adapter_directory, save_adapter};
pub use merge::merge;
pub use options::{LoraOptions, Targets};
