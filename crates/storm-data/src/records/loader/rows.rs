//! The contents of a batch's rows.

use super::memory::Load;
use super::window::Window;
use crate::DataError;
use crate::dataset::TokenFormat;
use crate::loader::{RowMut, Rows};
use crate::records::batch::RecordBatch;
use crate::records::column::{Column, ColumnType, RecordLayout};
use crate::records::order::Part;
use crate::records::set::{Reader, RecordSet};
use crate::records::stream::{ELEMENTS, Piece, Stream};
use std::ops::Range;
use std::sync::Arc;

/// Rows sampled to estimate how many records a row spans.
const SAMPLED_ROWS: u64 = 256;

/// Rows of a dataset.
#[derive(Debug)]
pub(super) enum RowsOf {
    /// Each row is a record.
    Records,
    /// Each row is made of tokens of a stream.
    Tokens(TokenRows),
}

/// Rows of tokens: the contents of each, and where it begins.
#[derive(Debug)]
pub(crate) struct TokenRows {
    rows: Arc<Rows>,
    format: TokenFormat,
    /// Tokens of the part.
    tokens: Range<u64>,
    sequence: usize,
    /// The columns of a batch: tokens, targets and segments.
    layout: RecordLayout,
    /// Rows that begin before each block of the part.
    before: Vec<u64>,
}

/// Reusable buffers of a worker thread.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// The parts of all rows, and where the parts of each row end.
    parts: Vec<Range<u64>>,
    ends: Vec<usize>,
    /// Which elements to copy from which record, and where to.
    pieces: Vec<Piece>,
    ids: Vec<i32>,
    learned: Vec<bool>,
    /// A row: tokens, targets and segments.
    row: [Vec<i32>; 3],
}

impl RowsOf {
    /// The columns of a batch.
    pub(super) fn layout<'a>(&'a self, set: &'a RecordSet) -> &'a RecordLayout {
        match self {
            RowsOf::Records => set.layout(),
            RowsOf::Tokens(rows) => &rows.layout,
        }
    }

    /// Appends rows at positions of a window to a batch.
    pub(super) fn copy(
        &self,
        window: &Window,
        places: Range<u64>,
        set: &RecordSet,
        reader: &mut Reader,
        scratch: &mut Scratch,
        batch: &mut RecordBatch,
    ) -> Result<(), DataError> {
        match self {
            RowsOf::Records => {
                let wanted = places.map(|place| (window.record_at(place), ()));
                window.read(wanted, set, reader, |wanted, (), record| {
                    batch.push(record, set.layout())?;
                    let number = set.block(wanted.number).first_record + u64::from(wanted.record);
                    batch.samples[batch.rows - 1] = [number as i32, (number >> 32) as i32, 0];
                    Ok(())
                })
            }
            RowsOf::Tokens(rows) => rows.copy(window, places, set, reader, scratch, batch),
        }
    }
}

impl TokenRows {
    /// Rows of a part of a stream.
    pub(crate) fn new(
        rows: Arc<Rows>,
        format: TokenFormat,
        vocabulary: u32,
        tokens: Range<u64>,
        sequence: usize,
    ) -> TokenRows {
        let column = |name| Column::fixed(name, ColumnType::I32, &[sequence]);
        let targets = Column { below: Some(vocabulary.max(1)), ..column("targets") };
        let mut columns = vec![column("tokens"), targets];
        if rows.has_segments() {
            columns.push(column("segments"));
        }
        let layout = RecordLayout::of_columns(&columns);
        TokenRows { rows, format, tokens, sequence, layout, before: Vec::new() }
    }

    /// Finds the blocks that rows begin in and extend into.
    pub(super) fn spread(mut self, set: &RecordSet) -> (TokenRows, Part) {
        let block_of = |token: u64| set.place_of(token / ELEMENTS).0;
        // The part has rows, so it is not empty.
        let blocks: Vec<u32> =
            (block_of(self.tokens.start)..=block_of(self.tokens.end - 1)).collect();
        let end = |&block: &u32| {
            let place = set.block(block);
            (place.first_record + u64::from(place.records())) * ELEMENTS
        };
        let ends: Vec<u64> = blocks.iter().map(end).collect();
        let (beginning, reach) = self.rows.spread(&ends);
        let part = Part::with_reach(blocks, beginning, reach);
        self.before = part.rows_before();
        (self, part)
    }

    /// Average number of records that a row spans, over a sample of rows.
    pub(super) fn records_per_row(&self, rows: u64) -> f64 {
        let some = rows.clamp(1, SAMPLED_ROWS);
        let mut parts = Vec::new();
        let pieces = (0..some).map(|number| {
            parts.clear();
            self.rows.parts(
                (u128::from(rows) * u128::from(number) / u128::from(some)) as u64,
                &mut parts,
            );
            parts.iter().map(|part| Stream::pieces(part.clone()).count()).sum::<usize>()
        });
        pieces.sum::<usize>() as f64 / some as f64
    }

    pub(super) fn load(&self, part: &Part) -> Load {
        Load {
            blocks: part.blocks.len() as u64,
            row_bytes: self.layout.record_bytes_min() as u64,
            group_blocks: part.group_blocks_max(),
            is_bounded: false,
        }
    }

    fn copy(
        &self,
        window: &Window,
        places: Range<u64>,
        set: &RecordSet,
        reader: &mut Reader,
        scratch: &mut Scratch,
        batch: &mut RecordBatch,
    ) -> Result<(), DataError> {
        let Scratch { parts, ends, pieces, ids, learned, row } = scratch;
        parts.clear();
        ends.clear();
        pieces.clear();
        let first = batch.rows;
        for place in places {
            let (at, number) = window.order.at(place);
            let number = self.before[window.order.blocks[at]] + u64::from(number);
            batch.samples[first + ends.len()] = [number as i32, (number >> 32) as i32, 0];
            self.rows.parts(number, parts);
            ends.push(parts.len());
        }
        let mut count = 0;
        for part in &*parts {
            pieces.extend(
                Stream::pieces(part.clone()).map(|piece| Piece { at: count + piece.at, ..piece }),
            );
            count += (part.end - part.start) as usize;
        }
        ids.resize(count, 0);
        learned.resize(count, false);
        let wanted = pieces.iter().map(|piece| (window.record(set, piece.record), *piece));
        window.read(wanted, set, reader, |_, piece, record| {
            let to = piece.at..piece.at + piece.count;
            self.format.decode_mask(piece, record, &mut learned[to.clone()]);
            self.format.decode(piece, record, &mut ids[to])
        })?;
        let (mut ids, mut learned) = (&ids[..], &learned[..]);
        row.iter_mut().for_each(|column| column.resize(self.sequence, 0));
        let [tokens, targets, segments] = row;
        let mut start = 0;
        for &end in &*ends {
            let parts = &parts[std::mem::replace(&mut start, end)..end];
            let dest = RowMut {
                tokens: &mut tokens[..],
                targets: &mut targets[..],
                segments: self.rows.has_segments().then_some(&mut segments[..]),
            };
            let used = self.rows.assemble(parts, ids, learned, dest);
            (ids, learned) = (&ids[used..], &learned[used..]);
            batch.push_ids([&tokens[..], targets, segments]);
        }
        Ok(())
    }
}
