//! Maps a row number to its tokens, targets and segments.

use super::packed::PackedRows;
use super::{LoaderOptions, LoaderReport};
use crate::{DataError, Dataset, Kind};
use std::ops::Range;
use storm_graph::IGNORE_INDEX;

/// All rows of a part at a sequence length.
#[derive(Debug)]
pub(crate) enum Rows {
    /// Consecutive windows. The first token of a window is the last target of the previous one.
    Windows { tokens: Range<u64>, sequence: usize, padding: i32 },
    /// Rows of several samples.
    Packed { rows: PackedRows, padding: i32 },
}

/// The destination of a row, T entries per slice.
pub(crate) struct RowMut<'a> {
    pub(crate) tokens: &'a mut [i32],
    pub(crate) targets: &'a mut [i32],
    pub(crate) segments: Option<&'a mut [i32]>,
}

/// Reusable buffers.
#[derive(Debug, Default)]
pub(super) struct RowBuffers {
    parts: Vec<Range<u64>>,
    /// The tokens of all parts. The last of each is only a target.
    tokens: Vec<i32>,
    learned: Vec<bool>,
    bytes: Vec<u8>,
}

impl RowBuffers {
    /// Asks the system to prefetch a row of a mapped dataset.
    pub(super) fn announce(&mut self, rows: &Rows, dataset: &Dataset, row: u64) {
        self.parts.clear();
        rows.parts(row, &mut self.parts);
        self.parts.iter().for_each(|part| dataset.will_need(part.clone()));
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

    pub(crate) fn has_segments(&self) -> bool {
        matches!(self, Rows::Packed { .. })
    }

    /// The padding token.
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

    /// Appends the token ranges of a row, one per sample. The last token of each is only a target.
    pub(crate) fn parts(&self, row: u64, out: &mut Vec<Range<u64>>) {
        match self {
            Rows::Windows { tokens, sequence, .. } => out.push(window(tokens, *sequence, row)),
            Rows::Packed { rows, .. } => out.extend(rows.parts(row)),
        }
    }

    /// For consecutive blocks that together hold all rows: how many rows begin in each, and the
    /// last block that those rows reach into. `ends` has the cumulative token count at the end of
    /// each block.
    pub(crate) fn spread(&self, ends: &[u64]) -> (Vec<u32>, Vec<u32>) {
        match self {
            Rows::Windows { tokens, sequence, .. } => {
                let before = |token: u64| {
                    let rows = token.saturating_sub(tokens.start).div_ceil(*sequence as u64);
                    rows.min(self.count())
                };
                let mut first = 0;
                let of_block = |(block, &end): (u32, &u64)| {
                    let next = before(end);
                    let rows = next - std::mem::replace(&mut first, next);
                    let reach = match rows {
                        0 => block,
                        _ => block_of(ends, window(tokens, *sequence, next - 1).end - 1),
                    };
                    (rows as u32, reach)
                };
                (0..).zip(ends).map(of_block).unzip()
            }
            Rows::Packed { rows, .. } => {
                let mut beginning = vec![0; ends.len()];
                let mut reach: Vec<u32> = (0..ends.len() as u32).collect();
                for (rows, tokens) in rows.groups() {
                    let block = block_of(ends, tokens.start) as usize;
                    beginning[block] += (rows.end - rows.start) as u32;
                    reach[block] = reach[block].max(block_of(ends, tokens.end - 1));
                }
                (beginning, reach)
            }
        }
    }

    /// Assembles a row from these parts, whose tokens are concatenated. Returns how many tokens
    /// were used.
    pub(crate) fn assemble(
        &self,
        parts: &[Range<u64>],
        tokens: &[i32],
        learned: &[bool],
        mut dest: RowMut<'_>,
    ) -> usize {
        let (mut at, mut read, mut segment) = (0, 0, 0);
        for part in parts {
            let count = (part.end - part.start) as usize;
            let (tokens, learned) = (&tokens[read..read + count], &learned[read..read + count]);
            let places = at..at + count - 1;
            dest.tokens[places.clone()].copy_from_slice(&tokens[..count - 1]);
            for (target, (&token, &learned)) in
                dest.targets[places.clone()].iter_mut().zip(tokens[1..].iter().zip(&learned[1..]))
            {
                *target = if learned { token } else { IGNORE_INDEX };
            }
            if let Some(segments) = &mut dest.segments {
                segments[places].fill(segment);
            }
            (at, read, segment) = (at + count - 1, read + count, segment + 1);
        }
        dest.tokens[at..].fill(self.padding());
        dest.targets[at..].fill(IGNORE_INDEX);
        // Padding is a separate sample, so nothing attends to it.
        if let Some(segments) = dest.segments {
            segments[at..].fill(segment);
        }
        read
    }

    /// Reads a row of a mapped dataset.
    pub(super) fn fill(
        &self,
        dataset: &Dataset,
        row: u64,
        dest: RowMut<'_>,
        buffers: &mut RowBuffers,
    ) -> Result<(), DataError> {
        let RowBuffers { parts, tokens, learned, bytes } = buffers;
        parts.clear();
        self.parts(row, parts);
        let count = parts.iter().map(|part| (part.end - part.start) as usize).sum();
        tokens.resize(count, 0);
        learned.resize(count, false);
        let mut at = 0;
        for part in &*parts {
            let to = at..at + (part.end - part.start) as usize;
            dataset.read_tokens(part.start, &mut tokens[to.clone()], bytes)?;
            dataset.read_mask(part.start, &mut learned[to.clone()], bytes)?;
            at = to.end;
        }
        self.assemble(parts, tokens, learned, dest);
        Ok(())
    }
}

/// The tokens of a window, including its last target.
fn window(tokens: &Range<u64>, sequence: usize, row: u64) -> Range<u64> {
    let start = tokens.start + row * sequence as u64;
    start..tokens.end.min(start + sequence as u64 + 1)
}

/// The block that contains a token.
fn block_of(ends: &[u64], token: u64) -> u32 {
    ends.partition_point(|&end| end <= token) as u32
}
