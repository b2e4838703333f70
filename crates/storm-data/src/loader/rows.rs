//! Maps the number of a row to its tokens, targets and segments.

use super::packed::PackedRows;
use super::{LoaderOptions, LoaderReport};
use crate::{DataError, Dataset, Kind};
use std::ops::Range;
use storm_graph::IGNORE_INDEX;

/// All rows of a part at a sequence length.
#[derive(Debug)]
pub(super) enum Rows {
    /// Consecutive windows. The first token of a window is the last target of the one before.
    Windows { tokens: Range<u64>, sequence: usize, padding: i32 },
    /// Rows of several samples.
    Packed { rows: PackedRows, padding: i32 },
}

/// The destination of a row, T entries each.
pub(super) struct RowMut<'a> {
    pub(super) tokens: &'a mut [i32],
    pub(super) targets: &'a mut [i32],
    pub(super) segments: Option<&'a mut [i32]>,
}

/// Scratch buffers, allocated once.
#[derive(Debug)]
pub(super) struct RowBuffers {
    /// One token more than a row: the last is only a target.
    tokens: Vec<i32>,
    mask: Vec<bool>,
    bytes: Vec<u8>,
}

impl RowBuffers {
    pub(super) fn new(sequence: usize) -> RowBuffers {
        let room = sequence + 1;
        RowBuffers {
            tokens: vec![0; room],
            mask: vec![false; room],
            bytes: Vec::with_capacity(4 * room),
        }
    }
}

impl Rows {
    pub(super) fn new(dataset: &Dataset, options: &LoaderOptions) -> Result<Rows, DataError> {
        let LoaderOptions { split, sequence, overlong, .. } = *options;
        let tokenizer = &dataset.manifest().tokenizer;
        let padding = tokenizer.end_of_text.unwrap_or(0) as i32;
        Ok(match dataset.manifest().kind {
            Kind::Text => Rows::Windows { tokens: dataset.token_range(split), sequence, padding },
            Kind::Samples => {
                Rows::Packed { rows: PackedRows::new(dataset, split, sequence, overlong)?, padding }
            }
        })
    }

    pub(super) fn count(&self) -> u64 {
        match self {
            // A token without a successor has no target.
            Rows::Windows { tokens, sequence, .. } => {
                (tokens.end - tokens.start).saturating_sub(1).div_ceil(*sequence as u64)
            }
            Rows::Packed { rows, .. } => rows.count(),
        }
    }

    pub(super) fn has_segments(&self) -> bool {
        matches!(self, Rows::Packed { .. })
    }

    /// The token of padding.
    pub(super) fn padding(&self) -> i32 {
        match self {
            Rows::Windows { padding, .. } | Rows::Packed { padding, .. } => *padding,
        }
    }

    pub(super) fn report(&self) -> LoaderReport {
        match self {
            Rows::Windows { tokens, sequence, .. } => {
                let (rows, targets) = (self.count(), (tokens.end - tokens.start).saturating_sub(1));
                let padding_tokens = rows * *sequence as u64 - targets;
                LoaderReport {
                    rows,
                    samples: rows,
                    padding_tokens,
                    longest_sample: *sequence as u64,
                    ..LoaderReport::default()
                }
            }
            Rows::Packed { rows, .. } => rows.report(),
        }
    }

    pub(super) fn fill(
        &self,
        dataset: &Dataset,
        row: u64,
        dest: RowMut<'_>,
        buffers: &mut RowBuffers,
    ) -> Result<(), DataError> {
        match self {
            Rows::Windows { tokens, sequence, padding } => {
                let window = window(tokens, *sequence, row);
                let count = (window.end - window.start) as usize;
                let read = &mut buffers.tokens[..count];
                dataset.read_tokens(window.start, read, &mut buffers.bytes)?;
                dest.tokens[..count - 1].copy_from_slice(&read[..count - 1]);
                dest.targets[..count - 1].copy_from_slice(&read[1..]);
                dest.tokens[count - 1..].fill(*padding);
                dest.targets[count - 1..].fill(IGNORE_INDEX);
                Ok(())
            }
            Rows::Packed { rows, padding } => {
                fill_packed(dataset, rows, row, *padding, dest, buffers)
            }
        }
    }

    /// Prefetches a row.
    pub(super) fn will_need(&self, dataset: &Dataset, row: u64) {
        match self {
            Rows::Windows { tokens, sequence, .. } => {
                let window = window(tokens, *sequence, row);
                dataset.will_need(window.start, (window.end - window.start) as usize);
            }
            Rows::Packed { rows, .. } => rows.will_need(dataset, row),
        }
    }
}

/// The tokens of a window, including its last target.
fn window(tokens: &Range<u64>, sequence: usize, row: u64) -> Range<u64> {
    let start = tokens.start + row * sequence as u64;
    start..tokens.end.min(start + sequence as u64 + 1)
}

fn fill_packed(
    dataset: &Dataset,
    rows: &PackedRows,
    row: u64,
    padding: i32,
    mut dest: RowMut<'_>,
    buffers: &mut RowBuffers,
) -> Result<(), DataError> {
    let mut at = 0;
    let mut segment = 0;
    for part in rows.parts(row) {
        let range = rows.range(dataset, part)?;
        let count = (range.end - range.start) as usize;
        // What was packed into the row fits it, unless the index changed in the meantime.
        if count < 2 || at + count - 1 > dest.tokens.len() {
            let problem = "an index changed while it was in use";
            return Err(DataError::damaged(dataset.dir(), problem));
        }
        let read = &mut buffers.tokens[..count];
        dataset.read_tokens(range.start, read, &mut buffers.bytes)?;
        let learned = &mut buffers.mask[..count];
        dataset.read_mask(range.start, learned, &mut buffers.bytes)?;
        let places = at..at + count - 1;
        dest.tokens[places.clone()].copy_from_slice(&read[..count - 1]);
        for (target, (&token, &learned)) in
            dest.targets[places.clone()].iter_mut().zip(read[1..].iter().zip(&learned[1..]))
        {
            *target = if learned { token } else { IGNORE_INDEX };
        }
        if let Some(segments) = &mut dest.segments {
            segments[places].fill(segment);
        }
        (at, segment) = (at + count - 1, segment + 1);
    }
    dest.tokens[at..].fill(padding);
    dest.targets[at..].fill(IGNORE_INDEX);
    // Padding is a separate sample, so nothing attends to it.
    if let Some(segments) = dest.segments {
        segments[at..].fill(segment);
    }
    Ok(())
}
