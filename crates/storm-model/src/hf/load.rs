//! Loads a STORM parameter from Hugging Face tensors, in bounded memory.

use super::directory::HfDirectory;
use super::dtype::Element;
use super::names::{HF_HEAD, HfPiece, ParameterSpec, StoredOrder, hf_embedding};
use super::safetensors_file::CHUNK_BYTES;
use crate::ModelError;
use std::ops::Range;

/// Reads a parameter as `f32` or `bf16`: stacks the pieces and transposes GPT-2's matrices. `dest`
/// holds exactly the parameter's elements. Needs only a few more megabytes, whatever the size.
pub fn load_parameter<E: Element>(
    directory: &HfDirectory,
    spec: &ParameterSpec,
    dest: &mut [E],
) -> Result<(), ModelError> {
    load_rows(directory, spec, spec.rows(), dest)
}

/// Reads some rows of a parameter, like `load_parameter`.
pub(super) fn load_rows<E: Element>(
    directory: &HfDirectory,
    spec: &ParameterSpec,
    rows: Range<usize>,
    dest: &mut [E],
) -> Result<(), ModelError> {
    let wrong = |what, got, expected| ModelError::WrongLength {
        what,
        name: spec.name.clone(),
        got,
        expected,
    };
    let row = spec.row_elements();
    if rows.end > spec.rows().end {
        return Err(wrong("the end of the rows", rows.end, spec.rows().end));
    }
    if dest.len() != rows.len() * row {
        return Err(wrong("the buffer", dest.len(), rows.len() * row));
    }
    for piece in &spec.pieces {
        if piece.rows.end > spec.rows().end {
            return Err(wrong("the end of a piece", piece.rows.end, spec.rows().end));
        }
        let Some((own, at)) = piece.part_of(&rows) else { continue };
        if piece.hf_name == HF_HEAD && !directory.has_head() {
            return Err(ModelError::NoHead { path: directory.path().to_owned() });
        }
        let stored = directory.element_count(&piece.hf_name)?;
        if stored != piece.rows.len() * row {
            return Err(wrong("a piece", stored, piece.rows.len() * row));
        }
        let dest = &mut dest[at * row..(at + own.len()) * row];
        match piece.order {
            StoredOrder::Transposed => load_transposed(directory, piece, own.clone(), dest)?,
            StoredOrder::Rows | StoredOrder::ChannelsFirst { .. } => {
                directory.read_elements(&piece.hf_name, own.start * row, dest)?;
                piece.order.restore_rows(row, dest);
            }
        }
        if own.start == 0 && piece.hf_name == hf_embedding(directory.model().family) {
            check_tied(directory)?;
        }
    }
    Ok(())
}

/// Reads rows of (out, in) from a file with (in, out): reads bands of the file's rows and scatters
/// them.
fn load_transposed<E: Element>(
    directory: &HfDirectory,
    piece: &HfPiece,
    wanted: Range<usize>,
    dest: &mut [E],
) -> Result<(), ModelError> {
    let (inputs, outputs) = match *piece.shape.as_slice() {
        [inputs, outputs] if wanted.len().checked_mul(inputs) == Some(dest.len()) => {
            (inputs, outputs)
        }
        _ => {
            return Err(ModelError::WrongLength {
                what: "the shape of a transposed piece",
                name: piece.hf_name.clone(),
                got: piece.shape.iter().copied().fold(1, usize::saturating_mul),
                expected: dest.len(),
            });
        }
    };
    let band_rows = (CHUNK_BYTES / size_of::<f32>() / outputs.max(1)).clamp(1, inputs.max(1));
    let mut band = vec![E::default(); band_rows * outputs]; // (band_rows, outputs)
    for start in (0..inputs).step_by(band_rows) {
        let rows = band_rows.min(inputs - start);
        let band = &mut band[..rows * outputs];
        directory.read_elements(&piece.hf_name, start * outputs, band)?;
        for (place, output) in wanted.clone().enumerate() {
            let dest = &mut dest[place * inputs + start..][..rows];
            for (row, dest) in dest.iter_mut().enumerate() {
                *dest = band[row * outputs + output];
            }
        }
    }
    Ok(())
}

/// A tied head that is stored anyway must equal the embedding. If they differ, transformers unties
/// them, and STORM would train a different model.
fn check_tied(directory: &HfDirectory) -> Result<(), ModelError> {
    let config = directory.model();
    let names = [hf_embedding(config.family), HF_HEAD];
    let [Some(embedding), Some(head)] = names.map(|name| directory.tensor(name)) else {
        return Ok(());
    };
    if !config.tied_embeddings {
        return Ok(());
    }
    let differ = || ModelError::TiedWeightsDiffer { path: directory.path().to_owned() };
    let bytes = embedding.range.end - embedding.range.start;
    if embedding.dtype != head.dtype || bytes != head.range.end - head.range.start {
        return Err(differ());
    }
    let mut buffers = [(); 2].map(|()| vec![0; CHUNK_BYTES.min(bytes as usize)]);
    for offset in (0..bytes).step_by(CHUNK_BYTES) {
        let length = CHUNK_BYTES.min((bytes - offset) as usize);
        for (name, buffer) in names.iter().zip(&mut buffers) {
            directory.read_bytes(name, offset, &mut buffer[..length])?;
        }
        if buffers[0][..length] != buffers[1][..length] {
            return Err(differ());
        }
    }
    Ok(())
}
