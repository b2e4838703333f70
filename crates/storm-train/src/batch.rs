use crate::TrainError;
use storm_data::Samples;
use storm_graph::{IGNORE_INDEX, Op, Program};
use storm_model::{ModelConfig, Packing};

/// One micro-batch of token sequences: `batch` rows of `sequence` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// (B, T) token ids.
    pub tokens: Vec<i32>,
    /// (B, T) what follows each token; [`IGNORE_INDEX`] where there is nothing to learn.
    pub targets: Vec<i32>,
    /// (B, T) position of each token in its sample.
    pub positions: Vec<i32>,
    /// (B, T) which sample each token belongs to; none if each row is one sample.
    pub segments: Option<Vec<i32>>,
}

impl Batch {
    /// Rows of one sample each.
    pub fn new(tokens: Vec<i32>, targets: Vec<i32>, sequence: usize) -> Batch {
        let positions = (0..tokens.len()).map(|i| (i % sequence.max(1)) as i32).collect();
        Batch { tokens, targets, positions, segments: None }
    }

    /// Rows of several samples each: positions start again with every segment.
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

    /// Swaps the contents with those of `samples`, so that the buffers of both are used again.
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

    /// Targets that count.
    pub fn valid_tokens(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE_INDEX).count()
    }

    /// Checks sizes, and that every id can be looked up.
    fn check(&self, size: &BatchSize) -> Result<(), TrainError> {
        let BatchSize { batch, sequence, tokens, targets, positions, packing } = *size;
        let rows = batch * sequence;
        if self.segments.is_some() != (packing == Packing::Segments) {
            let problem = match packing {
                Packing::Segments => "has no segments, but the model was set up for packed samples",
                Packing::Single => "has segments, but the model was set up for single samples",
            };
            return Err(TrainError::Batch { problem: problem.to_owned() });
        }
        let columns = [
            ("tokens", Some(&self.tokens), tokens),
            ("targets", Some(&self.targets), targets),
            ("positions", Some(&self.positions), positions),
            ("segments", self.segments.as_ref(), usize::MAX),
        ];
        for (name, values, limit) in columns {
            let Some(values) = values else { continue };
            if values.len() != rows {
                return Err(TrainError::Batch {
                    problem: format!("`{name}` has {} entries, not {rows}", values.len()),
                });
            }
            let known = |value: i32| {
                limit == usize::MAX
                    || usize::try_from(value).is_ok_and(|value| value < limit)
                    || (name == "targets" && value == IGNORE_INDEX)
            };
            if let Some(at) = values.iter().position(|&value| !known(value)) {
                return Err(TrainError::Batch {
                    problem: format!(
                        "`{name}` has {} at entry {at}; the model knows 0 to {}",
                        values[at],
                        limit - 1
                    ),
                });
            }
        }
        self.check_segments(sequence)
    }

    /// A segment is one run of tokens: positions start again with every run, so two runs of the same
    /// number would be one sample to attention and two to the positions.
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

/// What a batch must fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchSize {
    pub(crate) batch: usize,
    pub(crate) sequence: usize,
    /// Every token is below this, every target that counts, and every position.
    tokens: usize,
    targets: usize,
    positions: usize,
    packing: Packing,
}

/// As good as no limit: ids are i32.
const ANY_ID: usize = i32::MAX as usize;

impl BatchSize {
    pub(crate) fn new(
        config: &ModelConfig,
        batch: usize,
        sequence: usize,
        packing: Packing,
    ) -> BatchSize {
        let positions = match config.rotary {
            Some(_) => ANY_ID,
            None => config.max_positions,
        };
        let [tokens, targets] = [config.vocab_size; 2];
        BatchSize { batch, sequence, tokens, targets, positions, packing }
    }

    /// What a program can take: ids below the rows of every table that they are looked up in.
    pub(crate) fn of_program(
        program: &Program,
        batch: usize,
        sequence: usize,
        packing: Packing,
    ) -> BatchSize {
        let [mut tokens, mut targets, mut positions] = [ANY_ID; 3];
        for graph in program.templates().iter().map(|section| &section.graph) {
            for node in graph.nodes() {
                let (ids, table) = match node.op {
                    Op::Embedding { ids, table } => (ids, table),
                    Op::HeadLoss { targets, weight, .. } => (targets, weight),
                    _ => continue,
                };
                let limit = match graph.tensor(ids).name.as_str() {
                    "tokens" => &mut tokens,
                    "targets" => &mut targets,
                    "positions" => &mut positions,
                    _ => continue,
                };
                *limit = (*limit).min(graph.tensor(table).shape.axes()[0]);
            }
        }
        BatchSize { batch, sequence, tokens, targets, positions, packing }
    }

    /// Checks all micro-batches of a step and counts the targets that count.
    ///
    /// # Errors
    /// Says which entry is wrong and what it may be; also if there is nothing to learn.
    pub(crate) fn check(&self, batches: &[Batch]) -> Result<usize, TrainError> {
        batches.iter().try_for_each(|batch| batch.check(self))?;
        let valid = batches.iter().map(Batch::valid_tokens).sum();
        if valid == 0 {
            let problem = match batches.len() {
                0 => "the step has no batches",
                _ => "no target of the step counts: every one is ignored",
            };
            return Err(TrainError::Batch { problem: problem.to_owned() });
        }
        Ok(valid)
    }

    /// [`BatchSize::check`] for a batch that is only looked at: its targets do not matter.
    pub(crate) fn check_inputs(&self, batch: &Batch) -> Result<(), TrainError> {
        batch.check(self)
    }
}

/// Writes the rows of `ids` sorted by (id, row) into `order`, without allocating.
pub(crate) fn sort_rows(ids: &[i32], order: &mut [i32]) {
    for (row, order) in order.iter_mut().enumerate() {
        *order = row as i32;
    }
    // Keys are distinct, so an unstable sort is a stable one.
    order.sort_unstable_by_key(|&row| (ids[row as usize], row));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(sequence: usize, packing: Packing) -> BatchSize {
        BatchSize { batch: 1, sequence, tokens: 10, targets: 10, positions: 9, packing }
    }

    #[test]
    fn positions_start_again_with_each_segment() {
        let batch = Batch::packed(vec![0; 8], vec![0; 8], vec![0, 0, 1, 1, 5, 5, 5, 5], 4);
        assert_eq!(batch.positions, [0, 1, 0, 1, 0, 1, 2, 3]);
    }

    #[test]
    fn rows_are_sorted_by_id_then_row() {
        let mut order = [0; 6];
        sort_rows(&[3, 1, 3, 0, 1, 3], &mut order);
        assert_eq!(order, [3, 1, 4, 0, 2, 5]);
    }

    #[test]
    fn bad_ids_are_named() {
        let check = |batch: Batch| batch.check(&size(2, Packing::Single)).unwrap_err().to_string();
        let batch = Batch::new(vec![1, 10], vec![1, IGNORE_INDEX], 2);
        assert_eq!(check(batch), "batch: `tokens` has 10 at entry 1; the model knows 0 to 9");
        let batch = Batch::new(vec![1, 2], vec![-1, 2], 2);
        assert_eq!(check(batch), "batch: `targets` has -1 at entry 0; the model knows 0 to 9");
        let batch = Batch::new(vec![1, 2, 3], vec![1, 2], 3);
        assert_eq!(check(batch), "batch: `tokens` has 3 entries, not 2");
    }

    #[test]
    fn a_segment_is_one_run() {
        let check = |segments: Vec<i32>| {
            let count = segments.len();
            Batch::packed(vec![0; count], vec![0; count], segments, count)
                .check(&size(count, Packing::Segments))
        };
        assert!(check(vec![0, 0, 1, 1, 5]).is_ok());
        let error = check(vec![0, 0, 1, 0]).unwrap_err().to_string();
        assert!(error.contains("has 0 in two places"), "{error}");
    }
}
