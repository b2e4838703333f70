//! LoRA: small trained matrices beside frozen weights.
//!
//! An adapted projection computes `x · Wᵀ + scale · (x · Aᵀ) · Bᵀ`. [`LoraOptions`] says what is asked for, in PEFT's
//! words; [`Adapters`] says which projections of a model that comes to, and is part of its
//! [`ModelConfig`](crate::ModelConfig), so that whatever builds, loads or runs a model has its adapters too.

mod adapters;
mod directory;
mod merge;
mod options;
mod peft;

pub use adapters::{AdaptedLinear, AdaptedSlice, Adapters, LayerAdapters, is_adapter};
pub use directory::{AdaptedSource, AdapterDirectory, is_adapter_directory, save_adapter};
pub use merge::merge;
pub use options::{LoraOptions, Targets};
