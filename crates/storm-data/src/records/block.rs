//! A block of records in memory.

use super::column::{CHECKSUM_BYTES, RecordLayout};
use super::layout::u32_at;
use super::read::Buffers;
use std::ops::Range;
use std::sync::Arc;
use storm_host::PageBuffer;

/// The records of a block, verified and decompressed.
#[derive(Debug)]
pub(super) struct Block {
    /// `None` only while it is dropped.
    buffer: Option<PageBuffer>,
    buffers: Arc<Buffers>,
    raw_bytes: usize,
    records: usize,
}

impl Block {
    /// Takes the raw bytes of a verified block, at the beginning of `buffer`.
    pub(super) fn new(
        buffer: PageBuffer,
        buffers: &Arc<Buffers>,
        raw_bytes: usize,
        records: usize,
        layout: &RecordLayout,
    ) -> Result<Block, String> {
        let block =
            Block { buffer: Some(buffer), buffers: Arc::clone(buffers), raw_bytes, records };
        if layout.record_bytes().is_none() {
            // Each record ends where the next begins.
            let mut end = 4 * records;
            for record in 0..records {
                let range = block.range(record, layout);
                let fits = range.start == end
                    && range.end.saturating_sub(range.start) >= layout.record_bytes_min()
                    && range.end <= raw_bytes;
                if !fits {
                    return Err(format!("its record {record} is out of place"));
                }
                end = range.end;
            }
        }
        Ok(block)
    }

    fn raw(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer.as_slice()[..self.raw_bytes])
    }

    fn range(&self, record: usize, layout: &RecordLayout) -> Range<usize> {
        match layout.record_bytes() {
            Some(bytes) => record * bytes..(record + 1) * bytes,
            None => {
                let start = |record: usize| u32_at(self.raw(), 4 * record) as usize;
                let is_last = record + 1 == self.records;
                start(record)..if is_last { self.raw_bytes } else { start(record + 1) }
            }
        }
    }

    /// The bytes of a record.
    pub(super) fn record(&self, record: usize, layout: &RecordLayout) -> &[u8] {
        &self.raw()[self.range(record, layout)]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.buffers.give_back(buffer);
        }
    }
}

/// Verifies the checksum of a record that was read without the rest of its block.
pub(super) fn is_intact(record: &[u8]) -> bool {
    let (bytes, checksum) = record.split_at(record.len() - CHECKSUM_BYTES);
    u32_at(checksum, 0) == crc32fast::hash(bytes)
}
