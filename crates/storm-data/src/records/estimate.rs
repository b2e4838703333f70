//! What to expect of a loader: how fast each stage from disk to model is, where that ends, and what it takes.

use super::loader::{
    Content, Memory, RecordLoaderOptions, TokenRows, batches_ahead, data_ram_to_hold,
};
use super::order::Order;
use super::rates::RecordRates;
use super::reading::ReadingPath;
use super::set::{BlockPlace, RecordSet};
use crate::DataError;
use std::sync::Arc;
use std::time::Duration;
use storm_host::show_bytes;

/// Batches on the device: one that is used and one that arrives.
const DEVICE_BATCHES: u64 = 2;
/// The stages from disk to a batch.
const READING: &str = "reading";
const DECODING: &str = "decoding";

/// What a run is to do with the rows: records, or rows of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordDemand {
    /// Rows of an epoch: those of the dataset, or of a larger one like it.
    pub records: u64,
    /// Rows per second that the model takes, if that is known.
    pub rate: Option<f64>,
    /// Bytes per second that go to the device, if that is known.
    pub bus_bytes_per_second: Option<f64>,
}

/// A part of the way from disk to model.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordStage {
    /// Its name.
    pub name: &'static str,
    /// Rows per second.
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
    /// Batches that are prepared ahead: those that the model uses while one is read and decoded.
    pub ahead: usize,
    /// Bytes of them.
    pub ahead_bytes: u64,
    /// Bytes on the device: two batches.
    pub device_bytes: u64,
    /// All of the part stays in memory after the first epoch.
    pub is_resident: bool,
    /// The share of wanted blocks that are in memory already, where each record's block is wanted by itself.
    pub found_share: f64,
    /// Threads that read, and the most reads that each has in flight.
    pub workers: usize,
    /// See `workers`.
    pub in_flight: usize,
    /// The parts of the way, the slowest first.
    pub stages: Vec<RecordStage>,
    /// Seconds of an epoch.
    pub epoch_seconds: f64,
    /// What would help.
    pub advice: Vec<String>,
}

/// A dataset as a loader with some options would go through it.
#[derive(Debug)]
pub struct Estimator {
    set: Arc<RecordSet>,
    options: RecordLoaderOptions,
    content: Content,
}

impl Estimator {
    /// Of records.
    ///
    /// # Errors
    /// If the part is empty, or an option is out of range.
    pub fn of_records(
        set: Arc<RecordSet>,
        options: RecordLoaderOptions,
    ) -> Result<Estimator, DataError> {
        options.check()?;
        let content = Content::records(&set, options.part)?;
        Ok(Estimator { set, options, content })
    }

    /// Of rows of tokens, whose stream is in `set`.
    pub(crate) fn of_tokens(
        set: Arc<RecordSet>,
        options: RecordLoaderOptions,
        rows: TokenRows,
    ) -> Result<Estimator, DataError> {
        options.check()?;
        let content = Content::tokens(&set, rows);
        Ok(Estimator { set, options, content })
    }

    /// Rows of an epoch.
    pub fn rows(&self) -> u64 {
        self.content.part.rows
    }

    /// How it is read.
    pub fn reading_path(&self) -> ReadingPath {
        self.set.reading_path()
    }

    /// Whether all of it stays in memory once it was read.
    ///
    /// # Errors
    /// If `data_ram` is too small.
    pub fn is_resident(&self) -> Result<bool, DataError> {
        Ok(Memory::new(&self.set, &self.content.load, &self.options)?.fits)
    }

    /// Reads parts of it for a second and a half, and longer where compressed blocks fill `data_ram` slowly. This takes as
    /// much memory as the loader.
    ///
    /// # Errors
    /// If a block cannot be read or is damaged.
    pub fn measure(&self) -> Result<RecordRates, DataError> {
        RecordRates::measure(&self.set, &self.content, &self.options)
    }

    /// Computes what to expect of the loader on this dataset, or on a longer one like it.
    ///
    /// # Errors
    /// If `data_ram` is too small.
    pub fn estimate(
        &self,
        rates: &RecordRates,
        demand: &RecordDemand,
    ) -> Result<RecordEstimate, DataError> {
        let Estimator { set, options, content } = self;
        let form = Form::of(set, content);
        let scale = demand.records as f64 / self.rows().max(1) as f64;
        let blocks = (content.part.blocks.len() as f64 * scale).ceil() as u64;
        let mut load = content.load;
        load.blocks = blocks;
        let memory = Memory::new(set, &load, options)?;
        let found_share = match options.order {
            Order::Global => memory.share_in_memory(set, blocks),
            Order::Window | Order::Sequential => 0.0,
        };
        let mut stages = Vec::new();
        // What fits is read once, in the first epoch.
        if !memory.fits {
            let threads = memory.workers as f64;
            let (reading, decoded) = match options.order {
                // A row costs reads of records, or of blocks where blocks are compressed, unless these are still in memory.
                Order::Global => {
                    let reads = rates.reads_per_row * (1.0 - found_share);
                    let decoded = match set.has_single_records() {
                        true => form.record_bytes,
                        false => form.block_bytes,
                    };
                    (rates.random_reads_per_second / reads, reads * decoded)
                }
                Order::Window | Order::Sequential => {
                    (rates.sequential_bytes_per_second / form.stored, form.raw)
                }
            };
            stages.push(RecordStage { name: READING, rate: reading });
            let decoding = rates.decoding_bytes_per_second * threads / decoded;
            stages.push(RecordStage { name: DECODING, rate: decoding });
        }
        let row_bytes = content.load.row_bytes() as f64;
        if let Some(bus) = demand.bus_bytes_per_second {
            stages.push(RecordStage { name: "copies to the device", rate: bus / row_bytes });
        }
        if let Some(rate) = demand.rate {
            stages.push(RecordStage { name: "model", rate });
        }
        stages.sort_by(|one, other| one.rate.total_cmp(&other.rate));
        let slowest = stages.first().map_or(f64::INFINITY, |stage| stage.rate);
        let advice = advice(&stages, options.order, data_ram_to_hold(set, blocks));
        let batch_bytes = (row_bytes * options.batch as f64) as u64;
        let loading = stages.iter().filter(|stage| stage.is_loading()).map(|stage| stage.rate);
        let loading = loading.fold(f64::INFINITY, f64::min);
        let used = stages.iter().filter(|stage| !stage.is_loading()).map(|stage| stage.rate);
        let used = used.fold(f64::INFINITY, f64::min);
        let seconds = |rate: f64| {
            let seconds = options.batch as f64 / rate;
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
        };
        // All threads make batches at once.
        let making = seconds(loading / memory.workers as f64);
        let ahead = batches_ahead(making, seconds(used), memory.depth_max);
        Ok(RecordEstimate {
            disk_bytes: (form.stored * demand.records as f64) as u64,
            block_bytes: memory.block_bytes,
            ahead,
            ahead_bytes: (ahead as u64).saturating_mul(batch_bytes),
            device_bytes: DEVICE_BATCHES * batch_bytes,
            is_resident: memory.fits,
            found_share,
            workers: memory.workers,
            in_flight: memory.in_flight,
            stages,
            epoch_seconds: demand.records as f64 / slowest,
            advice,
        })
    }
}

/// Bytes of what rows lie in.
struct Form {
    /// Of a row's share of the blocks, on disk and after decompression.
    stored: f64,
    raw: f64,
    /// Of a block and of a record, after decompression.
    block_bytes: f64,
    record_bytes: f64,
}

impl Form {
    fn of(set: &RecordSet, content: &Content) -> Form {
        let blocks = || content.part.blocks.iter().map(|&block| set.block(block));
        let sum = |of: fn(&BlockPlace) -> u64| blocks().map(of).sum::<u64>() as f64;
        let (stored, raw) = (sum(BlockPlace::disk_bytes), sum(BlockPlace::raw_bytes));
        let records = sum(|block| block.records().into());
        let rows = content.part.rows.max(1) as f64;
        Form {
            stored: stored / rows,
            raw: raw / rows,
            block_bytes: raw / content.part.blocks.len().max(1) as f64,
            record_bytes: raw / records.max(1.0),
        }
    }
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
