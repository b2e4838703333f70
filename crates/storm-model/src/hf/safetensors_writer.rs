//! Writes a safetensors file tensor by tensor, header first.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::dtype::{Dtype, Element, WeightDtype, encode};
use super::safetensors_file::HEADER_BYTES_MAX;
use crate::ModelError;

/// A file whose header is written and whose tensors are being written in the header's order.
pub(crate) struct SafetensorsWriter {
    path: PathBuf,
    file: File,
    dtype: WeightDtype,
    bytes_left: u64,
    buffer: Vec<u8>,
}

impl SafetensorsWriter {
    pub(crate) fn create(
        path: &Path,
        dtype: WeightDtype,
        tensors: &[(String, Vec<usize>)],
    ) -> Result<Self, ModelError> {
        let entries =
            tensors.iter().map(|(name, shape)| (name.as_str(), dtype.dtype(), shape.as_slice()));
        let (header, data_bytes) = safetensors_header(entries);
        if header.len() as u64 - 8 > HEADER_BYTES_MAX {
            let (what, bytes) = ("the header (save in smaller shards)", header.len() as u64 - 8);
            return Err(ModelError::TooLarge {
                path: path.to_owned(),
                what,
                bytes,
                limit: HEADER_BYTES_MAX,
            });
        }
        let mut file = File::create_new(path).map_err(ModelError::io("create the file", path))?;
        file.write_all(&header).map_err(ModelError::io("write the header", path))?;
        Ok(Self { path: path.to_owned(), file, dtype, bytes_left: data_bytes, buffer: Vec::new() })
    }

    /// Writes the next elements.
    pub(crate) fn write<E: Element>(&mut self, elements: &[E]) -> Result<(), ModelError> {
        encode(elements, self.dtype, &mut self.buffer);
        self.file.write_all(&self.buffer).map_err(ModelError::io("write weights", &self.path))?;
        self.bytes_left -= self.buffer.len() as u64;
        Ok(())
    }

    /// Finishes the file and flushes it to disk.
    pub(crate) fn finish(self) -> Result<(), ModelError> {
        assert_eq!(self.bytes_left, 0, "every tensor of the header is written");
        self.file.sync_all().map_err(ModelError::io("flush the file to disk", &self.path))
    }
}

/// The start of a safetensors file with these tensors, and the number of bytes that follow. The
/// start is the length prefix and the header, padded so that the data starts at a multiple of 8.
/// The tensors follow in this order, without gaps.
pub fn safetensors_header<'a>(
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [usize])>,
) -> (Vec<u8>, u64) {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0u64;
    for (name, dtype, shape) in tensors {
        let start = end;
        end += shape.iter().map(|size| *size as u64).product::<u64>() * dtype.size_bytes() as u64;
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [start, end]});
        entries.insert(name.to_owned(), entry);
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    (bytes, end)
}
