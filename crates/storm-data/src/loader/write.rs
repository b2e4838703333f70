//! Writes the batches of a run to a file, for other programs that need the same batches in the same
//! order.
//!
//! The file is in the safetensors format: `tokens` and `targets`, and `segments` if rows hold
//! several samples, each (N, B, T) of i32.

use super::{Loader, LoaderOptions, Samples};
use crate::{DataError, Dataset};
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use storm_files::{IfPresent, StagedFile};

/// Safetensors headers are padded so that the data is aligned to eight bytes.
const ALIGNMENT_BYTES: usize = 8;

/// A column of a batch.
type Column = fn(&Samples) -> &[i32];

/// Writes the first `count` batches of a loader with these options to a file, atomically. Replaces
/// a regular file of that name. Needs the memory of one batch.
///
/// # Errors
/// There is nothing to load, the numbers are too large, or the file cannot be written.
pub fn write_batches(
    dataset: &Arc<Dataset>,
    options: LoaderOptions,
    count: u64,
    path: &Path,
) -> Result<(), DataError> {
    let mut columns: Vec<(&str, Column)> =
        vec![("tokens", |samples| &samples.tokens), ("targets", |samples| &samples.targets)];
    if Loader::new(Arc::clone(dataset), options)?.rows.has_segments() {
        columns.push(("segments", |samples| samples.segments.as_deref().unwrap_or_default()));
    }
    let LoaderOptions { batch, sequence, .. } = options;
    let sizes = [batch as u64, sequence as u64, size_of::<i32>() as u64, columns.len() as u64];
    let Some(bytes) = sizes.into_iter().try_fold(count, u64::checked_mul) else {
        let problem = format!("{count} batches of {batch} × {sequence} tokens are too many");
        return Err(DataError::Option { option: "count", problem });
    };
    let column_bytes = bytes / columns.len() as u64;
    let mut header = json!({});
    for (place, (name, _)) in (0u64..).zip(&columns) {
        header[*name] = json!({
            "dtype": "I32",
            "shape": [count, batch, sequence],
            "data_offsets": [place * column_bytes, (place + 1) * column_bytes],
        });
    }
    let mut header = header.to_string();
    let padded = header.len().next_multiple_of(ALIGNMENT_BYTES);
    header.extend(std::iter::repeat_n(' ', padded - header.len()));

    let io = DataError::io(path);
    let stage = DataError::stage(path);
    let mut file = StagedFile::create(path, IfPresent::Replace).map_err(&stage)?;
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(&io)?;
    file.write_all(header.as_bytes()).map_err(&io)?;
    let mut samples = Samples::default();
    for (_, column) in columns {
        // One pass over the data per column, so no column is ever in memory as a whole.
        let mut loader = Loader::new(Arc::clone(dataset), options)?;
        for _ in 0..count {
            loader.next_batch(&mut samples)?;
            for value in column(&samples) {
                file.write_all(&value.to_le_bytes()).map_err(&io)?;
            }
        }
    }
    file.finish().map_err(stage)
}
