//! A long sequence of elements of one size, divided into records of equal size: token ids with
//! their masks, or the starts of documents.

use super::block::Block;
use super::codec::Codec;
use super::column::{Column, ColumnType, RecordLayout};
use super::manifest::{RecordCounts, RecordManifest, SHARDS_MAX};
use super::read::Buffers;
use super::reading::Reading;
use super::set::{Reader, RecordSet};
use super::write::RecordWriter;
use crate::manifest::StoredStream;
use crate::{DataError, Split, VerifyProgress};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Elements per record. A row of a thousand tokens then takes one or two reads of a few kilobytes.
pub(crate) const ELEMENTS: u64 = 1024;

/// The columns of a stream: name and bytes per record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamColumns<'a>(pub(crate) &'a [(&'a str, u64)]);

impl StreamColumns<'_> {
    fn columns(self) -> Vec<Column> {
        let column =
            |&(name, bytes): &(_, _)| Column::fixed(name, ColumnType::U8, &[bytes as usize]);
        self.0.iter().map(column).collect()
    }
}

/// Writes a stream.
pub(crate) struct StreamWriter(RecordWriter);

impl StreamWriter {
    pub(crate) fn new(
        dir: &Path,
        columns: StreamColumns<'_>,
        codec: Codec,
        file_name: fn(usize) -> String,
        shard_bytes: u64,
    ) -> Result<StreamWriter, DataError> {
        let writer = RecordWriter::new(dir, &columns.columns(), codec)?;
        Ok(StreamWriter(writer.with_shards(file_name, shard_bytes)))
    }

    /// Adds a record of [`ELEMENTS`] elements.
    pub(crate) fn push(&mut self, values: &[&[u8]]) -> Result<(), DataError> {
        self.0
            .push(Split::Train, values)?
            .map_err(|problem| DataError::Option { option: "columns", problem })
    }

    pub(crate) fn finish(self) -> Result<StoredStream, DataError> {
        let (counts, _, shards) = self.0.finish()?;
        Ok(StoredStream::new(&counts, shards))
    }
}

/// A stream on disk.
#[derive(Debug)]
pub(crate) struct Stream {
    set: Arc<RecordSet>,
    length: u64,
    /// Caches the last block, for sequential reads.
    last: Mutex<Last>,
}

/// The block read last.
#[derive(Debug)]
struct Last {
    reader: Option<Reader>,
    block: Option<(u32, Block)>,
}

/// Consecutive elements of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The number of the record.
    pub(crate) record: u64,
    /// Its first element within the record.
    pub(crate) first: usize,
    /// Number of elements.
    pub(crate) count: usize,
    /// Number of requested elements before it.
    pub(crate) at: usize,
}

impl Stream {
    /// Opens a stream of `length` elements.
    pub(crate) fn open(
        dir: &Path,
        stored: &StoredStream,
        columns: StreamColumns<'_>,
        codec: Codec,
        length: u64,
        file_name: fn(usize) -> String,
        reading: Reading,
    ) -> Result<Stream, DataError> {
        let damaged = |problem: &str| DataError::damaged(dir, problem);
        let records = length.div_ceil(ELEMENTS);
        let StoredStream { raw_bytes, stored_bytes, ref shards } = *stored;
        if shards.len() > SHARDS_MAX {
            return Err(damaged("more shards than a dataset has"));
        }
        let columns = columns.columns();
        let layout = RecordLayout::new(&columns).map_err(|problem| damaged(&problem))?;
        let counts = RecordCounts { records, raw_bytes, stored_bytes, ..RecordCounts::default() };
        let manifest = RecordManifest::new(
            String::new(),
            columns,
            Vec::new(),
            codec,
            counts,
            None,
            shards.clone(),
        );
        let set = RecordSet::of_manifest(dir, manifest, layout, String::new(), file_name, reading)?;
        let set = Arc::new(set);
        Ok(Stream { set, length, last: Mutex::new(Last { reader: None, block: None }) })
    }

    /// Its records.
    pub(crate) fn set(&self) -> &Arc<RecordSet> {
        &self.set
    }

    /// The pieces that cover these elements, which must exist.
    pub(crate) fn pieces(elements: Range<u64>) -> impl Iterator<Item = Piece> + Clone {
        let end = elements.end.max(elements.start);
        let start = elements.start;
        (start / ELEMENTS..end.div_ceil(ELEMENTS)).filter_map(move |record| {
            let from = start.max(record * ELEMENTS);
            let to = end.min((record + 1) * ELEMENTS);
            let first = (from - record * ELEMENTS) as usize;
            (from < to).then_some(Piece {
                record,
                first,
                count: (to - from) as usize,
                at: (from - start) as usize,
            })
        })
    }

    /// Calls `with` with each piece of these elements and its record, in order.
    pub(crate) fn read(
        &self,
        elements: Range<u64>,
        mut with: impl FnMut(Piece, &[u8]) -> Result<(), String>,
    ) -> Result<(), DataError> {
        if elements.end > self.length {
            let problem = "an index points past its end";
            return Err(DataError::damaged(self.set.dir(), problem));
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let Last { reader, block } = &mut *last;
        let set = &self.set;
        let reader = reader.get_or_insert_with(|| {
            Reader::new(set, &Arc::new(Buffers::new(set.block_bytes_max())), 1)
        });
        for piece in Stream::pieces(elements) {
            let (number, record) = set.place_of(piece.record);
            if block.as_ref().is_none_or(|(held, _)| *held != number) {
                *block = None;
                *block = Some((number, set.load(number, reader)?));
            }
            let Some((_, block)) = block else { continue };
            with(piece, block.record(record as usize, set.layout()))
                .map_err(|problem| set.damaged_block(number, problem))?;
        }
        Ok(())
    }

    /// Bytes that [`Stream::verify`] reads.
    pub(crate) fn verified_bytes(&self) -> u64 {
        self.set.verified_bytes()
    }

    /// Reads every block and verifies the checksums.
    pub(crate) fn verify(
        &self,
        progress: &(dyn Fn(VerifyProgress) + Sync),
    ) -> Result<(), DataError> {
        self.set.verify(progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_once() {
        for (start, end) in [(0, 1), (0, ELEMENTS), (5, 3 * ELEMENTS), (ELEMENTS - 1, ELEMENTS + 1)]
        {
            let mut expected = start..end;
            for piece in Stream::pieces(start..end) {
                assert_eq!(piece.at as u64, expected.start - start);
                for element in 0..piece.count as u64 {
                    let number = piece.record * ELEMENTS + piece.first as u64 + element;
                    assert_eq!(expected.next(), Some(number));
                }
            }
            assert!(expected.is_empty());
        }
        assert_eq!(Stream::pieces(7..7).count(), 0);
    }
}
