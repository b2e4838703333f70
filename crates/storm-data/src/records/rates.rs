//! How fast this machine reads a dataset, measured for about a second.

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
/// How long the same is done before that: the first reads also fault in the buffers of all threads.
const WARM_UP_TIME: Duration = Duration::from_millis(150);
/// The longest that memory is filled before reads are counted.
const FILL_TIME_MAX: Duration = Duration::from_secs(2);

/// What this machine does with a dataset, measured with as many threads as a loader has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordRates {
    /// Bytes from disk per second, in groups of blocks, with checksums and decompression.
    pub sequential_bytes_per_second: f64,
    /// Single records, or blocks where they are compressed, per second, with checksums and decompression.
    pub random_reads_per_second: f64,
    /// Such reads for each row in global order, if nothing is in memory already.
    pub reads_per_row: f64,
    /// Bytes of records per second that one thread checks and decompresses, in the order of the loader.
    pub decoding_bytes_per_second: f64,
}

impl RecordRates {
    /// A disk that is not asked for anything.
    pub const UNLIMITED: RecordRates = RecordRates {
        sequential_bytes_per_second: f64::INFINITY,
        random_reads_per_second: f64::INFINITY,
        reads_per_row: 1.0,
        decoding_bytes_per_second: f64::INFINITY,
    };

    /// Reads parts of a dataset for a second and a half, and longer where compressed blocks fill `data_ram` slowly.
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
            // What is found was begun for a neighbour.
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
    // More blocks than fit: what fits is not read again.
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

/// Lets a loader work as in a run, and says what it did in how many seconds. Blocks are counted once memory is as full as in
/// a run: until then, their buffers are new to the system and to the processor's caches.
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

/// Groups of neighbouring blocks without end.
fn groups(blocks: &[u32], random: &mut Random) -> impl Iterator<Item = u32> {
    std::iter::repeat_with(|| random.below(blocks.len())).flat_map(|first| {
        let group = &blocks[first..];
        group.iter().take(GROUP_BLOCKS as usize).copied()
    })
}

/// What was read while the clock ran, and what was decoded in all.
struct Timed {
    bytes: u64,
    decoded_bytes: u64,
    decoding_ns: u64,
}

/// A thread's view of a measurement. It counts only what ends between the warm-up and the end of the time, when all
/// threads have as many reads in flight as a loader.
struct Trial {
    start: Instant,
    bytes: Cell<u64>,
}

impl Trial {
    /// Whether another read should begin.
    fn is_on(&self) -> bool {
        self.start.elapsed() < WARM_UP_TIME + MEASURE_TIME
    }

    /// A read of so many bytes has ended.
    fn count(&self, bytes: u64) {
        if self.is_on() && self.start.elapsed() >= WARM_UP_TIME {
            self.bytes.set(self.bytes.get() + bytes);
        }
    }
}

/// Does the same on all threads of a loader as long as it is told to go on, and says how much that was.
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
            result = result.and(thread.join().unwrap_or(Ok(())));
        }
        result
    })?;
    let [bytes, decoded_bytes, decoding_ns] = sums.map(AtomicU64::into_inner);
    Ok(Timed { bytes, decoded_bytes, decoding_ns })
}
