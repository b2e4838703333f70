//! Where the parameters of a model come from.

use super::directory::HfDirectory;
use super::dtype::Element;
use super::load::load_rows;
use super::names::{HF_HEAD, ParameterSpec};
use crate::ModelError;
use crate::lora::is_adapter;
use std::ops::Range;

/// Something that holds every parameter of a model.
pub trait ParameterSource {
    /// Reads rows of a parameter as `f32` or `bf16`; of a vector, elements. `dest` holds exactly their elements. Needs a few
    /// more megabytes, whatever the size.
    ///
    /// # Errors
    /// The parameter is not there, or cannot be read.
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError>;

    /// Reads all of a parameter.
    ///
    /// # Errors
    /// As [`ParameterSource::load_rows`].
    fn load<E: Element>(&self, spec: &ParameterSpec, dest: &mut [E]) -> Result<(), ModelError> {
        self.load_rows(spec, spec.rows(), dest)
    }

    /// Whether a parameter is not there and starts fresh when the model is trained.
    fn starts_fresh(&self, _spec: &ParameterSpec) -> bool {
        false
    }
}

impl ParameterSource for HfDirectory {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        load_rows(self, spec, rows, dest)
    }

    fn starts_fresh(&self, spec: &ParameterSpec) -> bool {
        is_adapter(&spec.name)
            || !self.has_head() && spec.pieces.iter().any(|piece| piece.hf_name == HF_HEAD)
    }
}
