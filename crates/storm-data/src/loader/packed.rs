//! Which samples share a row.
//!
//! Samples are taken in groups of [`GROUP`] in the order in which they lie on disk. In a group the
//! longest come first, each into the fullest row that still has room. So rows are nearly full, and
//! neighbours stay near each other on disk. Costs four bytes of memory for each sample and row.

use super::{LoaderReport, Split};
use crate::{DataError, Dataset};
use std::collections::BTreeSet;
use std::ops::Range;

const GROUP: usize = 4096;

#[derive(Debug)]
pub(super) struct PackedRows {
    sequence: usize,
    /// Samples, row after row.
    samples: Vec<u32>,
    /// Where in `samples` each row begins, and the end of all.
    starts: Vec<u32>,
    report: LoaderReport,
}

impl PackedRows {
    pub(super) fn new(
        dataset: &Dataset,
        split: Split,
        sequence: usize,
    ) -> Result<PackedRows, DataError> {
        let all = dataset.sample_range(split);
        if u32::try_from(all.end).is_err() {
            let problem = format!("{} samples are more than a loader can pack into rows", all.end);
            return Err(DataError::damaged(dataset.dir(), problem));
        }
        let mut rows = PackedRows {
            sequence,
            samples: Vec::new(),
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
                let tokens = pair[1].saturating_sub(pair[0]);
                let fits = tokens <= sequence as u64 + 1;
                let truncated = pair[0]..pair[0] + sequence as u64 + 1;
                // One token has nothing behind it to learn.
                if tokens < 2 || !(fits || mask.learns(dataset, truncated)?) {
                    rows.report.dropped_samples += 1;
                    continue;
                }
                rows.report.truncated_samples += u64::from(!fits);
                group.push((places(tokens, sequence), sample));
            }
            rows.pack(&mut group);
        }
        Ok(rows)
    }

    /// Adds the rows of a group of (places taken, sample).
    fn pack(&mut self, group: &mut [(usize, u32)]) {
        group.sort_unstable_by_key(|&(places, sample)| (std::cmp::Reverse(places), sample));
        let mut rows: Vec<Vec<u32>> = Vec::new();
        // Rows with room: (places left, row).
        let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
        for &(places, sample) in group.iter() {
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
            rows[row].push(sample);
            open.insert((left - places, row));
        }
        self.report.padding_tokens += open.iter().map(|&(left, _)| left as u64).sum::<u64>();
        self.report.rows += rows.len() as u64;
        self.report.samples += group.len() as u64;
        for mut row in rows {
            row.sort_unstable();
            self.samples.extend(row);
            self.starts.push(self.samples.len() as u32);
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.report.rows
    }

    pub(super) fn report(&self) -> LoaderReport {
        self.report
    }

    /// The samples of a row.
    pub(super) fn samples(&self, row: u64) -> &[u32] {
        let row = row as usize;
        &self.samples[self.starts[row] as usize..self.starts[row + 1] as usize]
    }

    /// The tokens of a sample that go into its row: one more than places, the last is a target only.
    pub(super) fn range(&self, dataset: &Dataset, sample: u32) -> Result<Range<u64>, DataError> {
        let range = dataset.sample(u64::from(sample))?;
        let kept = (range.end - range.start).min(self.sequence as u64 + 1);
        Ok(range.start..range.start + kept)
    }

    pub(super) fn will_need(&self, dataset: &Dataset, row: u64) {
        for &sample in self.samples(row) {
            // A hint only: if the index cannot be read, loading the row will say so.
            if let Ok(range) = self.range(dataset, sample) {
                dataset.will_need(range.start, (range.end - range.start) as usize);
            }
        }
    }
}

/// Places in a row that a sample takes.
fn places(tokens: u64, sequence: usize) -> usize {
    (tokens - 1).min(sequence as u64) as usize
}

/// Reads masks, in buffers that are used again.
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
