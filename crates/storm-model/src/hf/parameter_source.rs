//! Sources of a model's parameters.

use super::directory::HfDirectory;
use super::dtype::Element;
use super::load::load_rows;
use super::names::{HF_HEAD, ParameterSpec};
use crate::ModelError;
use crate::lora::is_adapter;
use std::ops::Range;

/// A source of all parameters of a model.
pub trait ParameterSource {
    /// Reads rows of a parameter (for a vector, elements) as `f32` or `bf16`. `dest` holds exactly
    /// their elements. Needs only a few more megabytes, whatever the size.
    ///
    /// # Errors
    /// The parameter does not exist or cannot be read.
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError>;

    /// Reads a whole parameter.
    ///
    /// # Errors
    /// As [`ParameterSource::load_rows`].
    fn load<E: Element>(&self, spec: &ParameterSpec, dest: &mut [E]) -> Result<(), ModelError> {
        self.load_rows(spec, spec.rows(), dest)
    }

    /// Whether a parameter is missing and is initialized when the model is trained.
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
