//! How many pictures a second a trainer takes from disk and from memory, in turns.

use crate::bench::Benched;
use crate::train::loader_threads;
use crate::{UsageError, progress, size};
use anyhow::{Context, Result};
use std::sync::Arc;
use std::time::Instant;
use storm_data::Split;
use storm_data::records::{
    LoaderStatistics, Order, ReadingPath, RecordDemand, RecordLoaderOptions, RecordRates,
    RecordSet, estimate_records,
};
use storm_train::{AnyBatch, BatchSource, RecordSource, Trainer};

/// Turns of each kind. The median counts.
const TURNS: usize = 3;
/// Steps before the clock starts.
const WARM_UP_STEPS: usize = 3;
/// Small, so that random labels do no harm.
const LEARNING_RATE: f32 = 1e-3;

/// The same set from disk and from memory.
pub(super) struct Sources<'a> {
    set: &'a Arc<RecordSet>,
    options: RecordLoaderOptions,
    disk: RecordSource,
    memory: RecordSource,
}

/// What was measured in window order.
pub(super) struct Rates {
    /// Pictures per second.
    pub(super) disk: f64,
    pub(super) memory: f64,
    /// What the process held of the device after these steps.
    pub(super) disk_device_bytes: u64,
    pub(super) memory_device_bytes: u64,
    pub(super) reading_path: ReadingPath,
    /// Bytes of the set in the page cache afterwards.
    pub(super) cached_bytes: u64,
    /// Batches that were not ready, of how many.
    pub(super) stalls: u64,
    pub(super) batches: u64,
}

impl Rates {
    /// By how much disk is slower, as a share.
    pub(super) fn slowdown(&self) -> f64 {
        1.0 - self.disk / self.memory
    }
}

/// What was measured in global order.
pub(super) struct Global {
    pub(super) measured: f64,
    pub(super) expected: f64,
    pub(super) is_disk_slowest: bool,
    pub(super) slowest: String,
}

struct Turn {
    images_per_second: f64,
    device_bytes: u64,
}

impl<'a> Sources<'a> {
    pub(super) fn new(set: &'a Arc<RecordSet>, batch: usize, data_ram: u64) -> Result<Sources<'a>> {
        let workers = loader_threads();
        let options =
            RecordLoaderOptions { workers, ..RecordLoaderOptions::training(batch, 0, data_ram) };
        let source = |options| RecordSource::new(Arc::clone(set), options);
        let all = set.data_ram_to_hold(Split::Train);
        if all <= data_ram {
            let problem =
                "the set fits into --data-ram, so nothing would be read; give a larger --data-size";
            return Err(UsageError(problem.to_owned()).into());
        }
        let memory = source(RecordLoaderOptions { data_ram: all, ..options })?;
        let show = |done: u64, total: u64| {
            progress::show(&format!("reading into memory, {} %", 100 * done / total.max(1)));
        };
        let is_whole = memory.loader().preload(&show)?;
        anyhow::ensure!(is_whole, "{} do not hold the set", size::show(all));
        Ok(Sources { set, options, disk: source(options)?, memory })
    }

    /// Window order, from disk and from memory in turns.
    pub(super) fn measure<D: Benched>(
        &mut self,
        trainer: &mut Trainer<D>,
        seconds: f64,
    ) -> Result<Rates> {
        let before = self.disk.loader().statistics();
        let (mut disk, mut memory) = (Vec::new(), Vec::new());
        for number in 0..TURNS {
            progress::show(&format!("training from memory and from disk, turn {}", number + 1));
            memory.push(turn(trainer, &mut self.memory, seconds)?);
            self.set.drop_page_cache()?;
            disk.push(turn(trainer, &mut self.disk, seconds)?);
        }
        let after = self.disk.loader().statistics();
        let most = |turns: &[Turn]| turns.iter().map(|turn| turn.device_bytes).max().unwrap_or(0);
        let LoaderStatistics { stalls, batches, .. } = after;
        Ok(Rates {
            disk_device_bytes: most(&disk),
            memory_device_bytes: most(&memory),
            disk: median(disk),
            memory: median(memory),
            reading_path: self.set.reading_path(),
            cached_bytes: self.set.cached_bytes()?,
            stalls: stalls - before.stalls,
            batches: batches - before.batches,
        })
    }

    /// Global order from disk, beside what the estimate says.
    pub(super) fn measure_global<D: Benched>(
        &self,
        trainer: &mut Trainer<D>,
        rates: &Rates,
        bus_bytes_per_second: f64,
        seconds: f64,
    ) -> Result<Global> {
        progress::show("measuring the disk");
        let options = RecordLoaderOptions { order: Order::Global, ..self.options };
        let demand = RecordDemand {
            records: self.set.records(Split::Train),
            rate: Some(rates.memory),
            bus_bytes_per_second: Some(bus_bytes_per_second),
        };
        let disk = RecordRates::measure(self.set, &options)?;
        let estimate = estimate_records(self.set, &options, &disk, &demand)?;
        let slowest = estimate.stages.first().context("there is a stage")?;
        progress::show("training from disk in global order");
        let mut source = RecordSource::new(Arc::clone(self.set), options)?;
        let turns: Result<Vec<Turn>> =
            (0..TURNS).map(|_| turn(trainer, &mut source, seconds)).collect();
        Ok(Global {
            measured: median(turns?),
            expected: slowest.rate,
            is_disk_slowest: slowest.is_reading(),
            slowest: slowest.name.to_owned(),
        })
    }
}

fn median(mut turns: Vec<Turn>) -> f64 {
    turns.sort_by(|one, other| one.images_per_second.total_cmp(&other.images_per_second));
    turns[turns.len() / 2].images_per_second
}

/// Trains for so many seconds.
fn turn<D: Benched>(
    trainer: &mut Trainer<D>,
    source: &mut RecordSource,
    seconds: f64,
) -> Result<Turn> {
    let mut batches = [AnyBatch::default()];
    let mut step = |trainer: &mut Trainer<D>| -> Result<usize> {
        let rows = source.next_batch(&mut batches[0])?;
        trainer.step(&batches, LEARNING_RATE)?;
        Ok(rows)
    };
    for _ in 0..WARM_UP_STEPS {
        step(trainer)?;
    }
    trainer.synchronize()?;
    let start = Instant::now();
    let mut images = 0;
    while start.elapsed().as_secs_f64() < seconds {
        images += step(trainer)?;
    }
    trainer.synchronize()?;
    Ok(Turn {
        images_per_second: images as f64 / start.elapsed().as_secs_f64(),
        device_bytes: trainer.device().vram_bytes()?,
    })
}
