//! The dequantized weights of a base that a run stores in 8 or 4 bits.

use crate::hf::{Element, ParameterSource, ParameterSpec};
use crate::lora::is_adapter;
use crate::{ModelConfig, ModelError};
use std::ops::Range;
use storm_graph::QuantizedRow;

/// A source whose frozen projections are quantized to the base format of a config and dequantized.
#[derive(Debug)]
pub struct Dequantized<'a, S> {
    config: &'a ModelConfig,
    source: &'a S,
}

impl<'a, S: ParameterSource> Dequantized<'a, S> {
    /// Wraps a source, for a config with adapters and a base format.
    pub fn new(config: &'a ModelConfig, source: &'a S) -> Dequantized<'a, S> {
        Dequantized { config, source }
    }
}

/// How a model quantizes the rows of a parameter. `None` if it does not.
pub fn quantized_rows(config: &ModelConfig, spec: &ParameterSpec) -> Option<QuantizedRow> {
    let format = config.base.quantized()?;
    let (layer, name) = spec.name.strip_prefix("layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let adapters = config.adapters.as_ref()?;
    let is_saved = || {
        let layer = adapters.layer(layer.min(config.layer_count - 1));
        layer.saved.iter().any(|saved| saved == name)
    };
    let is_projection = spec.shape.len() == 2 && !is_adapter(&spec.name) && !is_saved();
    is_projection.then(|| QuantizedRow::new(format, spec.row_elements()))
}

impl<S: ParameterSource> ParameterSource for Dequantized<'_, S> {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        let Some(form) = quantized_rows(self.config, spec) else {
            return self.source.load_rows(spec, rows, dest);
        };
        let mut values = vec![0f32; rows.len() * form.columns];
        self.source.load_rows(spec, rows, &mut values)?;
        let mut packed = vec![0; form.bytes()];
        for (values, dest) in values.chunks(form.columns).zip(dest.chunks_mut(form.columns)) {
            form.quantize(|column| values[column], &mut packed);
            form.dequantize(&packed, |column, value| dest[column] = E::from_f32(value));
        }
        Ok(())
    }

    fn starts_fresh(&self, spec: &ParameterSpec) -> bool {
        self.source.starts_fresh(spec)
    }
}
