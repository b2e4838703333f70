//! How many pictures or tokens per second a trainer takes from disk and from memory, in turns.

use super::stock::{BatchSize, Stock};
use crate::bench::Benched;
use crate::progress;
use crate::train::loader_threads;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::time::Instant;
use storm_data::Split;
use storm_data::records::{
    Estimator, LoaderStatistics, Order, ReadingPath, RecordDemand, RecordEstimate,
    RecordLoaderOptions, RecordRates, RecordSet,
};
use storm_train::{BatchSource, NextStep, RecordSource, Trainer};

/// Turns of each kind. The median counts.
const TURNS: usize = 3;
/// Steps before the clock starts.
const WARM_UP_STEPS: usize = 3;
/// Seconds of training in global order before the clock starts.
const FILL_SECONDS: f64 = 1.5;
/// Small, so that random labels do no harm.
const LEARNING_RATE: f32 = 1e-3;

/// The same set from disk and from memory.
pub(super) struct Sources<'a> {
    blocks: &'a Arc<RecordSet>,
    /// `None` while a trainer has it.
    disk: Option<Box<dyn BatchSource>>,
    memory: Option<Box<dyn BatchSource>>,
}

/// What was measured in one order.
pub(super) struct Rates {
    /// Pictures or tokens per second.
    pub(super) disk: f64,
    pub(super) memory: f64,
    /// Device memory that the process held after these steps.
    pub(super) disk_device_bytes: u64,
    pub(super) memory_device_bytes: u64,
    pub(super) reading_path: ReadingPath,
    /// Bytes of the set in the page cache afterwards.
    pub(super) cached_bytes: u64,
    /// Batches that were not ready, and all batches.
    pub(super) stalls: u64,
    pub(super) batches: u64,
}

impl Rates {
    /// How much slower disk is than memory, as a share.
    pub(super) fn slowdown(&self) -> f64 {
        1.0 - self.disk / self.memory
    }
}

/// What was measured in global order.
pub(super) struct Global {
    pub(super) measured: f64,
    pub(super) expected: f64,
    /// From disk rates that were measured before that turn.
    pub(super) estimate: RecordEstimate,
    pub(super) rates: RecordRates,
    /// Totals of all turns.
    pub(super) done: LoaderStatistics,
    pub(super) records: u64,
}

struct Turn {
    per_second: f64,
    device_bytes: u64,
}

impl<'a> Sources<'a> {
    pub(super) fn new(
        stock: &'a Stock,
        order: Order,
        batch: BatchSize,
        data_ram: u64,
    ) -> Result<Sources<'a>> {
        let memory = Some(stock.memory(order, batch, data_ram)?);
        let disk = Some(stock.disk(order, batch, data_ram)?);
        Ok(Sources { blocks: stock.blocks()?, disk, memory })
    }

    /// Measures training from disk and from memory in turns.
    pub(super) fn measure<D: Benched>(
        &mut self,
        trainer: &mut Trainer<D>,
        seconds: f64,
    ) -> Result<Rates> {
        let before = statistics(self.disk.as_deref());
        let (mut disk, mut memory) = (Vec::new(), Vec::new());
        for number in 0..TURNS {
            progress::show(&format!("training from memory and from disk, turn {}", number + 1));
            memory.push(turn(trainer, &mut self.memory, seconds)?);
            self.blocks.drop_page_cache()?;
            disk.push(turn(trainer, &mut self.disk, seconds)?);
        }
        let after = statistics(self.disk.as_deref());
        let most = |turns: &[Turn]| turns.iter().map(|turn| turn.device_bytes).max().unwrap_or(0);
        let LoaderStatistics { stalls, batches, .. } = after;
        Ok(Rates {
            disk_device_bytes: most(&disk),
            memory_device_bytes: most(&memory),
            disk: median(disk),
            memory: median(memory),
            reading_path: self.blocks.reading_path(),
            cached_bytes: self.blocks.cached_bytes()?,
            stalls: stalls - before.stalls,
            batches: batches - before.batches,
        })
    }
}

fn statistics(source: Option<&dyn BatchSource>) -> LoaderStatistics {
    source.and_then(BatchSource::statistics).unwrap_or_default()
}

/// Trains on pictures in global order from disk, and compares the rate with the estimate. The speed
/// of a shared disk varies, and drops right after a large file was written to it. So the disk is
/// measured before and after each turn, and a turn is compared with the mean of the two. The median
/// turn counts.
pub(super) fn measure_global<D: Benched>(
    set: &Arc<RecordSet>,
    options: RecordLoaderOptions,
    trainer: &mut Trainer<D>,
    rates: &Rates,
    bus_bytes_per_second: f64,
    seconds: f64,
) -> Result<Global> {
    let options =
        RecordLoaderOptions { order: Order::Global, workers: loader_threads(), ..options };
    let demand = RecordDemand {
        records: set.records(Split::Train),
        rate: Some(rates.memory),
        bus_bytes_per_second: Some(bus_bytes_per_second),
    };
    let estimator = Estimator::of_records(Arc::clone(set), options)?;
    let measure_disk = |number: usize| {
        progress::show(&format!("measuring the disk, {number} of {}", TURNS + 1));
        let disk = estimator.measure()?;
        let estimate = estimator.estimate(&disk, &demand)?;
        let slowest = estimate.stages.first().context("there is a stage")?.rate;
        anyhow::Ok((slowest, estimate, disk))
    };
    let (mut turns, mut done, mut position) = (Vec::new(), LoaderStatistics::default(), None);
    let mut before = measure_disk(1)?;
    for number in 1..=TURNS {
        progress::show(&format!("training from disk in global order, turn {number}"));
        // A source that existed while the disk was measured would have read ahead, and batches
        // would be ready.
        let mut fresh = RecordSource::new(Arc::clone(set), options)?;
        if let Some(position) = &position {
            fresh.resume(position)?;
        }
        let mut source: Option<Box<dyn BatchSource>> = Some(Box::new(fresh));
        fill(trainer, &mut source)?;
        let read = statistics(source.as_deref());
        let measured = turn(trainer, &mut source, seconds)?.per_second;
        done = done + (statistics(source.as_deref()) - read);
        position = source.map(|source| source.position());
        let after = measure_disk(number + 1)?;
        let expected = (before.0 + after.0) / 2.0;
        turns.push((measured, expected, std::mem::replace(&mut before, after)));
    }
    turns.sort_by(|one, other| (one.0 / one.1).total_cmp(&(other.0 / other.1)));
    let (measured, expected, (_, estimate, disk)) = turns.swap_remove(TURNS / 2);
    let records = done.batches * options.batch as u64;
    Ok(Global { measured, expected, estimate, rates: disk, done, records })
}

/// Trains until memory is as full as in a long run, and batches prepared before the first step are
/// used up.
fn fill<D: Benched>(
    trainer: &mut Trainer<D>,
    source: &mut Option<Box<dyn BatchSource>>,
) -> Result<()> {
    trainer.exchange_source(source.take())?;
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < FILL_SECONDS {
        trainer.step_from_source(LEARNING_RATE, NextStep::Follows)?;
    }
    trainer.step_from_source(LEARNING_RATE, NextStep::None)?;
    *source = trainer.exchange_source(None)?;
    Ok(())
}

fn median(mut turns: Vec<Turn>) -> f64 {
    turns.sort_by(|one, other| one.per_second.total_cmp(&other.per_second));
    turns[turns.len() / 2].per_second
}

/// Trains for `seconds`, as a run does: the plan reads the next step's data while a step computes.
fn turn<D: Benched>(
    trainer: &mut Trainer<D>,
    source: &mut Option<Box<dyn BatchSource>>,
    seconds: f64,
) -> Result<Turn> {
    trainer.exchange_source(source.take())?;
    for _ in 0..WARM_UP_STEPS {
        trainer.step_from_source(LEARNING_RATE, NextStep::Follows)?;
    }
    trainer.synchronize()?;
    let start = Instant::now();
    let mut units = 0;
    while start.elapsed().as_secs_f64() < seconds {
        units += trainer.step_from_source(LEARNING_RATE, NextStep::Follows)?.units();
    }
    trainer.synchronize()?;
    let per_second = units as f64 / start.elapsed().as_secs_f64();
    // Consumes what was read ahead, so that the source resumes after it and reads nothing twice.
    trainer.step_from_source(LEARNING_RATE, NextStep::None)?;
    *source = trainer.exchange_source(None)?;
    Ok(Turn { per_second, device_bytes: trainer.device().vram_bytes()? })
}
