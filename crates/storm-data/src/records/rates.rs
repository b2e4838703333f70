//! Measures how fast this machine reads a dataset.

use super::batch::RecordBatch;
use super::counters::{Count, LoaderStatistics};
use super::loader::{Content, Memory, RecordLoader, RecordLoaderOptions};
use super::order::{GROUP_BLOCKS, Order};
use super::read::Buffers;
use super::set::{Reader, RecordSet};
use crate::DataError;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use storm_graph::random::Random;

/// How long each rate is measured.
const MEASURE_TIME: Duration = Duration::from_millis(600);
/// Warm-up before each measurement: the first reads also fault in the buffers of all threads.
const WARM_UP_TIME: Duration = Duration::from_millis(150);
/// Time limit for filling memory before reads are counted.
const FILL_TIME_MAX: Duration = Duration::from_secs(2);

/// Measured read rates of a dataset, with as many threads as a loader has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordRates {
    /// Sequential reads of groups of blocks, in bytes on disk per second, including checksums and
    /// decompression.
    pub sequential_bytes_per_second: f64,
    /// Random reads per second, of single records or of compressed blocks, including checksums and
    /// decompression.
    pub random_reads_per_second: f64,
    /// Random reads per row in global order, if nothing is in memory.
    pub reads_per_row: f64,
    /// Bytes of records per second that one thread verifies and decompresses, in the loader's
    /// order.
    pub decoding_bytes_per_second: f64,
}

impl RecordRates {
    /// A disk that is never the bottleneck.
    pub const UNLIMITED: RecordRates = RecordRates {
        sequential_bytes_per_second: f64::INFINITY,
        random_reads_per_second: f64::INFINITY,
        reads_per_row: 1.0,
        decoding_bytes_per_second: f64::INFINITY,
    };

    /// Measures for about a second and a half, and longer where compressed blocks fill `data_ram`
    /// slowly.
    pub(super) fn measure(
        set: &Arc<RecordSet>,
        content: &Content,
        options: &RecordLoaderOptions,
    ) -> Result<RecordRates, DataError> {
        let long = long_reads(set, content, options)?;
        let global = RecordLoaderOptions { order: Order::Global, ..*options };
        let data_ram = options.data_ram.max(content.load.needed(set, &global));
        let options_of_short = RecordLoaderOptions { data_ram, ..global };
        let (loader, blocks_to_fill) = RecordLoader::never_found(set, options_of_short, content)?;
        let (short, seconds) = short_reads(loader, blocks_to_fill)?;
        let decoding = match options.order {
            Order::Global => short.decoding_bytes_per_second(),
            Order::Window | Order::Sequential => {
                1e9 * long.decoded_bytes as f64 / long.decoding_ns.max(1) as f64
            }
        };
        Ok(RecordRates {
            sequential_bytes_per_second: long.bytes as f64 / MEASURE_TIME.as_secs_f64(),
            random_reads_per_second: short.reads as f64 / seconds,
            // A block that was found was read for a neighboring record.
            reads_per_row: content.wanted_per_row() * (1.0 - short.found_share()),
            decoding_bytes_per_second: decoding,
        })
    }
}

/// Reads groups of blocks on all threads of a loader.
fn long_reads(
    set: &RecordSet,
    content: &Content,
    options: &RecordLoaderOptions,
) -> Result<Timed, DataError> {
    let blocks = &content.part.blocks;
    // Assume more blocks than fit, because those that fit are not read again.
    let load = content.clone().of_many_blocks().load;
    let memory = |order| Memory::new(set, &load, &RecordLoaderOptions { order, ..*options });
    let memory = memory(Order::Window).or_else(|_| memory(options.order))?;
    timed(set, &memory, |random, trial, reader| {
        let groups = groups(blocks, random).take_while(|_| trial.is_on());
        let reads = groups.map(|block| (block, set.block(block).disk_bytes()));
        set.load_each(reads, reader, |bytes, loaded| {
            trial.count(bytes);
            loaded.map(drop)
        })
    })
}

/// Runs a loader as in training, and returns its statistics and the elapsed seconds. Counting
/// starts once memory is as full as in a run. Before that, buffers are not yet faulted in, nor in
/// the CPU caches.
fn short_reads(
    mut loader: RecordLoader,
    blocks_to_fill: u64,
) -> Result<(LoaderStatistics, f64), DataError> {
    let mut batch = RecordBatch::default();
    let start = Instant::now();
    while start.elapsed() < WARM_UP_TIME
        || (loader.statistics().reads < blocks_to_fill && start.elapsed() < FILL_TIME_MAX)
    {
        loader.next_batch(&mut batch)?;
    }
    let (start, before) = (Instant::now(), loader.statistics());
    while start.elapsed() < MEASURE_TIME {
        loader.next_batch(&mut batch)?;
    }
    Ok((loader.statistics() - before, start.elapsed().as_secs_f64()))
}

/// An endless sequence of groups of consecutive blocks.
fn groups(blocks: &[u32], random: &mut Random) -> impl Iterator<Item = u32> {
    std::iter::repeat_with(|| random.below(blocks.len())).flat_map(|first| {
        let group = &blocks[first..];
        group.iter().take(GROUP_BLOCKS as usize).copied()
    })
}

/// What was read during the measurement, and decoded in total.
struct Timed {
    bytes: u64,
    decoded_bytes: u64,
    decoding_ns: u64,
}

/// A thread's view of a measurement. It counts only reads that end after the warm-up and before the
/// time is up, when all threads have as many reads in flight as a loader.
struct Trial {
    start: Instant,
    bytes: Cell<u64>,
}

impl Trial {
    /// Whether to start another read.
    fn is_on(&self) -> bool {
        self.start.elapsed() < WARM_UP_TIME + MEASURE_TIME
    }

    /// Called when a read of this many bytes has ended.
    fn count(&self, bytes: u64) {
        if self.is_on() && self.start.elapsed() >= WARM_UP_TIME {
            self.bytes.set(self.bytes.get() + bytes);
        }
    }
}

/// Runs `work` on as many threads as a loader has until the time is up, and returns the totals.
fn timed(
    set: &RecordSet,
    memory: &Memory,
    work: impl Fn(&mut Random, &Trial, &mut Reader) -> Result<(), DataError> + Sync,
) -> Result<Timed, DataError> {
    let buffers = Arc::new(Buffers::new(set.block_bytes_max()));
    let sums: [AtomicU64; 3] = Default::default();
    let start = Instant::now();
    let one = |number: usize| -> Result<(), DataError> {
        let mut reader = Reader::new(set, &buffers, memory.in_flight);
        let trial = Trial { start, bytes: Cell::default() };
        work(&mut Random(number as u64), &trial, &mut reader)?;
        let done = |count| reader.counters.get(count);
        let values = [trial.bytes.get(), done(Count::DecodedBytes), done(Count::DecodingNs)];
        for (sum, value) in sums.iter().zip(values) {
            sum.fetch_add(value, Ordering::Relaxed);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let one = &one;
        let spawn =
            |number| std::thread::Builder::new().spawn_scoped(scope, move || one(number)).ok();
        let others: Vec<_> = (1..memory.workers).map_while(spawn).collect();
        let mut result = one(0);
        for thread in others {
            let other = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(other);
        }
        result
    })?;
    let [bytes, decoded_bytes, decoding_ns] = sums.map(AtomicU64::into_inner);
    Ok(Timed { bytes, decoded_bytes, decoding_ns })
}
