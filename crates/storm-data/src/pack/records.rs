//! Records of a file, in any format.

use super::cut::PIECE_BYTES;
use super::input::{Content, Job};
use crate::{DataError, RecordPlace};

/// Size limit of a record, as written in its file.
pub(crate) const RECORD_BYTES_MAX: u64 = 64 << 20;

/// The error for a longer one.
pub(crate) fn too_long() -> String {
    "longer than 64 MiB; a record is one document or sample".to_owned()
}

/// An unparsed record.
pub(super) struct Raw {
    pub(super) place: RecordPlace,
    /// Bytes in memory.
    pub(super) bytes: u64,
    /// The record as JSON, or the problem with it.
    pub(super) json: Result<String, String>,
}

impl Raw {
    /// Whether it is an empty line, which does not count as a record.
    pub(super) fn is_blank(&self) -> bool {
        self.json.as_ref().is_ok_and(|json| json.trim().is_empty())
    }
}

/// The records of a file, in order.
pub(super) trait Records {
    /// Bytes of the file read so far.
    fn taken(&self) -> u64;

    /// The next record. A bad record is not an error here, because later ones may be usable.
    fn next(&mut self) -> Result<Option<Raw>, DataError>;
}

/// Reads all records of a file, many at a time. Stops early after a bad one unless those are
/// skipped, or if `emit` returns false.
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
