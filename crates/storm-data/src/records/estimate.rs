//! How fast a dataset of records can be read, where that ends, and what it takes: measured rates and a computation.

use super::loader::{Load, Memory, RecordLoaderOptions, data_ram_to_hold};
use super::order::{GROUP_BLOCKS, Order};
use super::read::Buffers;
use super::set::{Reader, RecordSet};
use crate::DataError;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use storm_graph::random::Random;
use storm_host::show_bytes;

/// How long each rate is measured.
const MEASURE_TIME: Duration = Duration::from_millis(600);
/// How long the same is done before that: the first reads also fault in the buffers of all threads.
const WARM_UP_TIME: Duration = Duration::from_millis(150);
/// Batches on the device: one that is used and one that arrives.
const DEVICE_BATCHES: u64 = 2;
/// The stages from disk to a batch.
const READING: &str = "reading";
const DECODING: &str = "decoding";

/// What this machine does with a dataset, measured with as many threads as a loader has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordRates {
    /// Bytes from disk per second, in groups of blocks, with checksums and decompression.
    pub sequential_bytes_per_second: f64,
    /// Single records, or blocks where they are compressed, per second.
    pub random_reads_per_second: f64,
    /// Bytes of records per second that one thread checks and decompresses.
    pub decoding_bytes_per_second: f64,
}

impl RecordRates {
    /// Reads parts of the dataset for a second and a half.
    ///
    /// # Errors
    /// If a block cannot be read or is damaged.
    pub fn measure(
        set: &RecordSet,
        options: &RecordLoaderOptions,
    ) -> Result<RecordRates, DataError> {
        let blocks = set.nonempty_blocks_of(options.part)?;
        // More blocks than fit: what fits is not read again.
        let load = Load::records(set, u64::MAX);
        let memory = |order| Memory::new(set, &load, &RecordLoaderOptions { order, ..*options });
        let given = memory(options.order)?;
        let long = timed(set, &memory(Order::Window).unwrap_or(given), |random, trial, reader| {
            let groups = groups(&blocks, random).take_while(|_| trial.is_on());
            let reads = groups.map(|block| (block, set.block(block).disk_bytes()));
            set.load_each(reads, reader, |bytes, loaded| {
                trial.count(bytes);
                loaded.map(drop)
            })
        })?;
        let single = set.has_single_records();
        let short =
            timed(set, &memory(Order::Global).unwrap_or(given), |random, trial, reader| {
                let mut of_records = Random(random.bits());
                let any = std::iter::repeat_with(|| blocks[random.below(blocks.len())]);
                let reads = any.take_while(|_| trial.is_on());
                match single {
                    false => set.load_each(reads.map(|block| (block, ())), reader, |(), loaded| {
                        trial.count(0);
                        loaded.map(drop)
                    }),
                    true => {
                        let record = |block| {
                            let records = set.block(block).records() as usize;
                            (block, of_records.below(records) as u32, ())
                        };
                        set.load_each_record(reads.map(record), reader, |(), _| {
                            trial.count(0);
                            Ok(())
                        })
                    }
                }
            })?;
        let seconds = MEASURE_TIME.as_secs_f64();
        Ok(RecordRates {
            sequential_bytes_per_second: long.bytes as f64 / seconds,
            random_reads_per_second: short.reads as f64 / seconds,
            decoding_bytes_per_second: 1e9 * long.decoded_bytes as f64
                / long.decoding_ns.max(1) as f64,
        })
    }
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
    reads: u64,
    bytes: u64,
    decoded_bytes: u64,
    decoding_ns: u64,
}

/// A thread's view of a measurement. It counts only what ends between the warm-up and the end of the time, when all
/// threads have as many reads in flight as a loader.
struct Trial {
    start: Instant,
    reads: Cell<u64>,
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
            self.reads.set(self.reads.get() + 1);
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
    let sums: [AtomicU64; 4] = Default::default();
    let start = Instant::now();
    let one = |number: usize| -> Result<(), DataError> {
        let mut reader = Reader::new(set, &buffers, memory.in_flight);
        let trial = Trial { start, reads: Cell::default(), bytes: Cell::default() };
        work(&mut Random(number as u64), &trial, &mut reader)?;
        let done = reader.statistics;
        let values = [trial.reads.get(), trial.bytes.get(), done.decoded_bytes, done.decoding_ns];
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
    let [reads, bytes, decoded_bytes, decoding_ns] = sums.map(AtomicU64::into_inner);
    Ok(Timed { reads, bytes, decoded_bytes, decoding_ns })
}

/// What a run is to do with the records.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordDemand {
    /// Records of an epoch: those of the dataset, or of a larger one like it.
    pub records: u64,
    /// Records per second that the model takes, if that is known.
    pub rate: Option<f64>,
    /// Bytes per second that go to the device, if that is known.
    pub bus_bytes_per_second: Option<f64>,
}

/// A part of the way from disk to model.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordStage {
    /// Its name.
    pub name: &'static str,
    /// Records per second.
    pub rate: f64,
}

impl RecordStage {
    /// Whether it belongs to the way from disk to a batch.
    pub fn is_loading(&self) -> bool {
        [READING, DECODING].contains(&self.name)
    }
}

/// What to expect.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordEstimate {
    /// Bytes of the dataset on disk.
    pub disk_bytes: u64,
    /// Bytes of blocks in memory, at most.
    pub block_bytes: u64,
    /// Bytes of batches that are prepared ahead.
    pub ahead_bytes: u64,
    /// Bytes on the device: two batches.
    pub device_bytes: u64,
    /// All of the part stays in memory after the first epoch.
    pub is_resident: bool,
    /// The parts of the way, the slowest first.
    pub stages: Vec<RecordStage>,
    /// Seconds of an epoch.
    pub epoch_seconds: f64,
    /// What would help.
    pub advice: Vec<String>,
}

/// Computes what to expect of a loader with these options on a dataset like `set`.
///
/// # Errors
/// If `data_ram` is too small.
pub fn estimate_records(
    set: &RecordSet,
    options: &RecordLoaderOptions,
    rates: &RecordRates,
    demand: &RecordDemand,
) -> Result<RecordEstimate, DataError> {
    let counts = &set.manifest().counts;
    let raw = counts.raw_bytes as f64 / counts.records.max(1) as f64;
    let stored = counts.stored_bytes as f64 / counts.records.max(1) as f64;
    let blocks = set.nonempty_blocks_of(options.part)?.len();
    let scale = demand.records as f64 / set.records(options.part).max(1) as f64;
    let blocks = (blocks as f64 * scale).ceil() as u64;
    let memory = Memory::new(set, &Load::records(set, blocks), options)?;
    let mut stages = Vec::new();
    // What fits is read once, in the first epoch.
    if !memory.fits {
        let threads = memory.workers as f64;
        let (reading, decoded) = match options.order {
            // A record costs a read, or a block where blocks are compressed, unless that block is still in memory.
            Order::Global => {
                let read = 1.0 - memory.share_in_memory(set, blocks);
                let decoded = match set.has_single_records() {
                    true => raw,
                    false => read * raw * demand.records as f64 / blocks.max(1) as f64,
                };
                (rates.random_reads_per_second / read, decoded)
            }
            Order::Window | Order::Sequential => (rates.sequential_bytes_per_second / stored, raw),
        };
        stages.push(RecordStage { name: READING, rate: reading });
        let decoding = rates.decoding_bytes_per_second * threads / decoded;
        stages.push(RecordStage { name: DECODING, rate: decoding });
    }
    if let Some(bus) = demand.bus_bytes_per_second {
        stages.push(RecordStage { name: "copies to the device", rate: bus / raw });
    }
    if let Some(rate) = demand.rate {
        stages.push(RecordStage { name: "model", rate });
    }
    stages.sort_by(|one, other| one.rate.total_cmp(&other.rate));
    let slowest = stages.first().map_or(f64::INFINITY, |stage| stage.rate);
    let advice = advice(&stages, options.order, data_ram_to_hold(set, blocks));
    let batch_bytes = (raw * options.batch as f64) as u64;
    Ok(RecordEstimate {
        disk_bytes: (stored * demand.records as f64) as u64,
        block_bytes: memory.block_bytes,
        ahead_bytes: memory.ahead_bytes,
        device_bytes: DEVICE_BATCHES * batch_bytes,
        is_resident: memory.fits,
        stages,
        epoch_seconds: demand.records as f64 / slowest,
        advice,
    })
}

fn advice(stages: &[RecordStage], order: Order, enough: u64) -> Vec<String> {
    if !stages.first().is_some_and(RecordStage::is_loading) {
        return Vec::new();
    }
    // Shown with two decimals.
    let enough = show_bytes(enough + enough / 100);
    let fits = format!("give it a data-ram of {enough}: all of it then stays in memory");
    let other = match order {
        Order::Global => "use the window order, whose reads are long",
        Order::Window | Order::Sequential => {
            "use more threads or a faster disk, or another codec if `inspect` says that blocks shrink"
        }
    };
    vec![other.to_owned(), fits]
}
