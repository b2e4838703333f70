//! A step on several ranks.
//!
//! The first rank leads. It reads data, evaluates and saves, as a run on one rank does, and tells the others what to compute. Rank
//! `r` of `n` computes lanes `r`, `r + n` and so on, under a plan for its rank, whose collectives bring gradients to the owners of
//! their pieces and weights back. All weights are on every rank; of optimizer state each has what it owns. So bits depend on the lanes of
//! a step, and never on the number of ranks.

mod alike;
mod exchange;
mod figures;
mod orders;
mod saving;
mod store;

pub use exchange::{Exchange, Flat};
pub use figures::RankFigures;
pub(crate) use store::Store;

use crate::feed::Numbering;
use crate::micro_batch::{MicroBatch, NamedInputs, Values};
use crate::trainer::{OwnLanes, Trainer, check_rate};
use crate::weights;
use crate::{AnyBatch, MemoryReading, RunError, StepReport, Stop, TrainError};
use figures::Memory;
use half::bf16;
use orders::Order;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use storm_device::{Collectives, PlanDevice, Scalar, bytes_of, bytes_of_mut};
use storm_graph::{DType, TensorClass, Training};
use storm_plan::{RankPlace, Tier, UpdateTime};
use storm_ranks::{Collective, Engine, Place, RankError};

/// Bytes of a tensor that are sent at a time.
const SENT_BYTES: usize = 16 << 20;

/// What a rank hears before it computes anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A message.
    Message(Vec<u8>),
    /// The run is over, with this exit code.
    End(u8),
}

/// The ranks of a run. All parts of a process share one.
#[derive(Clone)]
pub struct Ranks {
    shared: Arc<Mutex<Shared>>,
    place: Place,
    stop: Stop,
}

struct Shared {
    engine: Box<dyn Engine>,
    /// Whether a step is under way, in which the others wait for gradients and for nothing else.
    in_step: bool,
    /// In which collectives of plans were under way, since a step began.
    collective_time: Duration,
    memory: Memory,
}

impl Ranks {
    /// Connected by an engine.
    pub fn new(engine: Box<dyn Engine>) -> Ranks {
        let place = engine.place();
        let (collective_time, memory) = (Duration::ZERO, Memory::default());
        let shared = Shared { engine, in_step: false, collective_time, memory };
        Ranks { shared: Arc::new(Mutex::new(shared)), place, stop: Stop::new() }
    }

    /// A stop requested on this rank. The first rank learns of it with the next step and ends the run.
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Which rank this is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The first rank: tells the others something that they wait for with [`Ranks::hear`].
    ///
    /// # Errors
    /// A rank is gone.
    pub fn say(&self, message: &[u8]) -> Result<(), RankError> {
        self.order(Order::Hear(message.len() as u64))?;
        self.lock().engine.broadcast(0, &mut message.to_vec())
    }

    /// Any other rank: waits for a message, or for the end.
    ///
    /// # Errors
    /// A rank is gone, or the first one says something else.
    pub fn hear(&self) -> Result<Heard, RankError> {
        match self.next_order()? {
            Order::Hear(bytes) => {
                let mut message = vec![0; bytes as usize];
                self.lock().engine.broadcast(0, &mut message)?;
                Ok(Heard::Message(message))
            }
            Order::End(code) => Ok(Heard::End(code as u8)),
            _ => Err(out_of_step()),
        }
    }

    /// What every rank says, in order. If one says why it failed, that is the error on all.
    ///
    /// # Errors
    /// A rank says that it failed, or is gone.
    pub fn hear_all<T: Serialize, U: DeserializeOwned>(
        &self,
        own: &Result<T, String>,
    ) -> Result<Vec<U>, RankError> {
        let own = serde_json::to_vec(own).expect("plain data");
        let mut longest = [own.len() as i64];
        self.lock().engine.agree(&mut longest)?;
        let bytes = usize::try_from(longest[0]).map_err(|_| out_of_step())?;
        let mut piece = own;
        // JSON may end in spaces.
        piece.resize(bytes, b' ');
        let mut all = vec![0; bytes * self.place.ranks as usize];
        self.gather(&piece, &mut all)?;
        let mut said = Vec::new();
        for (rank, piece) in (0..).zip(all.chunks(bytes)) {
            match serde_json::from_slice(piece).map_err(|_| out_of_step())? {
                Ok(one) => said.push(one),
                Err(reason) => return Err(RankError::Aborted { rank, reason }),
            }
        }
        Ok(said)
    }

    /// The first rank: ends the others with this exit code. In the middle of a step that is only possible at once.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn end(&self, code: u8) -> Result<(), RankError> {
        let mut shared = self.lock();
        if shared.in_step {
            shared.engine.abort("the first rank failed in the middle of a step");
        }
        drop(shared);
        self.order(Order::End(u64::from(code)))
    }

    /// Ends all ranks at once.
    pub fn abort(&self, reason: &str) {
        self.lock().engine.abort(reason);
    }

    fn order(&self, order: Order) -> Result<(), RankError> {
        self.lock().engine.broadcast(0, &mut order.to_bytes())
    }

    fn next_order(&self) -> Result<Order, RankError> {
        let mut bytes = [0; Order::BYTES];
        self.lock().engine.broadcast(0, &mut bytes)?;
        Order::of_bytes(&bytes).ok_or_else(out_of_step)
    }

    fn set_in_step(&self, in_step: bool) {
        self.lock().in_step = in_step;
    }

    /// What every rank has, one after another. All have as much.
    fn gather<T: Scalar>(&self, piece: &[T], all: &mut [T]) -> Result<(), RankError> {
        let piece = bytes_of(piece);
        let ranges: Vec<Range<usize>> = (0..self.place.ranks as usize)
            .map(|rank| rank * piece.len()..(rank + 1) * piece.len())
            .collect();
        self.lock().engine.gather(piece, bytes_of_mut(all), &ranges)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn out_of_step() -> RankError {
    RankError::OutOfStep { collective: Collective::Broadcast, other: 0 }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks").field("place", &self.place).finish_non_exhaustive()
    }
}

/// For the queue of collectives of the CPU device.
impl Collectives for Ranks {
    fn exchange(
        &self,
        send: &[u8],
        sends: &[Range<usize>],
        receive: &mut [u8],
        receives: &[Range<usize>],
    ) -> Result<(), String> {
        let mut shared = self.lock();
        let begun = Instant::now();
        let made = shared.engine.exchange(send, sends, receive, receives);
        shared.collective_time += begun.elapsed();
        made.map_err(|error| error.to_string())
    }
}

/// What a trainer keeps for steps on several ranks.
pub(crate) struct RankState {
    ranks: Ranks,
    /// All weights and all optimizer state, by name.
    tensors: Vec<String>,
    /// The micro-batches of a step, used again.
    batches: Vec<AnyBatch>,
    /// What every rank said of the last step.
    figures: Vec<RankFigures>,
    /// The first rank on which a stop was requested by the end of the last step.
    stopping: Option<u32>,
    /// Whether all ranks write checkpoints. The first one knows it.
    writes_checkpoints: bool,
}

impl<D: PlanDevice> Trainer<D> {
    /// From now on, steps are computed by all ranks, and this is the first of them. The plan is for it, its device is connected to
    /// the others, and no step was made. Other ranks take over the weights; their optimizer state is that of the beginning.
    ///
    /// # Errors
    /// The plan, the model or the number of lanes do not allow it, or ranks have other models, devices or plans.
    pub fn lead(&mut self, ranks: Ranks) -> Result<(), TrainError> {
        let state = match self.rank_state(ranks.clone()) {
            Ok(state) => state,
            Err(error) => {
                ranks.tell_refusal(&error.to_string());
                return Err(error);
            }
        };
        self.compare_ranks(&ranks)?;
        self.send_weights(&state)?;
        self.ranks = Some(Box::new(state));
        Ok(())
    }

    /// Any other rank: computes what the first one says, until that ends the run. Returns the exit code. What
    /// [`Trainer::lead`] refuses, the first rank says.
    ///
    /// # Errors
    /// From the device, or if a rank is gone.
    pub fn follow(mut self, ranks: &Ranks) -> Result<u8, TrainError> {
        let state = match self.rank_state(ranks.clone()) {
            Ok(state) => state,
            Err(error) => return Ok(ranks.refuse(&error.to_string())?),
        };
        if self.compare_ranks(ranks).is_err() {
            return Ok(ranks.wait_for_end()?);
        }
        self.take_weights(&state)?;
        loop {
            match ranks.next_order()? {
                Order::Step(bytes) => {
                    let mut message = vec![0; bytes as usize];
                    ranks.lock().engine.broadcast(0, &mut message)?;
                    let step = self.read_step(&message)?;
                    self.set_updates(step.updates);
                    self.step_on_ranks(ranks, &step.batches, step.counted, step.rate)?;
                }
                Order::Flush => self.flush()?,
                Order::Read(part) => store::send_part(&mut self.planned, &state, part)?,
                Order::Write(part) => store::take_part(&mut self.planned, &state, part)?,
                Order::Look(bytes) => ranks.look(bytes)?,
                Order::Save(bytes) => self.save_own_part(ranks, bytes)?,
                Order::End(code) => return Ok(code as u8),
                Order::Hear(_) => return Err(out_of_step().into()),
            }
        }
    }

    fn rank_state(&mut self, ranks: Ranks) -> Result<RankState, TrainError> {
        let refuse = |option, problem: String| Err(TrainError::Option { option, problem });
        let (lanes, count) = (self.options().lanes.count(), ranks.place.ranks as usize);
        if !lanes.is_multiple_of(count) {
            return refuse("lanes", format!("{count} ranks cannot share {lanes} lanes evenly"));
        }
        let mut parameters = self.instances().iter().map(|instance| &instance.parameter);
        if let Some(running) = parameters.find(|p| p.training == Training::Running) {
            let name = &running.name;
            return refuse(
                "lanes",
                format!(
                    "`{name}` is a running statistic, which one rank after another would have to change"
                ),
            );
        }
        let Place { rank, ranks: count } = ranks.place;
        let planned = self.plan().rank;
        if (planned.rank, planned.ranks) != (rank, count) {
            let RankPlace { rank: other, ranks: of, .. } = planned;
            return refuse("plan", format!("is for rank {other} of {of}, not {rank} of {count}"));
        }
        if self.plan().update == UpdateTime::InBackward || self.updates() > 0 {
            return refuse(
                "plan",
                "must not have updated anything before ranks share it".to_owned(),
            );
        }
        let is_kept = |class: TensorClass| {
            matches!(class, TensorClass::Parameter(_) | TensorClass::OptimizerState)
        };
        let whole = self.plan().lasting.iter().filter(|lasting| lasting.shard.is_none());
        let whole = whole.map(|lasting| &lasting.tensor);
        let all = whole.chain(self.plan().sharded.iter().map(|sharded| &sharded.tensor));
        let mut tensors: Vec<String> =
            all.filter(|tensor| is_kept(tensor.class)).map(|tensor| tensor.name.clone()).collect();
        tensors.sort();
        let (batches, figures, stopping) = (Vec::new(), Vec::new(), None);
        Ok(RankState { ranks, tensors, batches, figures, stopping, writes_checkpoints: false })
    }

    /// Every parameter, in parts that are sent at once.
    fn weight_parts(&self) -> Vec<(String, Range<usize>)> {
        let mut parts = Vec::new();
        for lasting in &self.plan().lasting {
            let (tensor, size) = (&lasting.tensor, lasting.tensor.size_bytes());
            if matches!(tensor.class, TensorClass::Parameter(_)) {
                let starts = (0..size).step_by(SENT_BYTES);
                parts.extend(
                    starts.map(|first| (tensor.name.clone(), first..size.min(first + SENT_BYTES))),
                );
            }
        }
        parts.sort_by(|a, b| (&a.0, a.1.start).cmp(&(&b.0, b.1.start)));
        parts
    }

    fn send_weights(&mut self, state: &RankState) -> Result<(), TrainError> {
        let mut buffer = Vec::new();
        for (name, range) in self.weight_parts() {
            buffer.resize(range.len(), 0);
            self.planned.read_bytes(&name, range.start, &mut buffer)?;
            state.ranks.lock().engine.broadcast(0, &mut buffer)?;
        }
        Ok(())
    }

    fn take_weights(&mut self, state: &RankState) -> Result<(), TrainError> {
        let mut buffer = Vec::new();
        for (name, range) in self.weight_parts() {
            buffer.resize(range.len(), 0);
            state.ranks.lock().engine.broadcast(0, &mut buffer)?;
            self.planned.write_bytes(&name, range.start, &buffer)?;
        }
        let names: Vec<String> = self.parameter_names().map(str::to_owned).collect();
        for name in names {
            weights::widen_master(&mut self.planned, &name)?;
        }
        Ok(())
    }
}

/// A step as another rank hears of it.
struct HeardStep {
    batches: Vec<NamedInputs>,
    updates: u32,
    counted: usize,
    rate: f32,
}

/// A step that all ranks have made.
struct StepOnRanks {
    report: StepReport,
    figures: Vec<RankFigures>,
    /// The first rank on which a stop was requested.
    stopping: Option<u32>,
}

impl<D: PlanDevice> Trainer<D> {
    /// Lets the other ranks apply what is pending, too.
    pub(crate) fn tell_flush(&self) -> Result<(), TrainError> {
        match &self.ranks {
            Some(state) => Ok(state.ranks.order(Order::Flush)?),
            None => Ok(()),
        }
    }

    /// The first rank's part of a step on all ranks.
    pub(crate) fn lead_step<B: MicroBatch>(
        &mut self,
        batches: &[B],
        counted: usize,
        rate: f32,
    ) -> Result<StepReport, TrainError> {
        let ranks = self.ranks.as_ref().expect("asked for by a step on ranks").ranks.clone();
        let mut message = self.write_step(batches, counted, rate);
        ranks.order(Order::Step(message.len() as u64))?;
        ranks.lock().engine.broadcast(0, &mut message)?;
        ranks.set_in_step(true);
        let made = self.step_on_ranks(&ranks, batches, counted, rate)?;
        ranks.set_in_step(false);
        if let Some(state) = &mut self.ranks {
            (state.figures, state.stopping) = (made.figures, made.stopping);
        }
        Ok(made.report)
    }

    /// Time and memory of all ranks in the last step; empty if this one makes steps alone.
    pub fn rank_figures(&self) -> &[RankFigures] {
        self.ranks.as_ref().map_or(&[], |state| &state.figures)
    }

    /// The first rank on which a stop was requested, as of the last step.
    pub(crate) fn stopping_rank(&self) -> Option<u32> {
        self.ranks.as_ref().and_then(|state| state.stopping)
    }

    /// The next micro-batches of the source, for a step on all ranks.
    pub(crate) fn read_step_data(&mut self) -> Result<Vec<AnyBatch>, RunError> {
        let count = self.micro_batches();
        let state = self.ranks.as_mut().expect("asked for by a step on ranks");
        let mut batches = std::mem::take(&mut state.batches);
        batches.resize_with(count, AnyBatch::default);
        let read = self.staging.borrow_source(|source| {
            batches.iter_mut().try_for_each(|batch| source.next_batch(batch).map(drop))
        });
        read.unwrap_or_else(|| Err(crate::staging::no_source().into()))?;
        Ok(batches)
    }

    /// Takes back what [`Trainer::read_step_data`] gave.
    pub(crate) fn keep_step_data(&mut self, batches: Vec<AnyBatch>) {
        if let Some(state) = &mut self.ranks {
            state.batches = batches;
        }
    }

    /// A step for the other ranks: updates so far, targets that count, learning rate, and the inputs of all micro-batches.
    fn write_step<B: MicroBatch>(&self, batches: &[B], counted: usize, rate: f32) -> Vec<u8> {
        let mut message = Vec::new();
        message.extend_from_slice(&self.updates().to_le_bytes());
        message.extend_from_slice(&(counted as u64).to_le_bytes());
        message.extend_from_slice(&rate.to_bits().to_le_bytes());
        for batch in batches {
            for (name, ..) in self.rules.inputs() {
                let entries = batch.entries(name).expect("micro-batches were checked");
                message.extend_from_slice(entries.bytes());
            }
        }
        message
    }

    fn read_step(&self, message: &[u8]) -> Result<HeardStep, TrainError> {
        let damaged = || TrainError::from(out_of_step());
        let (updates, rest) = message.split_first_chunk().ok_or_else(damaged)?;
        let (counted, rest) = rest.split_first_chunk().ok_or_else(damaged)?;
        let (rate, mut rest) = rest.split_first_chunk().ok_or_else(damaged)?;
        let count = self.micro_batches();
        let mut batches = Vec::with_capacity(count);
        for _ in 0..count {
            let mut batch = NamedInputs::new(0);
            for (name, dtype, entries) in self.rules.inputs() {
                let (bytes, after) =
                    rest.split_at_checked(entries * dtype.size_bytes()).ok_or_else(damaged)?;
                rest = after;
                batch = batch.with(name, values_of(dtype, bytes));
            }
            batches.push(batch);
        }
        if !rest.is_empty() {
            return Err(damaged());
        }
        let (updates, counted) = (u32::from_le_bytes(*updates), u64::from_le_bytes(*counted));
        let rate = f32::from_bits(u32::from_le_bytes(*rate));
        Ok(HeardStep { batches, updates, counted: counted as usize, rate })
    }

    /// This rank's lanes of a step, and what all ranks say of theirs.
    fn step_on_ranks<B: MicroBatch>(
        &mut self,
        ranks: &Ranks,
        batches: &[B],
        counted: usize,
        rate: f32,
    ) -> Result<StepOnRanks, TrainError> {
        check_rate(rate)?;
        let begun = Instant::now();
        ranks.lock().collective_time = Duration::ZERO;
        let (rank, count) = (ranks.place.rank as usize, ranks.place.ranks as usize);
        let lanes = self.options().lanes.count();
        let in_lane = batches.len() / lanes;
        let numbering = Numbering { rank, ranks: count, in_lane };
        let own: Vec<&B> =
            (0..batches.len() / count).map(|number| &batches[numbering.of(number)]).collect();
        // Losses, then how many targets were found.
        let mut results = vec![0.0; 2 * own.len()];
        let (losses, found) = results.split_at_mut(own.len());
        let own_lanes = OwnLanes { losses: Some(losses), found: Some(found), numbering };
        let report = self.step_of_lanes(&own, counted, rate, own_lanes)?;
        // All in one message.
        let mut message = bytes_of(&results).to_vec();
        message.extend(self.own_figures(ranks, begun)?.to_bytes());
        message.push(ranks.stop.is_requested().into());
        let mut all = vec![0; count * message.len()];
        ranks.gather(&message, &mut all)?;
        let (mut figures, mut all_results, mut stopping) = (Vec::new(), Vec::new(), None);
        for (rank, message) in (0..).zip(all.chunks(message.len())) {
            let (is_stopping, message) = message.split_last().expect("never empty");
            let (of_rank, of_figures) = message.split_at(message.len() - RankFigures::BYTES);
            stopping = stopping.or((*is_stopping != 0).then_some(rank));
            bytes_of_mut(&mut results).copy_from_slice(of_rank);
            all_results.push(results.clone());
            figures.push(RankFigures::of_bytes(rank, of_figures));
        }
        let (mut loss, mut correct) = (0.0, 0.0);
        for lane in 0..lanes {
            let (losses, found) = all_results[lane % count].split_at(own.len());
            let of_lane = lane / count * in_lane..(lane / count + 1) * in_lane;
            losses[of_lane.clone()].iter().for_each(|one| loss += one);
            found[of_lane].iter().for_each(|one| correct += one);
        }
        let accuracy = report.accuracy.map(|_| correct / counted as f32);
        Ok(StepOnRanks { report: StepReport { loss, accuracy, ..report }, figures, stopping })
    }

    /// What this rank says of a step that began then.
    fn own_figures(&self, ranks: &Ranks, begun: Instant) -> Result<RankFigures, TrainError> {
        let seconds = begun.elapsed().as_secs_f64();
        let on_device = self.device().collective_seconds().map_err(storm_exec::ExecError::from)?;
        let mut shared = ranks.lock();
        let reading = || MemoryReading::of(self.device());
        shared.memory.look(reading).map_err(storm_exec::ExecError::from)?;
        Ok(RankFigures {
            rank: ranks.place.rank,
            seconds,
            collective_seconds: on_device.unwrap_or(shared.collective_time.as_secs_f64()),
            device_bytes: shared.memory.device.in_use_bytes,
            device_free_bytes: shared.memory.device.free_bytes,
            host_bytes: self.memory_taken()[Tier::HOST] as u64,
            process_bytes: shared.memory.process_bytes,
        })
    }
}

fn values_of(dtype: DType, bytes: &[u8]) -> Values {
    fn typed<T: Scalar + Clone + Default>(bytes: &[u8]) -> Vec<T> {
        let mut values = vec![T::default(); bytes.len() / size_of::<T>()];
        bytes_of_mut(&mut values).copy_from_slice(bytes);
        values
    }
    match dtype {
        DType::F32 => typed::<f32>(bytes).into(),
        DType::BF16 => typed::<bf16>(bytes).into(),
        DType::I32 => typed::<i32>(bytes).into(),
        _ => typed::<u8>(bytes).into(),
    }
}
