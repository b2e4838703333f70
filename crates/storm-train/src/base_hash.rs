//! The hash that identifies the base model of a LoRA run.

use crate::TrainError;
use storm_model::{HfDirectory, ModelError, ParameterLayout};

/// Bytes read at once.
const PIECE_BYTES: usize = 4 << 20;

/// BLAKE3 of every weight of a model, with its name, type and shape. Does not depend on how the weights are split into
/// files.
///
/// # Errors
/// A file cannot be read.
pub fn base_hash(directory: &HfDirectory) -> Result<String, TrainError> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; PIECE_BYTES];
    let layout = ParameterLayout::new(directory.model());
    for piece in layout.iter().flat_map(|spec| spec.pieces) {
        let Some(entry) = directory.tensor(&piece.hf_name) else {
            let (path, name) = (directory.path().to_owned(), piece.hf_name);
            return Err(ModelError::NoSuchTensor { path, name }.into());
        };
        let head = format!("{}\n{} {:?}\n", piece.hf_name, entry.dtype.name(), entry.shape);
        hasher.update(head.as_bytes());
        // Scales and similar tensors of a quantized weight.
        for (name, part) in directory.parts(&piece.hf_name) {
            hasher.update(format!("{name}\n{} {:?}\n", part.dtype.name(), part.shape).as_bytes());
            let bytes = part.range.end - part.range.start;
            for offset in (0..bytes).step_by(PIECE_BYTES) {
                let length = PIECE_BYTES.min((bytes - offset) as usize);
                let file = directory.file(part).ok_or_else(|| ModelError::NoSuchTensor {
                    path: directory.path().to_owned(),
                    name: name.clone(),
                })?;
                file.read_bytes(part, offset, &mut buffer[..length])?;
                hasher.update_rayon(&buffer[..length]);
            }
        }
        let bytes = entry.range.end - entry.range.start;
        for offset in (0..bytes).step_by(PIECE_BYTES) {
            let length = PIECE_BYTES.min((bytes - offset) as usize);
            directory.read_bytes(&piece.hf_name, offset, &mut buffer[..length])?;
            hasher.update_rayon(&buffer[..length]);
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}
