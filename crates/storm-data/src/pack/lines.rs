//! JSONL records.

use super::records::{RECORD_BYTES_MAX, Raw, Records, too_long};
use super::stream::{Buffered, Stream};
use crate::{DataError, RecordPlace};

const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// The lines of a file, counted from 1.
pub(super) struct Lines {
    input: Buffered,
    number: u64,
    /// The last line was too long, and the rest of it is still to be skipped.
    is_inside: bool,
}

impl Lines {
    pub(super) fn new(stream: Stream) -> Lines {
        Lines { input: Buffered::new(stream), number: 0, is_inside: false }
    }

    /// Takes bytes up to and including a line break. Returns whether there was one.
    fn take(&mut self, mut to: impl FnMut(&[u8])) -> Result<bool, DataError> {
        let bytes = self.input.bytes()?;
        let end = bytes.iter().position(|&byte| byte == b'\n');
        let count = end.map_or(bytes.len(), |end| end + 1);
        to(&bytes[..count]);
        self.input.consume(count);
        Ok(end.is_some())
    }
}

impl Records for Lines {
    fn taken(&self) -> u64 {
        self.input.stream().taken()
    }

    fn next(&mut self) -> Result<Option<Raw>, DataError> {
        while std::mem::take(&mut self.is_inside) && self.input.peek()?.is_some() {
            self.is_inside = !self.take(|_| {})?;
        }
        if self.input.peek()?.is_none() {
            return Ok(None);
        }
        self.number += 1;
        let place = RecordPlace::Line(self.number);
        let mut line = Vec::new();
        let mut ends = false;
        while !ends && self.input.peek()?.is_some() && line.len() as u64 <= RECORD_BYTES_MAX {
            ends = self.take(|bytes| line.extend(bytes))?;
        }
        let bytes = line.len() as u64;
        if bytes > RECORD_BYTES_MAX {
            self.is_inside = !ends;
            return Ok(Some(Raw { place, bytes, json: Err(too_long()) }));
        }
        if self.number == 1 && line.starts_with(&BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        let json = String::from_utf8(line).map_err(|_| "is not UTF-8 text".to_owned());
        Ok(Some(Raw { place, bytes, json }))
    }
}
