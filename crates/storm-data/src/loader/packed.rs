//! Decides which samples share a row.
//!
//! Samples are taken in groups of [`GROUP`], in disk order. In each group the longest come first, each into
//! the fullest row that still has room. So rows are nearly full, and neighbors stay near each other on disk.
//! Costs four bytes of memory for each sample and row, and four more if samples are split.

use super::{LoaderReport, Overlong, Split};
use crate::{DataError, Dataset};
use std::collections::BTreeSet;
use std::ops::Range;

const GROUP: usize = 4096;

#[derive(Debug)]
pub(super) struct PackedRows {
    sequence: usize,
    /// Samples, row after row.
    samples: Vec<u32>,
    /// Which piece of its sample each is; none if samples are not split.
    pieces: Vec<u32>,
    /// Where in `samples` each row starts, and the end of the last.
    starts: Vec<u32>,
    report: LoaderReport,
}

impl PackedRows {
    pub(super) fn new(
        dataset: &Dataset,
        split: Split,
        sequence: usize,
        overlong: Overlong,
    ) -> Result<PackedRows, DataError> {
        let all = dataset.sample_range(split);
        if u32::try_from(all.end).is_err() {
            return Err(too_many(dataset, all.end));
        }
        let mut rows = PackedRows {
            sequence,
            samples: Vec::new(),
            pieces: Vec::new(),
            starts: vec![0],
            report: LoaderReport::default(),
        };
        let mut starts = vec![0; GROUP + 1];
        let mut group = Vec::with_capacity(GROUP);
        let mut mask = Mask::default();
        for first in all.clone().step_by(GROUP) {
            let count = (all.end - first).min(GROUP as u64) as usize;
            dataset.sample_starts(first, &mut starts[..=count])?;
            group.clear();
            for (sample, pair) in (first as u32..).zip(starts[..=count].windows(2)) {
                // The index was checked, but a file may change at any time.
                let places = pair[1].saturating_sub(pair[0]).saturating_sub(1);
                rows.report.longest_sample = rows.report.longest_sample.max(places);
                let fits = places <= sequence as u64;
                rows.report.overlong_samples += u64::from(!fits);
                let pieces = match overlong {
                    // A single token has no next token to learn.
                    _ if places == 0 => 0,
                    _ if fits => 1,
                    Overlong::Drop | Overlong::Error => 0,
                    Overlong::Truncate => 1,
                    Overlong::Split => places.div_ceil(sequence as u64),
                };
                let pieces = u32::try_from(pieces).map_err(|_| too_many(dataset, pieces))?;
                let before = group.len();
                for piece in 0..pieces {
                    let tokens = piece_of(&(pair[0]..pair[1]), sequence, piece);
                    let places = (tokens.end - tokens.start - 1) as usize;
                    if fits || mask.learns(dataset, tokens)? {
                        group.push((places, Part { sample, piece }));
                    }
                }
                rows.report.dropped_samples += u64::from(group.len() == before);
            }
            rows.pack(&mut group, overlong);
        }
        let LoaderReport { overlong_samples: count, longest_sample: longest, .. } = rows.report;
        if overlong == Overlong::Error && count > 0 {
            let (path, split) = (dataset.dir().to_owned(), split.name());
            return Err(DataError::Overlong { path, split, count, sequence, longest });
        }
        Ok(rows)
    }

    /// Adds the rows of a group of (places taken, part).
    fn pack(&mut self, group: &mut [(usize, Part)], overlong: Overlong) {
        group.sort_unstable_by_key(|&(places, part)| (std::cmp::Reverse(places), part));
        let mut rows: Vec<Vec<Part>> = Vec::new();
        // Rows with room: (places left, row).
        let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
        for &(places, part) in group.iter() {
            let (left, row) = match open.range((places, 0)..).next().copied() {
                Some(found) => {
                    open.remove(&found);
                    found
                }
                None => {
                    rows.push(Vec::new());
                    (self.sequence, rows.len() - 1)
                }
            };
            rows[row].push(part);
            open.insert((left - places, row));
        }
        self.report.padding_tokens += open.iter().map(|&(left, _)| left as u64).sum::<u64>();
        self.report.rows += rows.len() as u64;
        self.report.samples += group.len() as u64;
        for mut row in rows {
            row.sort_unstable();
            self.samples.extend(row.iter().map(|part| part.sample));
            if overlong == Overlong::Split {
                self.pieces.extend(row.iter().map(|part| part.piece));
            }
            self.starts.push(self.samples.len() as u32);
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.report.rows
    }

    pub(super) fn report(&self) -> LoaderReport {
        self.report
    }

    /// The parts of samples in a row.
    pub(super) fn parts(&self, row: u64) -> impl Iterator<Item = Part> {
        let row = row as usize;
        let places = self.starts[row] as usize..self.starts[row + 1] as usize;
        places.map(|at| Part {
            sample: self.samples[at],
            piece: self.pieces.get(at).copied().unwrap_or(0),
        })
    }

    /// The tokens of a part that go into its row: one more than places, since the last is only a target.
    pub(super) fn range(&self, dataset: &Dataset, part: Part) -> Result<Range<u64>, DataError> {
        let range = dataset.sample(u64::from(part.sample))?;
        Ok(piece_of(&range, self.sequence, part.piece))
    }

    pub(super) fn will_need(&self, dataset: &Dataset, row: u64) {
        for part in self.parts(row) {
            // Only a hint: if the index cannot be read, loading the row reports it.
            if let Ok(range) = self.range(dataset, part) {
                dataset.will_need(range.start, (range.end - range.start) as usize);
            }
        }
    }
}

/// A sample, or a piece of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Part {
    sample: u32,
    piece: u32,
}

/// The tokens of a piece as long as a row. Its first token is the last target of the piece before.
fn piece_of(sample: &Range<u64>, sequence: usize, piece: u32) -> Range<u64> {
    let start = sample.start.saturating_add(u64::from(piece) * sequence as u64).min(sample.end);
    start..sample.end.min(start + sequence as u64 + 1)
}

fn too_many(dataset: &Dataset, count: u64) -> DataError {
    let problem = format!("{count} samples are more than a loader can pack into rows");
    DataError::damaged(dataset.dir(), problem)
}

/// Reads masks, in reusable buffers.
#[derive(Default)]
struct Mask {
    learned: Vec<bool>,
    bytes: Vec<u8>,
}

impl Mask {
    /// Whether any token but the first is learned.
    fn learns(&mut self, dataset: &Dataset, tokens: Range<u64>) -> Result<bool, DataError> {
        self.learned.resize((tokens.end - tokens.start) as usize, false);
        dataset.read_mask(tokens.start, &mut self.learned, &mut self.bytes)?;
        Ok(self.learned[1..].contains(&true))
    }
}
