//! Model configs and programs, and reading and writing of model directories.
//!
//! - [`AnyModel`] is a language model or an image classifier. Higher crates distinguish the two
//!   only for data and messages.
//! - [`ModelConfig`] describes every supported family of language models in one plain struct.
//!   [`preset`] creates one by name.
//! - [`build`] turns a config into a program, and [`build_decoder`] into programs that generate
//!   text.
//! - [`ParameterLayout`] lists the parameters of a model and the Hugging Face tensors that each
//!   consists of.
//! - [`HfDirectory`] opens a Hugging Face directory, [`load_parameter`] reads from it, and [`save`]
//!   writes one.
//! - [`ImageConfig`] describes an image classifier. [`image_preset`] creates one by name,
//!   [`ImageDirectory`] opens one.
//!
//! Files are untrusted: sizes are limited before memory is allocated, offsets are checked before a
//! read, and formats that can run code are rejected.

mod any_model;
mod base_format;
mod build;
mod config;
mod decode;
mod dequantized;
mod error;
mod hf;
mod lora;
mod presets;
mod rotary;
mod vision;
mod window;

pub use any_model::{AnyModel, Unit};
pub use base_format::BaseFormat;
pub use build::{
    BuildOptions, DEFAULT_CHUNK_ROWS, DROPOUT_INPUT, Initialization, ModelOutput, PHASE_INPUT,
    Packing, Products, Trainable, build, fp8_projections, initialization,
};
pub use config::{Family, ModelConfig};
pub use decode::{
    DecodeOptions, DecodePrograms, PieceProgram, build_decoder, build_streamed_decoder,
};
pub use dequantized::{Dequantized, quantized_rows};
pub use error::{ModelError, NameList, TensorReport};
pub use hf::{
    Dtype, Element, HEADER_BYTES_MAX, HfConfig, HfDirectory, HfPiece, IfExists, ParameterLayout,
    ParameterSource, ParameterSpec, Quantization, Remark, SafetensorsFile, SaveOptions,
    StoredOrder, TensorEntry, WeightDtype, end_of_text, is_carried, load_parameter, parameters,
    safetensors_header, save,
};
pub use lora::{
    AdaptedLinear, AdaptedSlice, AdaptedSource, AdapterDirectory, Adapters, LayerAdapters,
    LoraOptions, Targets, is_adapter, is_adapter_directory, merge, save_adapter,
};
pub use presets::{preset, preset_names};
pub use rotary::{Rotary, RotaryScaling};
pub use vision::{
    Augmentation, IMAGE_MODEL_TYPE, ImageConfig, ImageDirectory, ImageNetwork, image_preset,
    image_preset_names,
};
pub use window::SlidingWindow;
