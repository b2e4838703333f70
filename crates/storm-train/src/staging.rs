//! Staging buffers for a step's micro-batches, between their source and the inputs that a plan fetches.
//!
//! All data of a step must be present before it begins, because its loss is a mean over all targets. There is one slot
//! per micro-batch, and the slots form a ring over steps: once a micro-batch has been fetched, its successor in the
//! next step is read into the same slot while this step computes.

use crate::input_rules::{InputRules, Reading, sort_rows};
use crate::{AnyBatch, BatchSource, MicroBatch, RunError, TrainError, TrainOptions};
use serde_json::Value;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use storm_device::{DeviceError, PutInput, Supply, bytes_of};
use storm_plan::{Fetch, Plan};

/// The slots of a step, and the source that fills them, if there is one.
pub(crate) struct Staging {
    /// The data kept of each micro-batch.
    readings: Vec<Reading>,
    /// For each input of the plan: the index of its reading, and the micro-batch within a group. `None` for inputs that
    /// the host writes.
    inputs: Vec<Option<(usize, usize)>>,
    slots: Vec<Mutex<Slot>>,
    /// Number of micro-batches of the step fetched so far.
    fetched: AtomicUsize,
    /// Scratch space for orders that are computed on fetch.
    sorting: Mutex<Sorting>,
    reader: Mutex<Reader>,
}

/// The data of a micro-batch, by reading.
#[derive(Default)]
struct Slot {
    data: Vec<Vec<u8>>,
    /// Whether sorted orders are present. Otherwise they are computed on fetch.
    is_sorted: bool,
}

/// Scratch space for ids and their order.
struct Sorting {
    ids: Vec<i32>,
    order: Vec<i32>,
}

struct Reader {
    rules: InputRules,
    options: TrainOptions,
    source: Option<Box<dyn BatchSource>>,
    /// The buffer that the source fills.
    batch: AnyBatch,
    /// Scratch space for a sorted order.
    order: Vec<i32>,
    /// Number of micro-batches of the next step in their slots.
    filled: usize,
    /// Their targets that count, and their units for throughput.
    counted: usize,
    units: usize,
    /// Whether to read the next step during this one.
    reads_ahead: bool,
    /// The error that ended the data.
    failure: Option<RunError>,
    /// The source's position before the micro-batches that are in slots but not yet part of a step.
    consumed: Option<Value>,
    rate: Rate,
}

/// Reading statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rate {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

/// A step's data, all of it in slots.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepData {
    /// Number of targets that count.
    pub(crate) counted: usize,
    /// Units for throughput.
    pub(crate) units: usize,
    /// The source's position after it.
    pub(crate) position: Value,
}

impl Staging {
    /// For steps of a plan with this many micro-batches, whose program has these rules.
    pub(crate) fn new(
        plan: &Plan,
        rules: &InputRules,
        options: &TrainOptions,
        micro_batches: usize,
    ) -> Staging {
        let mut readings: Vec<Reading> = Vec::new();
        let mut number = |reading: Reading| {
            let known = readings.iter().position(|known| *known == reading);
            known.unwrap_or_else(|| {
                readings.push(reading);
                readings.len() - 1
            })
        };
        let inputs = plan.inputs.iter().map(|input| {
            let reading = rules.reading(&input.tensor.name)?;
            if let Reading::Order(name) = &reading {
                // Also keep the ids that the order is computed from.
                number(Reading::Entries(name.clone()));
            }
            Some((number(reading), usize::from(input.micro_batch?)))
        });
        let inputs = inputs.collect();
        let count = rules.count_max();
        Staging {
            sorting: Mutex::new(Sorting { ids: Vec::with_capacity(count), order: vec![0; count] }),
            readings,
            inputs,
            slots: (0..micro_batches).map(|_| Mutex::default()).collect(),
            fetched: AtomicUsize::new(0),
            reader: Mutex::new(Reader {
                order: vec![0; count],
                rules: rules.clone(),
                options: options.clone(),
                source: None,
                batch: AnyBatch::default(),
                filled: 0,
                counted: 0,
                units: 0,
                reads_ahead: false,
                failure: None,
                consumed: None,
                rate: Rate::default(),
            }),
        }
    }

    /// Copies the micro-batches of a step, already checked, into the slots. Returns data read ahead to the source. The
    /// step waits for this, so work that a fetch can do is left to it.
    pub(crate) fn put(&self, batches: &[impl MicroBatch]) {
        let mut reader = self.reader();
        reader.rewind();
        reader.reads_ahead = false;
        for (slot, batch) in self.slots.iter().zip(batches) {
            lock(slot).fill(&self.readings, batch, None);
        }
        self.fetched.store(0, Ordering::SeqCst);
    }

    /// Sets the data source, and returns the one before.
    pub(crate) fn set_source(
        &self,
        source: Option<Box<dyn BatchSource>>,
    ) -> Option<Box<dyn BatchSource>> {
        let mut reader = self.reader();
        reader.rewind();
        reader.failure = None;
        std::mem::replace(&mut reader.source, source)
    }

    /// Continues from a position.
    pub(crate) fn resume(&self, position: &Value) -> Result<(), RunError> {
        let mut reader = self.reader();
        reader.forget();
        reader.failure = None;
        reader.source.as_mut().map_or(Ok(()), |source| source.resume(position))
    }

    /// Runs a function on the source, which must leave its position unchanged.
    pub(crate) fn borrow_source<T>(
        &self,
        use_it: impl FnOnce(&mut dyn BatchSource) -> Result<T, RunError>,
    ) -> Option<Result<T, RunError>> {
        self.reader().source.as_mut().map(|source| use_it(&mut **source))
    }

    /// Makes sure that all data of a step is in its slots. With `reads_ahead`, reads the next step's data during this
    /// one. Nothing else may read at the same time.
    ///
    /// # Errors
    /// Data cannot be read.
    pub(crate) fn begin_step(&self, reads_ahead: bool) -> Result<StepData, RunError> {
        let mut reader = self.reader();
        self.read(&mut reader, self.slots.len());
        if let Some(failure) = reader.failure.take() {
            reader.forget();
            return Err(failure);
        }
        let (counted, units) = (reader.counted, reader.units);
        reader.forget();
        if counted == 0 {
            return Err(InputRules::nothing_counts(self.slots.len()).into());
        }
        reader.reads_ahead = reads_ahead;
        let position = reader.source.as_ref().map_or(Value::Null, |source| source.position());
        self.fetched.store(0, Ordering::SeqCst);
        Ok(StepData { counted, units, position })
    }

    /// Reading statistics so far.
    pub(crate) fn rate(&self) -> Rate {
        self.reader().rate
    }

    /// Reads until `wanted` micro-batches of the next step are in their slots.
    fn read(&self, reader: &mut Reader, wanted: usize) {
        if reader.filled == 0 && reader.consumed.is_none() {
            reader.consumed = reader.source.as_ref().map(|source| source.position());
        }
        let start = Instant::now();
        while reader.filled < wanted && reader.failure.is_none() {
            let mut slot = lock(&self.slots[reader.filled]);
            if let Err(failure) = reader.read_one(&self.readings, &mut slot) {
                reader.failure = Some(failure);
            }
        }
        reader.rate.seconds += start.elapsed().as_secs_f64();
    }

    fn reader(&self) -> MutexGuard<'_, Reader> {
        lock(&self.reader)
    }
}

impl Supply for Staging {
    fn fetch(&self, fetch: &Fetch, put: &mut PutInput<'_>) -> Result<(), DeviceError> {
        let first = self.fetched.load(Ordering::SeqCst);
        for &input in &fetch.inputs {
            let input = input as usize;
            let (reading, micro_batch) = self.inputs[input].ok_or(DeviceError::NoSupply)?;
            let slot = self.slots.get(first + micro_batch).ok_or(DeviceError::NoSupply)?;
            let slot = lock(slot);
            match &self.readings[reading] {
                order @ Reading::Order(_) if !slot.is_sorted => {
                    let mut sorting = lock(&self.sorting);
                    put(input, sorting.order_of(slot.ids(&self.readings, order)?))?;
                }
                _ => put(input, slot.data.get(reading).ok_or(DeviceError::NoSupply)?)?,
            }
        }
        self.fetched.store(first + fetch.micro_batches, Ordering::SeqCst);
        Ok(())
    }

    fn read_ahead(&self, micro_batches: usize) {
        let mut reader = self.reader();
        if !reader.reads_ahead {
            return;
        }
        let wanted = reader.filled + micro_batches;
        let fetched = self.fetched.load(Ordering::SeqCst);
        assert!(wanted <= fetched, "{wanted} micro-batches are read where {fetched} were fetched");
        self.read(&mut reader, wanted);
    }
}

impl Reader {
    /// Reads a micro-batch into a slot.
    fn read_one(&mut self, readings: &[Reading], slot: &mut Slot) -> Result<(), RunError> {
        // Only a trainer with a source gets here.
        let source = self.source.as_mut().ok_or_else(no_source)?;
        source.next_batch(&mut self.batch)?;
        self.batch.check(&self.options)?;
        self.rules.check_entries(&self.batch)?;
        slot.fill(readings, &self.batch, Some(&mut self.order));
        self.rate.bytes += slot.data.iter().map(|data| data.len() as u64).sum::<u64>();
        self.filled += 1;
        self.counted += self.batch.counted();
        self.units += self.batch.units();
        Ok(())
    }

    /// Discards the data read ahead, without moving the source.
    fn forget(&mut self) {
        (self.filled, self.counted, self.units) = (0, 0, 0);
        self.consumed = None;
    }

    /// Returns data read ahead to the source.
    fn rewind(&mut self) {
        if let (Some(position), Some(source)) = (self.consumed.take(), self.source.as_mut()) {
            match source.resume(&position) {
                Ok(()) => self.failure = None,
                Err(failure) => self.failure = Some(failure),
            }
        }
        self.forget();
    }
}

impl Slot {
    /// Copies a checked micro-batch. Allocates only the first time. Computes sorted orders if given scratch space for
    /// one.
    fn fill(
        &mut self,
        readings: &[Reading],
        batch: &impl MicroBatch,
        mut order: Option<&mut [i32]>,
    ) {
        self.is_sorted = order.is_some();
        self.data.resize_with(readings.len(), Vec::new);
        for (data, reading) in self.data.iter_mut().zip(readings) {
            let bytes = match (reading, &mut order) {
                (Reading::Order(_), None) => continue,
                (reading, Some(order)) => reading.entries(batch, order).bytes(),
                (reading, None) => reading.entries(batch, &mut []).bytes(),
            };
            data.clear();
            data.extend_from_slice(bytes);
        }
    }

    /// The bytes of the ids that an order is computed from.
    fn ids(&self, readings: &[Reading], order: &Reading) -> Result<&[u8], DeviceError> {
        let is_of = |known: &Reading| match (known, order) {
            (Reading::Entries(known), Reading::Order(name)) => known == name,
            _ => false,
        };
        let found = readings.iter().position(is_of).and_then(|number| self.data.get(number));
        found.map(Vec::as_slice).ok_or(DeviceError::NoSupply)
    }
}

impl Sorting {
    /// Computes the sorted order of ids, as bytes.
    fn order_of(&mut self, ids: &[u8]) -> &[u8] {
        self.ids.clear();
        let words = ids.as_chunks::<{ size_of::<i32>() }>().0.iter();
        self.ids.extend(words.map(|word| i32::from_ne_bytes(*word)));
        let order = &mut self.order[..self.ids.len()];
        sort_rows(&self.ids, order);
        bytes_of(order)
    }
}

pub(crate) fn no_source() -> TrainError {
    let problem = "this trainer was given no source of batches".to_owned();
    TrainError::Option { option: "data", problem }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // After a panic in a source, the contents of the slots are not used.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
