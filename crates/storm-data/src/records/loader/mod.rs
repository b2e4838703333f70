//! Batches of rows: each row once per epoch, starting at any position, in bounded memory. Rows are
//! records, or tokens of a stream (`rows.rs`).
//!
//! The calling thread plans batches. Workers read blocks and copy rows. The blocks of a window stay
//! in memory until all of its rows were copied. Meanwhile the blocks of the next window are
//! prefetched, a share with each batch, so no window begins with a burst of reads. Two windows and
//! the batches ahead fit in `data_ram`.

mod content;
mod memory;
mod pace;
mod planner;
mod recent;
mod rows;
mod window;
mod worker;

use super::batch::RecordBatch;
use super::counters::LoaderStatistics;
use super::order::{Order, Rule};
use super::parallel;
use super::read::Buffers;
use super::set::{Reader, RecordSet};
use crate::{DataError, Passes, Split};
pub(super) use content::Content;
pub(super) use memory::{Load, Memory, data_ram_to_hold};
use pace::Pace;
pub(super) use pace::batches_ahead;
use planner::{Planned, Planner};
use recent::Search;
use rows::RowsOf;
pub(crate) use rows::TokenRows;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use window::{Residence, Slot};
use worker::{Job, Reply, Workers};

/// Limit on rows of a batch.
const BATCH_MAX: usize = 1 << 24;
/// Limit on threads.
const WORKERS_MAX: usize = 1024;
/// Queue depth per thread when preloading.
const PRELOAD_BLOCKS: usize = 16;

/// Options of a record loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordLoaderOptions {
    /// Records in a batch.
    pub batch: usize,
    /// Seed of the order.
    pub seed: u64,
    /// Which part.
    pub part: Split,
    /// Order of the rows.
    pub order: Order,
    /// How many passes.
    pub passes: Passes,
    /// Bytes of memory for blocks and prefetched batches. Determines how many blocks are in a
    /// window.
    pub data_ram: u64,
    /// Threads that read. Their number does not affect the batches.
    pub workers: usize,
}

impl RecordLoaderOptions {
    /// For training: endless rows in window order.
    pub fn training(batch: usize, seed: u64, data_ram: u64) -> RecordLoaderOptions {
        RecordLoaderOptions {
            batch,
            seed,
            part: Split::Train,
            order: Order::Window,
            passes: Passes::Endless,
            data_ram,
            workers: 2,
        }
    }

    /// Checks the options that do not depend on a dataset.
    ///
    /// # Errors
    /// Names the option that is out of range.
    pub fn check(&self) -> Result<(), DataError> {
        for (option, value, most) in
            [("batch", self.batch, BATCH_MAX), ("workers", self.workers, WORKERS_MAX)]
        {
            if value == 0 || value > most {
                let problem = format!("{value} is not between 1 and {most}");
                return Err(DataError::Option { option, problem });
            }
        }
        Ok(())
    }

    /// For evaluation: one pass over the held-out part.
    pub fn evaluation(batch: usize, data_ram: u64) -> RecordLoaderOptions {
        RecordLoaderOptions {
            part: Split::Held,
            order: Order::Sequential,
            passes: Passes::One,
            ..RecordLoaderOptions::training(batch, 0, data_ram)
        }
    }
}

/// The position of a loader, saved in checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordPosition {
    /// The dataset, see [`RecordSet::id`].
    pub dataset: String,
    /// The part of it.
    pub part: Split,
    /// Order of the rows.
    pub order: Order,
    /// Seed of the order.
    pub seed: u64,
    /// Blocks in a window, derived from `data_ram`. 0 where the order does not depend on it.
    pub window_blocks: u64,
    /// Epochs finished.
    pub epoch: u64,
    /// Records of this epoch already returned.
    pub row: u64,
}

/// Draws batches from a dataset of records.
#[derive(Debug)]
pub struct RecordLoader {
    set: Arc<RecordSet>,
    options: RecordLoaderOptions,
    rows: Arc<RowsOf>,
    planner: Planner,
    buffers: Arc<Buffers>,
    workers: Workers,
    /// Planned batches, in order.
    ahead: VecDeque<Ahead>,
    pace: Pace,
    /// When the last batch was returned.
    returned: Option<Instant>,
    /// Batches whose buffers can be reused.
    spare: Vec<RecordBatch>,
    epoch: u64,
    row: u64,
    statistics: LoaderStatistics,
}

#[derive(Debug)]
struct Ahead {
    reply: Receiver<Reply>,
    /// The position after it.
    epoch: u64,
    row: u64,
}

impl RecordLoader {
    /// A loader at the beginning of the first epoch.
    ///
    /// # Errors
    /// If the part is empty, an option cannot be used, or `data_ram` is too small for this dataset.
    pub fn new(
        set: Arc<RecordSet>,
        options: RecordLoaderOptions,
    ) -> Result<RecordLoader, DataError> {
        options.check()?;
        let content = Content::records(&set, options.part)?;
        RecordLoader::of_content(set, options, content, Search::Usual)
    }

    /// A loader of rows of tokens, whose stream is in `set`.
    pub(crate) fn of_tokens(
        set: Arc<RecordSet>,
        options: RecordLoaderOptions,
        rows: TokenRows,
    ) -> Result<RecordLoader, DataError> {
        options.check()?;
        let content = Content::tokens(&set, rows);
        RecordLoader::of_content(set, options, content, Search::Usual)
    }

    /// A loader that reads as if the dataset were so large that no block is ever found in memory.
    /// Also returns after how many blocks its memory is full.
    pub(super) fn never_found(
        set: &Arc<RecordSet>,
        options: RecordLoaderOptions,
        content: &Content,
    ) -> Result<(RecordLoader, u64), DataError> {
        let content = content.clone().of_many_blocks();
        let memory = Memory::new(set, &content.load, &options)?;
        let to_fill = match set.has_single_records() {
            true => 0,
            // It cannot hold more blocks than there are.
            false => memory.cached_blocks.min(content.part.blocks.len()) as u64,
        };
        let set = Arc::clone(set);
        let loader = RecordLoader::of_content(set, options, content, Search::NeverFound)?;
        Ok((loader, to_fill))
    }

    fn of_content(
        set: Arc<RecordSet>,
        options: RecordLoaderOptions,
        content: Content,
        search: Search,
    ) -> Result<RecordLoader, DataError> {
        let Content { rows, part, load } = content;
        let memory = Memory::new(&set, &load, &options)?;
        let rule =
            Rule { order: options.order, seed: options.seed, window_blocks: memory.window_blocks };
        let buffers = Arc::new(Buffers::new(set.block_bytes_max()));
        let residence = match memory.fits {
            true => Residence::whole(&part),
            false if options.order != Order::Global => Residence::Windows,
            false if set.has_single_records() => Residence::SingleRecords,
            false => Residence::recent(memory.cached_blocks, search),
        };
        let workers = Workers::start(&set, &rows, &buffers, &memory)?;
        let planner = Planner::new(part, rule, options.passes, residence);
        let mut loader = RecordLoader {
            set,
            options,
            rows,
            planner,
            buffers,
            workers,
            ahead: VecDeque::new(),
            pace: Pace::new(memory.depth, memory.depth_max),
            returned: None,
            spare: Vec::new(),
            epoch: 0,
            row: 0,
            statistics: LoaderStatistics::default(),
        };
        loader.plan_ahead();
        Ok(loader)
    }

    /// Fills `batch` with the next records and returns how many of its rows hold data: all of them,
    /// except in the last batch of [`Passes::One`], and none after that.
    ///
    /// # Errors
    /// If a block cannot be read or is damaged. Names the shard and the block. The position does
    /// not change, and the next call retries.
    pub fn next_batch(&mut self, batch: &mut RecordBatch) -> Result<usize, DataError> {
        if let Some(returned) = self.returned.take() {
            let workers = &self.workers;
            self.pace.came(returned.elapsed(), || workers.take_longest());
        }
        self.plan_ahead();
        let Some(next) = self.ahead.pop_front() else {
            batch.prepare(self.rows.layout(&self.set), self.options.batch);
            batch.finish();
            return Ok(0);
        };
        let received = match next.reply.try_recv() {
            Ok(received) => received,
            Err(_) => {
                let start = Instant::now();
                let received = next.reply.recv().unwrap_or_else(|_| Err(worker::lost()));
                self.pace.waited();
                self.statistics.stalls += 1;
                self.statistics.stalled_ns += start.elapsed().as_nanos() as u64;
                received
            }
        };
        let ready = match received {
            Ok(ready) => ready,
            Err(error) => {
                self.seek(self.epoch, self.row);
                return Err(error);
            }
        };
        self.statistics.batches += 1;
        self.spare.push(std::mem::replace(batch, ready));
        (self.epoch, self.row) = (next.epoch, next.row);
        self.plan_ahead();
        self.returned = Some(Instant::now());
        Ok(batch.rows)
    }

    /// Keeps the workers busy.
    fn plan_ahead(&mut self) {
        while self.ahead.len() < self.pace.depth() {
            let Some(planned) = self.planner.next(self.options.batch) else { return };
            let Planned { stretches, prefetch, epoch, row } = planned;
            let (sender, reply) = channel();
            let batch = self.spare.pop().unwrap_or_default();
            let rows = self.options.batch;
            self.workers.send(Job { stretches, prefetch, batch, rows, reply: sender });
            self.ahead.push_back(Ahead { reply, epoch, row });
        }
    }

    /// Discards planned batches and moves to a position.
    fn seek(&mut self, epoch: u64, row: u64) {
        self.workers.forget();
        self.ahead.clear();
        self.planner.seek(epoch, row);
        (self.epoch, self.row) = (epoch, row);
    }

    /// Reads the whole part now if it fits in memory, and returns whether it does. `progress`
    /// receives how many blocks are loaded, and of how many.
    ///
    /// # Errors
    /// If a block cannot be read or is damaged.
    pub fn preload(&self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<bool, DataError> {
        // Borrow only the fields that can be shared between threads.
        let (set, buffers, blocks) = (&*self.set, &self.buffers, self.planner.blocks());
        let done = AtomicU64::new(0);
        let pieces: Vec<&[(u32, &Slot)]> = blocks.chunks(PRELOAD_BLOCKS).collect();
        let load = |reader: &mut Reader, piece: &&[(u32, &Slot)]| {
            let empty = piece.iter().filter_map(|(number, slot)| Some((*number, slot.claim()?)));
            set.load_each(empty, reader, |mut place, loaded| {
                *place = Some(Arc::new(loaded?));
                Ok(())
            })?;
            let count = piece.len() as u64;
            progress(done.fetch_add(count, Ordering::Relaxed) + count, blocks.len() as u64);
            Ok(())
        };
        let reader = || Reader::new(set, buffers, PRELOAD_BLOCKS);
        let loaded = parallel::map(&pieces, reader, load);
        loaded.into_iter().collect::<Result<(), DataError>>()?;
        Ok(!blocks.is_empty())
    }

    /// Blocks in a window. 0 where the order does not depend on it.
    pub(crate) fn window_blocks(&self) -> u64 {
        match self.options.order {
            Order::Window => self.planner.window_blocks(),
            Order::Global | Order::Sequential => 0,
        }
    }

    /// Epochs finished, and rows of this epoch already returned.
    pub(crate) fn place(&self) -> (u64, u64) {
        (self.epoch, self.row)
    }

    /// Moves to a row that exists, or to the end of [`Passes::One`].
    pub(crate) fn go_to(&mut self, epoch: u64, row: u64) {
        self.seek(epoch, row);
        self.plan_ahead();
    }

    /// The current position, from which [`RecordLoader::resume`] continues.
    pub fn position(&self) -> RecordPosition {
        let RecordLoaderOptions { part, order, seed, .. } = self.options;
        let window_blocks = self.window_blocks();
        let (dataset, epoch, row) = (self.set.id().to_owned(), self.epoch, self.row);
        RecordPosition { dataset, part, order, seed, window_blocks, epoch, row }
    }

    /// Resumes from a position of a loader with the same data, part, order, seed and window. The
    /// batch size may differ.
    ///
    /// # Errors
    /// States what does not match. The position does not change.
    pub fn resume(&mut self, position: &RecordPosition) -> Result<(), DataError> {
        let own = self.position();
        if own.dataset != position.dataset {
            return Err(DataError::Position {
                problem: format!("it is of another dataset than {}", self.set.dir().display()),
            });
        }
        let pairs = [
            ("the part", own.part.name().to_owned(), position.part.name().to_owned()),
            ("the order", own.order.name().to_owned(), position.order.name().to_owned()),
            ("the seed", own.seed.to_string(), position.seed.to_string()),
            (
                "the number of blocks in a window, which follows from data-ram,",
                own.window_blocks.to_string(),
                position.window_blocks.to_string(),
            ),
        ];
        for (what, ours, theirs) in pairs {
            if ours != theirs {
                let problem = format!("{what} was {theirs} and is {ours} now");
                return Err(DataError::Position { problem });
            }
        }
        let last = match self.options.passes {
            Passes::Endless => self.rows_per_epoch() - 1,
            Passes::One => self.rows_per_epoch(),
        };
        if position.row > last || position.epoch == u64::MAX {
            let rows = self.rows_per_epoch();
            let problem = format!("an epoch has {rows} records, not {}", position.row);
            return Err(DataError::Position { problem });
        }
        self.go_to(position.epoch, position.row);
        Ok(())
    }

    /// Epochs finished.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Records in an epoch.
    pub fn rows_per_epoch(&self) -> u64 {
        self.planner.rows()
    }

    /// The dataset it loads from.
    pub fn set(&self) -> &Arc<RecordSet> {
        &self.set
    }

    /// Loading statistics so far.
    pub fn statistics(&self) -> LoaderStatistics {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let measured = self.pace.measured();
        LoaderStatistics {
            ahead: self.pace.depth() as u64,
            interval_ns: measured.map_or(0, |measured| nanoseconds(measured.interval)),
            longest_ns: measured.map_or(0, |measured| nanoseconds(measured.longest)),
            ..self.statistics.of(self.workers.counters())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IfExists;
    use crate::records::{Codec, RecordInput, RecordPackOptions, Synthetic, pack_records};
    use storm_graph::random::Random;

    /// Batches and positions do not depend on how many batches are prepared ahead, or on when that
    /// changes.
    #[test]
    fn no_number_of_batches_ahead_changes_a_bit() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("set");
        let synthetic = Synthetic { count: 5_000, shape: vec![10, 100], classes: 10 };
        let options = RecordPackOptions {
            input: RecordInput::Synthetic(synthetic),
            out: out.clone(),
            if_exists: IfExists::Refuse,
            codec: Codec::Zstd,
            held_out: 0.0,
            skip_bad: false,
            size: None,
        };
        pack_records(&options, &|_| {}).unwrap();
        let set = Arc::new(RecordSet::open(&out).unwrap());
        for order in [Order::Window, Order::Global] {
            let options =
                RecordLoaderOptions { order, ..RecordLoaderOptions::training(64, 3, 6 << 20) };
            let mut fixed = RecordLoader::new(Arc::clone(&set), options).unwrap();
            let mut changed = RecordLoader::new(Arc::clone(&set), options).unwrap();
            let mut random = Random(4);
            let (mut expected, mut batch) = (RecordBatch::default(), RecordBatch::default());
            for _ in 0..200 {
                changed.pace.set_depth(1 + random.below(12));
                fixed.next_batch(&mut expected).unwrap();
                changed.next_batch(&mut batch).unwrap();
                assert!(batch == expected && changed.position() == fixed.position(), "{order:?}");
                assert!(changed.ahead.len() >= changed.pace.depth());
            }
        }
    }
}
