//! Where the parameters of a model come from.

use super::directory::HfDirectory;
use super::dtype::Element;
use super::load::load_parameter;
use super::names::{HF_HEAD, ParameterSpec};
use crate::ModelError;
use crate::lora::is_adapter;

/// Something that holds every parameter of a model.
pub trait ParameterSource {
    /// Reads a parameter as `f32` or `bf16`. `dest` holds exactly its elements.
    ///
    /// # Errors
    /// The parameter is not there, or cannot be read.
    fn load<E: Element>(&self, spec: &ParameterSpec, dest: &mut [E]) -> Result<(), ModelError>;

    /// Whether a parameter is not there and starts fresh when the model is trained.
    fn starts_fresh(&self, _spec: &ParameterSpec) -> bool {
        false
    }
}

impl ParameterSource for HfDirectory {
    fn load<E: Element>(&self, spec: &ParameterSpec, dest: &mut [E]) -> Result<(), ModelError> {
        load_parameter(self, spec, dest)
    }

    fn starts_fresh(&self, spec: &ParameterSpec) -> bool {
        is_adapter(&spec.name)
            || !self.has_head() && spec.pieces.iter().any(|piece| piece.hf_name == HF_HEAD)
    }
}
