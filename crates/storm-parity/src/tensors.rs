//! Converts tensors from STORM's layout to Hugging Face's and writes them to a safetensors file,
//! for Python.

use anyhow::{Context, Result};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::path::Path;
use storm_model::{ParameterSpec, StoredOrder};

/// A named f32 tensor.
pub(crate) struct NamedTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// The Hugging Face tensors of a parameter, or of anything of its shape.
pub(crate) fn to_hf(spec: &ParameterSpec, values: &[f32]) -> Vec<NamedTensor> {
    let row = spec.row_elements();
    let tensors = spec.pieces.iter().map(|piece| {
        let part = &values[piece.rows.start * row..piece.rows.end * row]; // (out, in)
        let values = match piece.order {
            StoredOrder::Transposed => {
                (0..row).flat_map(|i| part.iter().copied().skip(i).step_by(row)).collect()
            }
            StoredOrder::Rows => part.to_vec(),
            StoredOrder::ChannelsFirst { positions } => {
                let channels = row / positions;
                let stored = |row: &[f32]| -> Vec<f32> {
                    let places = (0..channels)
                        .flat_map(|channel| (0..positions).map(move |at| at * channels + channel));
                    places.map(|place| row[place]).collect()
                };
                part.chunks(row).flat_map(stored).collect()
            }
        };
        NamedTensor { name: piece.hf_name.clone(), shape: piece.shape.clone(), values }
    });
    tensors.collect()
}

/// Writes all tensors into one safetensors file.
pub(crate) fn write(path: &Path, tensors: Vec<NamedTensor>) -> Result<()> {
    let stored: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|NamedTensor { name, shape, values }| {
            (name, shape, values.into_iter().flat_map(f32::to_le_bytes).collect())
        })
        .collect();
    let mut views = Vec::with_capacity(stored.len());
    for (name, shape, bytes) in &stored {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes)
            .with_context(|| format!("`{name}` does not have the elements of its shape"))?;
        views.push((name, view));
    }
    safetensors::serialize_to_file(views, None, path)
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_model::HfPiece;

    #[test]
    fn pieces_are_cut_and_transposed() {
        let piece = |name: &str, rows: std::ops::Range<usize>, order| HfPiece {
            hf_name: name.to_owned(),
            shape: match order {
                StoredOrder::Transposed => vec![2, rows.len()],
                _ => vec![rows.len(), 2],
            },
            rows,
            order,
        };
        let spec = ParameterSpec {
            name: "both".to_owned(),
            shape: vec![3, 2],
            pieces: vec![
                piece("plain", 0..1, StoredOrder::Rows),
                piece("turned", 1..3, StoredOrder::Transposed),
            ],
        };
        let tensors = to_hf(&spec, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(tensors[0].values, [0.0, 1.0]);
        assert_eq!(tensors[1].values, [2.0, 4.0, 3.0, 5.0]);
    }
}
