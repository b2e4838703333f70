//! Predicts the performance of a loader: the rate of each stage from disk to model, the bottleneck,
//! and the memory needed.

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

/// Batches on the device: one in use and one arriving.
const DEVICE_BATCHES: u64 = 2;
/// The stages from disk to a batch.
const READING: &str = "reading";
const DECODING: &str = "decoding";

/// The load of a run, in rows: records, or rows of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordDemand {
    /// Rows of an epoch, of this dataset or of a larger one like it.
    pub records: u64,
    /// Rows per second that the model consumes, if known.
    pub rate: Option<f64>,
    /// Transfer rate to the device in bytes per second, if known.
    pub bus_bytes_per_second: Option<f64>,
}

/// A stage from disk to model.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordStage {
    /// Its name.
    pub name: &'static str,
    /// Rows per second.
    pub rate: f64,
}

impl RecordStage {
    /// Whether it is one of the stages from disk to a batch.
    pub fn is_loading(&self) -> bool {
        [READING, DECODING].contains(&self.name)
    }
}

/// The predicted performance of a loader.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordEstimate {
    /// Bytes of the dataset on disk.
    pub disk_bytes: u64,
    /// Maximum bytes of blocks in memory.
    pub block_bytes: u64,
    /// Batches prepared ahead: as many as the model uses while one is read and decoded.
    pub ahead: usize,
    /// Bytes of the batches prepared ahead.
    pub ahead_bytes: u64,
    /// Bytes on the device: two batches.
    pub device_bytes: u64,
    /// Whether the whole part stays in memory after the first epoch.
    pub is_resident: bool,
    /// Fraction of wanted blocks that are already in memory. 0 unless the order is global.
    pub found_share: f64,
    /// Reader threads.
    pub workers: usize,
    /// Queue depth of each thread.
    pub in_flight: usize,
    /// The stages, slowest first.
    pub stages: Vec<RecordStage>,
    /// Seconds per epoch.
    pub epoch_seconds: f64,
    /// How to make it faster.
    pub advice: Vec<String>,
}

/// Predicts the performance of a loader for a dataset and options.
#[derive(Debug)]
pub struct Estimator {
    set: Arc<RecordSet>,
    options: RecordLoaderOptions,
    content: Content,
}

impl Estimator {
    /// For records.
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

    /// For rows of tokens, whose stream is in `set`.
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

    /// The read method in use.
    pub fn reading_path(&self) -> ReadingPath {
        self.set.reading_path()
    }

    /// Whether all of it stays in memory once read.
    ///
    /// # Errors
    /// If `data_ram` is too small.
    pub fn is_resident(&self) -> Result<bool, DataError> {
        Ok(Memory::new(&self.set, &self.content.load, &self.options)?.fits)
    }

    /// Measures reading for about a second and a half, and longer where compressed blocks fill
    /// `data_ram` slowly. Uses as much memory as the loader.
    ///
    /// # Errors
    /// If a block cannot be read or is damaged.
    pub fn measure(&self) -> Result<RecordRates, DataError> {
        RecordRates::measure(&self.set, &self.content, &self.options)
    }

    /// Predicts the performance on this dataset, or on a larger one like it.
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
        // What fits in memory is read only once, in the first epoch.
        if !memory.fits {
            let threads = memory.workers as f64;
            let (reading, decoded) = match options.order {
                // A row takes reads of records, or of whole blocks if compressed, unless they are
                // still in memory.
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
        // All threads assemble batches at once.
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

/// Average sizes in bytes.
struct Form {
    /// A row's share of the blocks, on disk and after decompression.
    stored: f64,
    raw: f64,
    /// A block and a record, after decompression.
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
    // Rounded up, because only two decimals are shown.
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
