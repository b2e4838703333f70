//! Decides which samples share a row.
//!
//! Samples are taken in groups of [`GROUP`], in disk order. Within a group the longest come first,
//! each into the fullest row that still has room. So rows are nearly full, and samples that share a
//! row are close on disk. Costs twelve bytes of memory per sample and four per row.

use super::{LoaderReport, Overlong, Split};
use crate::dataset::INDEX_OUT_OF_ORDER;
use crate::{DataError, Dataset};
use std::collections::BTreeSet;
use std::ops::Range;

const GROUP: usize = 4096;

#[derive(Debug)]
pub(crate) struct PackedRows {
    sequence: usize,
    /// The first token of each part, row after row.
    firsts: Vec<u64>,
    /// The tokens of each part: one more than the positions it takes, because the last is only a
    /// target.
    lengths: Vec<u32>,
    /// Where in `firsts` each row starts, and the end of the last.
    starts: Vec<u32>,
    groups: Vec<Group>,
    report: LoaderReport,
}

/// Consecutive samples that share rows.
#[derive(Debug)]
struct Group {
    rows: Range<u64>,
    tokens: Range<u64>,
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
            firsts: Vec::new(),
            lengths: Vec::new(),
            starts: vec![0],
            groups: Vec::new(),
            report: LoaderReport::default(),
        };
        let mut starts = vec![0; GROUP + 1];
        let mut group = Vec::with_capacity(GROUP);
        let mut mask = Mask::default();
        for first in all.clone().step_by(GROUP) {
            let count = (all.end - first).min(GROUP as u64) as usize;
            dataset.sample_starts(first, &mut starts[..=count])?;
            group.clear();
            for pair in starts[..=count].windows(2) {
                if pair[0] >= pair[1] || pair[1] > dataset.manifest().counts.tokens {
                    return Err(DataError::damaged(dataset.dir(), INDEX_OUT_OF_ORDER));
                }
                let places = pair[1] - pair[0] - 1;
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
                    if fits || mask.learns(dataset, tokens.clone())? {
                        group.push(tokens);
                    }
                }
                rows.report.dropped_samples += u64::from(group.len() == before);
            }
            let first_row = rows.report.rows;
            rows.pack(&mut group);
            let of_group = first_row..rows.report.rows;
            if !of_group.is_empty() {
                rows.groups.push(Group { rows: of_group, tokens: starts[0]..starts[count] });
            }
        }
        let LoaderReport { overlong_samples: count, longest_sample: longest, .. } = rows.report;
        if overlong == Overlong::Error && count > 0 {
            let (path, split) = (dataset.dir().to_owned(), split.name());
            return Err(DataError::Overlong { path, split, count, sequence, longest });
        }
        Ok(rows)
    }

    /// Adds the rows of a group of parts.
    fn pack(&mut self, group: &mut [Range<u64>]) {
        let places_of = |part: &Range<u64>| (part.end - part.start - 1) as usize;
        group.sort_unstable_by_key(|part| (std::cmp::Reverse(places_of(part)), part.start));
        let mut rows: Vec<Vec<&Range<u64>>> = Vec::new();
        // Rows with room: (positions left, row).
        let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
        for part in group.iter() {
            let places = places_of(part);
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
            row.sort_unstable_by_key(|part| part.start);
            self.firsts.extend(row.iter().map(|part| part.start));
            self.lengths.extend(row.iter().map(|part| (part.end - part.start) as u32));
            self.starts.push(self.firsts.len() as u32);
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.report.rows
    }

    pub(super) fn report(&self) -> LoaderReport {
        self.report
    }

    /// The tokens of each part of a row.
    pub(super) fn parts(&self, row: u64) -> impl Iterator<Item = Range<u64>> {
        let row = row as usize;
        let places = self.starts[row] as usize..self.starts[row + 1] as usize;
        places.map(|at| self.firsts[at]..self.firsts[at] + u64::from(self.lengths[at]))
    }

    /// Each group's rows, and the token range of its samples.
    pub(super) fn groups(&self) -> impl Iterator<Item = (Range<u64>, Range<u64>)> {
        self.groups.iter().map(|group| (group.rows.clone(), group.tokens.clone()))
    }
}

/// The tokens of a piece as long as a row. Its first token is the last target of the previous
/// piece.
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
    /// Whether any token but the first counts in the loss.
    fn learns(&mut self, dataset: &Dataset, tokens: Range<u64>) -> Result<bool, DataError> {
        self.learned.resize((tokens.end - tokens.start) as usize, false);
        dataset.read_mask(tokens.start, &mut self.learned, &mut self.bytes)?;
        Ok(self.learned[1..].contains(&true))
    }
}
