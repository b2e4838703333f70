use crate::micro_batch::{Entries, MicroBatch};
use crate::{TrainError, TrainOptions};
use storm_data::Samples;
use storm_graph::IGNORE_INDEX;
use storm_model::Packing;

/// One micro-batch of token sequences: `batch` rows of `sequence` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// (B, T) token ids.
    pub tokens: Vec<i32>,
    /// (B, T) the token that follows each one; [`IGNORE_INDEX`] where nothing is to be learned.
    pub targets: Vec<i32>,
    /// (B, T) position of each token in its sample.
    pub positions: Vec<i32>,
    /// (B, T) the sample each token belongs to; `None` if each row is one sample.
    pub segments: Option<Vec<i32>>,
}

impl Batch {
    /// A batch with one sample per row.
    pub fn new(tokens: Vec<i32>, targets: Vec<i32>, sequence: usize) -> Batch {
        let positions = (0..tokens.len()).map(|i| (i % sequence.max(1)) as i32).collect();
        Batch { tokens, targets, positions, segments: None }
    }

    /// A batch with several samples per row. Positions restart with every segment.
    pub fn packed(
        tokens: Vec<i32>,
        targets: Vec<i32>,
        segments: Vec<i32>,
        sequence: usize,
    ) -> Batch {
        let positions = Vec::with_capacity(segments.len());
        let mut batch = Batch { tokens, targets, positions, segments: Some(segments) };
        batch.set_positions(sequence);
        batch
    }

    /// Swaps contents with `samples`, so that the buffers of both are reused.
    pub(crate) fn swap(&mut self, samples: &mut Samples, sequence: usize) {
        std::mem::swap(&mut self.tokens, &mut samples.tokens);
        std::mem::swap(&mut self.targets, &mut samples.targets);
        std::mem::swap(&mut self.segments, &mut samples.segments);
        self.set_positions(sequence);
    }

    fn set_positions(&mut self, sequence: usize) {
        let Batch { tokens, positions, segments, .. } = self;
        positions.clear();
        match segments {
            None => positions.extend((0..tokens.len()).map(|i| (i % sequence.max(1)) as i32)),
            Some(segments) => {
                for row in segments.chunks(sequence.max(1)) {
                    let mut start = 0;
                    for (i, segment) in row.iter().enumerate() {
                        if i > 0 && row[i - 1] != *segment {
                            start = i;
                        }
                        positions.push((i - start) as i32);
                    }
                }
            }
        }
    }

    /// Number of targets that count.
    pub fn valid_tokens(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE_INDEX).count()
    }

    /// Checks that all columns have the same length and that samples are separated as the model expects.
    pub(crate) fn check_form(
        &self,
        batch: usize,
        sequence: usize,
        packing: Packing,
    ) -> Result<(), TrainError> {
        let rows = batch * sequence;
        if self.segments.is_some() != (packing == Packing::Segments) {
            let problem = match packing {
                Packing::Segments => "has no segments, but the model was set up for packed samples",
                Packing::Single => "has segments, but the model was set up for single samples",
            };
            return Err(TrainError::Batch { problem: problem.to_owned() });
        }
        let columns = [
            ("tokens", Some(&self.tokens)),
            ("targets", Some(&self.targets)),
            ("positions", Some(&self.positions)),
            ("segments", self.segments.as_ref()),
        ];
        for (name, values) in columns {
            let count = values.map_or(rows, Vec::len);
            if count != rows {
                let problem = format!("`{name}` has {count} entries, not {rows}");
                return Err(TrainError::Batch { problem });
            }
        }
        self.check_segments(sequence)
    }

    /// Checks that every segment is contiguous. Positions restart with every run of tokens, so two runs with the same
    /// number would be one sample to attention but two to positions.
    fn check_segments(&self, sequence: usize) -> Result<(), TrainError> {
        for row in self.segments.iter().flat_map(|segments| segments.chunks(sequence.max(1))) {
            for at in 1..row.len() {
                if row[at] != row[at - 1] && row[..at - 1].contains(&row[at]) {
                    return Err(TrainError::Batch {
                        problem: format!(
                            "`segments` has {} in two places of a row; number samples apart",
                            row[at]
                        ),
                    });
                }
            }
        }
        Ok(())
    }
}

impl MicroBatch for Batch {
    fn entries(&self, input: &str) -> Option<Entries<'_>> {
        let entries = match input {
            "tokens" => &self.tokens,
            "targets" => &self.targets,
            "positions" => &self.positions,
            "segments" => self.segments.as_ref()?,
            _ => return None,
        };
        Some(Entries::I32(entries))
    }

    fn counted(&self) -> usize {
        self.valid_tokens()
    }

    fn units(&self) -> usize {
        self.tokens.len()
    }

    fn check(&self, options: &TrainOptions) -> Result<(), TrainError> {
        let TrainOptions { batch, sequence, packing, .. } = *options;
        self.check_form(batch, sequence, packing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_start_again_with_each_segment() {
        let batch = Batch::packed(vec![0; 8], vec![0; 8], vec![0, 0, 1, 1, 5, 5, 5, 5], 4);
        assert_eq!(batch.positions, [0, 1, 0, 1, 0, 1, 2, 3]);
    }

    #[test]
    fn a_segment_is_one_run() {
        let check = |segments: Vec<i32>| {
            let count = segments.len();
            Batch::packed(vec![0; count], vec![0; count], segments, count).check_form(
                1,
                count,
                Packing::Segments,
            )
        };
        assert!(check(vec![0, 0, 1, 1, 5]).is_ok());
        let error = check(vec![0, 0, 1, 0]).unwrap_err().to_string();
        assert!(error.contains("has 0 in two places"), "{error}");
    }
}
