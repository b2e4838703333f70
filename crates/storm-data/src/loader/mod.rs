//! Batches from a dataset of tokens: each row once per epoch, starting at any position.

mod packed;
mod rows;
mod shuffle;
mod write;

use crate::dataset::TokenStreams;
use crate::records::{
    Estimator, LoaderStatistics, Order, RecordBatch, RecordLoader, RecordLoaderOptions, TokenRows,
};
use crate::{DataError, Dataset};
use rows::RowBuffers;
pub(crate) use rows::{RowMut, Rows};
use serde::{Deserialize, Serialize};
pub(crate) use shuffle::Shuffle;
use std::sync::Arc;
pub use write::write_batches;

/// Default bytes of memory for blocks.
const DATA_RAM: u64 = 256 << 20;

/// A part of a dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// The training part.
    Train,
    /// The part held out for evaluation.
    Held,
}

impl Split {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Split::Train => "training",
            Split::Held => "held-out",
        }
    }
}

/// How many passes to make over the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// Epoch after epoch. A batch may span two epochs.
    Endless,
    /// One epoch. The last batch may be partial.
    One,
}

/// What to do with samples longer than a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overlong {
    /// Drop them.
    Drop,
    /// Truncate them. Drop them if no token that counts in the loss is left.
    Truncate,
    /// Split them into pieces as long as a row, each a separate sample.
    Split,
    /// Fail.
    Error,
}

/// Options of a loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Rows in a batch.
    pub batch: usize,
    /// Tokens in a row.
    pub sequence: usize,
    /// Seed of the shuffle.
    pub seed: u64,
    /// Which part.
    pub split: Split,
    /// Order of the rows.
    pub order: Order,
    /// How many passes.
    pub passes: Passes,
    /// What to do with samples longer than a row. Does not apply to text.
    pub overlong: Overlong,
    /// Bytes of memory for blocks and prefetched batches. In window order it determines how many
    /// blocks are in a window. Ignored for datasets of version 1, which are mapped.
    pub data_ram: u64,
    /// Threads that read. Their number does not affect the batches.
    pub workers: usize,
}

impl LoaderOptions {
    /// For training: endless rows in global order. Drops samples longer than a row.
    pub fn training(batch: usize, sequence: usize, seed: u64) -> LoaderOptions {
        LoaderOptions {
            batch,
            sequence,
            seed,
            split: Split::Train,
            order: Order::Global,
            passes: Passes::Endless,
            overlong: Overlong::Drop,
            data_ram: DATA_RAM,
            workers: 2,
        }
    }

    /// For evaluation: one pass over the held-out part.
    pub fn evaluation(batch: usize, sequence: usize) -> LoaderOptions {
        LoaderOptions {
            split: Split::Held,
            order: Order::Sequential,
            passes: Passes::One,
            ..LoaderOptions::training(batch, sequence, 0)
        }
    }

    fn check(&self) -> Result<(), DataError> {
        for (option, value) in [("batch", self.batch), ("sequence", self.sequence)] {
            if value == 0 || value > 1 << 28 {
                let problem = format!("{value} is not between 1 and {}", 1 << 28);
                return Err(DataError::Option { option, problem });
            }
        }
        Ok(())
    }

    /// The same options for a record loader.
    fn of_records(&self) -> RecordLoaderOptions {
        let LoaderOptions { batch, seed, split, order, passes, data_ram, workers, .. } = *self;
        RecordLoaderOptions { batch, seed, part: split, order, passes, data_ram, workers }
    }

    fn token_rows(&self, dataset: &Dataset, streams: &TokenStreams, rows: &Arc<Rows>) -> TokenRows {
        let vocabulary = dataset.manifest().tokenizer.vocabulary;
        let tokens = dataset.token_range(self.split);
        TokenRows::new(Arc::clone(rows), streams.format(), vocabulary, tokens, self.sequence)
    }
}

/// The rows of a dataset, at least one.
fn nonempty_rows(dataset: &Dataset, options: &LoaderOptions) -> Result<Arc<Rows>, DataError> {
    options.check()?;
    let rows = Rows::new(dataset, options)?;
    if rows.count() > 0 {
        return Ok(Arc::new(rows));
    }
    let report = rows.report();
    let hint = match options.split {
        _ if report.overlong_samples > 0 => format!(
            "its {} samples are longer than a row; a sequence of {} would hold all",
            report.overlong_samples, report.longest_sample
        ),
        Split::Train => "pack more data, or hold less of it out".to_owned(),
        Split::Held => "pack with a larger --held-out share".to_owned(),
    };
    let (path, split) = (dataset.dir().to_owned(), options.split.name());
    Err(DataError::Empty { path, split, hint })
}

/// Predicts the cost of a loader with these options. `None` for a mapped dataset.
///
/// # Errors
/// As [`Loader::new`].
pub fn estimator_of_text(
    dataset: &Dataset,
    options: &LoaderOptions,
) -> Result<Option<Estimator>, DataError> {
    let Some(streams) = dataset.streams() else { return Ok(None) };
    let rows = nonempty_rows(dataset, options)?;
    let rows = options.token_rows(dataset, streams, &rows);
    Estimator::of_tokens(Arc::clone(streams.set()), options.of_records(), rows).map(Some)
}

/// A batch, in reusable buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Samples {
    /// (B, T) token ids.
    pub tokens: Vec<i32>,
    /// (B, T) the token after each token, or [`storm_graph::IGNORE_INDEX`] where it does not count
    /// in the loss.
    pub targets: Vec<i32>,
    /// (B, T) which sample of its row each token belongs to. `None` for text, where a row is one
    /// sample.
    pub segments: Option<Vec<i32>>,
}

/// The position of a loader, saved in checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// The dataset, see [`Dataset::id`].
    pub dataset: String,
    /// The part of it.
    pub split: Split,
    /// Tokens in a row. Another length gives other rows.
    pub sequence: usize,
    /// Order of the rows.
    pub order: Order,
    /// Blocks in a window, derived from the memory. 0 where the order does not depend on it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub window_blocks: u64,
    /// Seed of the shuffle.
    pub seed: u64,
    /// Epochs finished.
    pub epoch: u64,
    /// Rows of this epoch already returned.
    pub row: u64,
    /// How samples longer than a row were handled, which affects the rows. Positions without this
    /// field are from versions that truncated them.
    #[serde(default = "lost_their_end")]
    pub overlong: Overlong,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn lost_their_end() -> Overlong {
    Overlong::Truncate
}

/// Statistics of dividing the data into rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoaderReport {
    /// Rows in an epoch.
    pub rows: u64,
    /// Samples in an epoch, counting pieces separately. For text, rows.
    pub samples: u64,
    /// Samples longer than a row.
    pub overlong_samples: u64,
    /// Samples dropped: longer than a row, too short, or without tokens that count in the loss.
    pub dropped_samples: u64,
    /// The sequence length that would fit every sample. For text, the row length.
    pub longest_sample: u64,
    /// Padding tokens in an epoch.
    pub padding_tokens: u64,
}

/// Draws batches from a dataset. For text, rows are consecutive windows, the last one padded. For
/// samples, rows are packed with whole samples, and [`Overlong`] determines what happens to longer
/// ones.
#[derive(Debug)]
pub struct Loader {
    dataset: Arc<Dataset>,
    options: LoaderOptions,
    rows: Arc<Rows>,
    source: Source,
}

/// Where rows come from.
#[derive(Debug)]
enum Source {
    /// Memory-mapped files.
    Mapped(Mapped),
    /// Blocks that other threads read.
    Blocks(Box<RecordLoader>, RecordBatch),
}

#[derive(Debug, Default)]
struct Mapped {
    buffers: RowBuffers,
    epoch: u64,
    row: u64,
}

impl Loader {
    /// A loader at the beginning of the first epoch.
    ///
    /// # Errors
    /// If the part is empty, or batch or sequence are zero or too large.
    pub fn new(dataset: Arc<Dataset>, options: LoaderOptions) -> Result<Loader, DataError> {
        let rows = nonempty_rows(&dataset, &options)?;
        let source = match dataset.streams() {
            Some(streams) => Loader::of_blocks(&dataset, streams, &rows, &options)?,
            None if options.order == Order::Window => {
                let problem = format!(
                    "{} was packed before datasets of text had blocks, and comes in the order `global`; pack it again",
                    dataset.dir().display()
                );
                return Err(DataError::Option { option: "order", problem });
            }
            None => Source::Mapped(Mapped::default()),
        };
        let mut loader = Loader { dataset, options, rows, source };
        loader.announce();
        Ok(loader)
    }

    fn of_blocks(
        dataset: &Dataset,
        streams: &TokenStreams,
        rows: &Arc<Rows>,
        options: &LoaderOptions,
    ) -> Result<Source, DataError> {
        let rows = options.token_rows(dataset, streams, rows);
        let set = Arc::clone(streams.set());
        let loader = RecordLoader::of_tokens(set, options.of_records(), rows)?;
        Ok(Source::Blocks(Box::new(loader), RecordBatch::default()))
    }

    /// Fills `samples` with the next batch, and returns how many of its rows hold data: all of
    /// them, except in the last batch of [`Passes::One`], and none after that. The remaining rows
    /// are padding without targets.
    ///
    /// # Errors
    /// If the dataset on disk was damaged in the meantime. The position does not change.
    pub fn next_batch(&mut self, samples: &mut Samples) -> Result<usize, DataError> {
        let LoaderOptions { sequence, .. } = self.options;
        self.size(samples);
        let filled = match &mut self.source {
            Source::Mapped(mapped) => {
                mapped.next_batch(&self.dataset, &self.rows, &self.options, samples)?
            }
            Source::Blocks(loader, batch) => {
                let filled = loader.next_batch(batch)?;
                let of_samples = [Some(&mut samples.tokens), Some(&mut samples.targets)];
                let of_samples = of_samples.into_iter().chain([samples.segments.as_mut()]);
                for (values, column) in of_samples.flatten().zip(batch.columns()) {
                    values.iter_mut().zip(column.values()).for_each(|(to, from)| *to = from);
                }
                filled
            }
        };
        for values in [
            (&mut samples.tokens, self.rows.padding()),
            (&mut samples.targets, storm_graph::IGNORE_INDEX),
        ] {
            values.0[filled * sequence..].fill(values.1);
        }
        if let Some(segments) = &mut samples.segments {
            segments[filled * sequence..].fill(0);
        }
        self.announce();
        Ok(filled)
    }

    /// Prefetches the next batch while this one is in use.
    fn announce(&mut self) {
        let Source::Mapped(mapped) = &mut self.source else { return };
        let end = self.rows.count().min(mapped.row + self.options.batch as u64);
        for row in mapped.row..end {
            let number = number(&self.rows, &self.options, mapped.epoch, row);
            mapped.buffers.announce(&self.rows, &self.dataset, number);
        }
    }

    fn size(&self, samples: &mut Samples) {
        let count = self.options.batch * self.options.sequence;
        samples.tokens.resize(count, 0);
        samples.targets.resize(count, 0);
        match self.rows.has_segments() {
            true => samples.segments.get_or_insert_default().resize(count, 0),
            false => samples.segments = None,
        }
    }

    /// The current position, from which [`Loader::resume`] continues.
    pub fn position(&self) -> Position {
        let LoaderOptions { sequence, seed, split, order, .. } = self.options;
        let dataset = self.dataset.id().to_owned();
        let ((epoch, row), window_blocks) = match &self.source {
            Source::Mapped(mapped) => ((mapped.epoch, mapped.row), 0),
            Source::Blocks(loader, _) => (loader.place(), loader.window_blocks()),
        };
        // Text has no samples, so the option does not change its rows.
        let overlong = match self.rows.has_segments() {
            true => self.options.overlong,
            false => lost_their_end(),
        };
        Position { dataset, split, sequence, order, window_blocks, seed, epoch, row, overlong }
    }

    /// Resumes from a position of a loader with the same data and options. The batch size may
    /// differ.
    ///
    /// # Errors
    /// States what does not match. The position does not change.
    pub fn resume(&mut self, position: &Position) -> Result<(), DataError> {
        let own = self.position();
        let mismatch = |what: &str, ours: String, theirs: String| DataError::Position {
            problem: format!("{what} was {theirs} and is {ours} now"),
        };
        if own.dataset != position.dataset {
            return Err(DataError::Position {
                problem: format!("it is of another dataset than {}", self.dataset.dir().display()),
            });
        }
        let pairs = [
            ("the split", own.split.name().to_owned(), position.split.name().to_owned()),
            ("the sequence length", own.sequence.to_string(), position.sequence.to_string()),
            ("the order", own.order.name().to_owned(), position.order.name().to_owned()),
            (
                "the number of blocks in a window, which follows from data-ram,",
                own.window_blocks.to_string(),
                position.window_blocks.to_string(),
            ),
            ("the seed", own.seed.to_string(), position.seed.to_string()),
            ("overlong", format!("{:?}", own.overlong), format!("{:?}", position.overlong)),
        ];
        for (what, ours, theirs) in pairs {
            if ours != theirs {
                return Err(mismatch(what, ours, theirs));
            }
        }
        let last = match self.options.passes {
            Passes::Endless => self.rows.count() - 1,
            Passes::One => self.rows.count(),
        };
        if position.row > last || position.epoch == u64::MAX {
            let problem = format!("an epoch has {} rows, not {}", self.rows.count(), position.row);
            return Err(DataError::Position { problem });
        }
        let (epoch, row) = (position.epoch, position.row);
        match &mut self.source {
            Source::Mapped(mapped) => (mapped.epoch, mapped.row) = (epoch, row),
            Source::Blocks(loader, _) => loader.go_to(epoch, row),
        }
        self.announce();
        Ok(())
    }

    /// Epochs finished.
    pub fn epoch(&self) -> u64 {
        match &self.source {
            Source::Mapped(mapped) => mapped.epoch,
            Source::Blocks(loader, _) => loader.epoch(),
        }
    }

    /// Loading statistics so far. `None` for a mapped dataset.
    pub fn statistics(&self) -> Option<LoaderStatistics> {
        match &self.source {
            Source::Mapped(_) => None,
            Source::Blocks(loader, _) => Some(loader.statistics()),
        }
    }

    /// Reads the whole part now if it fits in memory, and returns whether it does. See
    /// [`RecordLoader::preload`].
    ///
    /// # Errors
    /// If a block cannot be read or is damaged.
    pub fn preload(&self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<bool, DataError> {
        match &self.source {
            Source::Mapped(_) => Ok(false),
            Source::Blocks(loader, _) => loader.preload(progress),
        }
    }

    /// Rows in an epoch.
    pub fn rows_per_epoch(&self) -> u64 {
        self.rows.count()
    }

    /// Tokens that a model processes in an epoch, padding included: rows × sequence.
    pub fn tokens_per_epoch(&self) -> u64 {
        self.rows.count() * self.options.sequence as u64
    }

    /// Statistics of dividing the data into rows.
    pub fn report(&self) -> LoaderReport {
        self.rows.report()
    }

    /// The dataset it loads from.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }
}

/// The row at a position in an epoch of a mapped dataset.
fn number(rows: &Rows, options: &LoaderOptions, epoch: u64, row: u64) -> u64 {
    match options.order {
        Order::Sequential => row,
        // Mapped datasets have no windows.
        Order::Global | Order::Window => Shuffle::new(rows.count(), options.seed, epoch).at(row),
    }
}

impl Mapped {
    /// Fills the rows of a batch and returns how many were filled.
    fn next_batch(
        &mut self,
        dataset: &Dataset,
        rows: &Rows,
        options: &LoaderOptions,
        samples: &mut Samples,
    ) -> Result<usize, DataError> {
        let LoaderOptions { batch, sequence, .. } = *options;
        let (mut epoch, mut row) = (self.epoch, self.row);
        let mut filled = 0;
        for place in 0..batch {
            if row == rows.count() {
                match options.passes {
                    Passes::Endless => (epoch, row) = (epoch + 1, 0),
                    Passes::One => break,
                }
            }
            let at = place * sequence..(place + 1) * sequence;
            let dest = RowMut {
                tokens: &mut samples.tokens[at.clone()],
                targets: &mut samples.targets[at.clone()],
                segments: samples.segments.as_mut().map(|segments| &mut segments[at]),
            };
            rows.fill(dataset, number(rows, options, epoch, row), dest, &mut self.buffers)?;
            (row, filled) = (row + 1, place + 1);
        }
        // At the end of an epoch, the position is the start of the next, not one past the last row.
        if row == rows.count() && options.passes == Passes::Endless {
            (epoch, row) = (epoch + 1, 0);
        }
        (self.epoch, self.row) = (epoch, row);
        Ok(filled)
    }
}
