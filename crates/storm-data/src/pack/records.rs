//! Records of a file, whatever they are written in.

use super::cut::PIECE_BYTES;
use super::input::{Content, Job};
use crate::{DataError, RecordPlace};

/// The longest record, as it is written in its file.
pub(crate) const RECORD_BYTES_MAX: u64 = 64 << 20;

/// What is wrong with a longer one.
pub(crate) fn too_long() -> String {
    "longer than 64 MiB; a record is one document or sample".to_owned()
}

/// A record as it was read.
pub(super) struct Raw {
    pub(super) place: RecordPlace,
    /// In memory.
    pub(super) bytes: u64,
    /// As JSON, or why it cannot be.
    pub(super) json: Result<String, String>,
}

impl Raw {
    /// An empty line, which is no record.
    pub(super) fn is_blank(&self) -> bool {
        self.json.as_ref().is_ok_and(|json| json.trim().is_empty())
    }
}

/// The records of a file, in order.
pub(super) trait Records {
    /// Bytes of the file that were read.
    fn taken(&self) -> u64;

    /// The next record. A record that cannot be used is not an error here: the ones after it may be.
    fn next(&mut self) -> Result<Option<Raw>, DataError>;
}

/// Reads all records of a file, many at a time. Stops early after a bad one if such are not skipped, or if `emit` says
/// that no more is needed.
pub(super) fn read(
    file: usize,
    mut reader: Box<dyn Records>,
    skip_bad: bool,
    emit: &mut dyn FnMut(Job) -> bool,
) -> Result<bool, DataError> {
    let mut taken = 0;
    loop {
        let (mut records, mut bytes) = (Vec::new(), 0);
        let (mut ends, mut is_bad) = (false, false);
        while !ends && !is_bad && bytes < PIECE_BYTES as u64 {
            match reader.next()? {
                None => ends = true,
                Some(raw) => {
                    bytes += raw.bytes;
                    is_bad = raw.json.is_err() && !skip_bad;
                    if !raw.is_blank() {
                        records.push((raw.place, raw.json));
                    }
                }
            }
        }
        let taken_before = std::mem::replace(&mut taken, reader.taken());
        let content = Content::Records { file, records };
        if !emit(Job { content, bytes, input_bytes: taken - taken_before }) || is_bad {
            return Ok(false);
        }
        if ends {
            return Ok(true);
        }
    }
}
