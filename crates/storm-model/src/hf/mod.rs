//! Hugging Face directories: config.json and safetensors, in and out.

mod carry;
mod check;
mod config_fields;
mod config_json;
mod config_write;
mod directory;
mod dtype;
mod generation;
mod load;
mod names;
mod parameter_source;
mod paths;
mod pickle;
mod remarks;
mod rope_json;
mod safetensors_file;
mod safetensors_writer;
mod save;
mod strict_json;
mod wrappers;

pub use carry::is_carried;
pub use config_json::HfConfig;
pub use directory::HfDirectory;
pub use dtype::{Dtype, Element, WeightDtype};
pub use generation::end_of_text;
pub use load::load_parameter;
pub use names::{HfPiece, ParameterLayout, ParameterSpec, parameters};
pub use parameter_source::ParameterSource;
pub use remarks::Remark;
pub use safetensors_file::{HEADER_BYTES_MAX, SafetensorsFile, TensorEntry};
pub(crate) use safetensors_writer::SafetensorsWriter;
pub use safetensors_writer::safetensors_header;
pub(crate) use save::write_json;
pub use save::{IfExists, SaveOptions, save};
pub(crate) use strict_json::{parse as parse_json, read_capped};
