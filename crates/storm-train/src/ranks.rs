//! The lanes of a step on several ranks.
//!
//! The first rank leads. It reads data, evaluates and saves, as a run on one rank does, and tells the others what to compute. Rank
//! `r` of `n` computes lanes `r`, `r + n` and so on, under a plan for one lane. After every round of `n` lanes each rank receives
//! the gradients of all, and adds them in the order of the lanes. All weights and all optimizer state are on every rank, and every
//! rank makes the same update. So bits depend on the lanes of a step, and never on the number of ranks.

use crate::micro_batch::{MicroBatch, NamedInputs, Values};
use crate::optimizer::names;
use crate::trainer::{Trainer, check_rate};
use crate::{AnyBatch, RunError, StepReport, TrainError};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use storm_device::cpu::CpuPlanDevice;
use storm_device::cpu::kernels::element::Element;
use storm_device::cpu::kernels::{elementwise, layout, sum};
use storm_device::{PlanDevice, Scalar, bytes_of, bytes_of_mut};
use storm_graph::{DType, SUM_BLOCK, Tensor, TensorClass, Training};
use storm_plan::UpdateTime;
use storm_ranks::{Collective, Engine, Place, RankError};

/// Elements of a gradient that are gathered at a time.
const GATHERED_ELEMENTS: usize = 1 << 20;

/// Bytes of a tensor that are sent at a time.
const SENT_BYTES: usize = 16 << 20;

/// The most bytes of a message, so that a damaged length takes no memory.
const MESSAGE_BYTES_MAX: u64 = 1 << 40;

/// Bytes of an [`Order`].
const ORDER_BYTES: usize = 9;

/// What the first rank tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// A message of so many bytes for [`Ranks::hear`] follows.
    Hear(u64),
    /// All weights and optimizer state follow; so many updates were made.
    Take(u64),
    /// The micro-batches of a step follow, in so many bytes.
    Step(u64),
    /// The run is over, with this exit code.
    End(u64),
}

impl Order {
    fn to_bytes(self) -> [u8; ORDER_BYTES] {
        let (kind, value) = match self {
            Order::Hear(bytes) => (1, bytes),
            Order::Take(updates) => (2, updates),
            Order::Step(bytes) => (3, bytes),
            Order::End(code) => (4, code),
        };
        let mut bytes = [0; ORDER_BYTES];
        bytes[0] = kind;
        bytes[1..].copy_from_slice(&u64::to_le_bytes(value));
        bytes
    }

    fn of_bytes([kind, value @ ..]: [u8; ORDER_BYTES]) -> Option<Order> {
        let value = u64::from_le_bytes(value);
        match kind {
            1 if value <= MESSAGE_BYTES_MAX => Some(Order::Hear(value)),
            2 => Some(Order::Take(value)),
            3 if value <= MESSAGE_BYTES_MAX => Some(Order::Step(value)),
            4 => Some(Order::End(value)),
            _ => None,
        }
    }
}

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
}

struct Shared {
    engine: Box<dyn Engine>,
    /// Whether a step is under way, in which the others wait for gradients and for nothing else.
    in_step: bool,
}

impl Ranks {
    /// Connected by an engine.
    pub fn new(engine: Box<dyn Engine>) -> Ranks {
        let place = engine.place();
        Ranks { shared: Arc::new(Mutex::new(Shared { engine, in_step: false })), place }
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
            Order::Take(_) | Order::Step(_) => Err(out_of_step()),
        }
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
        let mut bytes = [0; ORDER_BYTES];
        self.lock().engine.broadcast(0, &mut bytes)?;
        Order::of_bytes(bytes).ok_or_else(out_of_step)
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

/// What a trainer keeps for steps on several ranks.
pub(crate) struct RankState {
    ranks: Ranks,
    /// Whether the other ranks have the weights and the state of the first one.
    is_shared: bool,
    /// All trainable gradients, in the order of the norm: name, dtype and sum of the lanes so far.
    gradients: Vec<GradientSum>,
    /// The micro-batches of a step, used again.
    batches: Vec<AnyBatch>,
}

struct GradientSum {
    name: String,
    dtype: DType,
    sum: Vec<f32>,
}

/// What the lanes of a step came to.
#[derive(Clone, Copy, Default)]
struct Losses {
    loss: f32,
    correct: f32,
}

impl Trainer<CpuPlanDevice> {
    /// From now on, steps are computed by all ranks, and this is the first of them. The plan is for one lane, and defers updates.
    ///
    /// # Errors
    /// The plan, the model or the number of lanes do not allow it.
    pub fn lead(&mut self, ranks: Ranks) -> Result<(), TrainError> {
        self.ranks = Some(Box::new(self.rank_state(ranks)?));
        Ok(())
    }

    /// Any other rank: computes what the first one says, until that ends the run. Returns the exit code.
    ///
    /// # Errors
    /// As [`Trainer::lead`]; from the device, or if a rank is gone.
    pub fn follow(mut self, ranks: &Ranks) -> Result<u8, TrainError> {
        let mut state = self.rank_state(ranks.clone())?;
        loop {
            match ranks.next_order()? {
                Order::Take(updates) => self.take_state(ranks, updates)?,
                Order::Step(bytes) => {
                    let mut message = vec![0; bytes as usize];
                    ranks.lock().engine.broadcast(0, &mut message)?;
                    let step = self.read_step(&message)?;
                    self.step_of_lanes(&mut state, &step.batches, step.counted, step.rate)?;
                }
                Order::End(code) => return Ok(code as u8),
                Order::Hear(_) => return Err(out_of_step().into()),
            }
        }
    }

    fn rank_state(&mut self, ranks: Ranks) -> Result<RankState, TrainError> {
        let refuse = |problem: String| Err(TrainError::Option { option: "lanes", problem });
        let (lanes, count) = (self.options().lanes, ranks.place.ranks as usize);
        if !lanes.is_multiple_of(count) {
            return refuse(format!("{count} ranks cannot share {lanes} lanes evenly"));
        }
        let mut parameters = self.instances().iter().map(|instance| &instance.parameter);
        if let Some(running) = parameters.find(|p| p.training == Training::Running) {
            let name = &running.name;
            return refuse(format!(
                "`{name}` is a running statistic, which one rank after another would have to change"
            ));
        }
        if self.plan().update != UpdateTime::NextStep {
            let problem =
                "of a step on several ranks must defer updates to the next step".to_owned();
            return Err(TrainError::Option { option: "plan", problem });
        }
        let trainable = |instance: &&storm_graph::ParameterInstance| {
            instance.parameter.training == Training::Trainable
        };
        let names: Vec<String> = (self.instances().iter().filter(trainable))
            .map(|instance| format!("{}.grad", instance.name))
            .collect();
        let mut gradients = Vec::new();
        for name in names {
            let Tensor { shape, dtype, .. } = self.planned.tensor(&name)?;
            let (dtype, sum) = (*dtype, vec![0.0; shape.elements()]);
            gradients.push(GradientSum { name, dtype, sum });
        }
        Ok(RankState { ranks, is_shared: false, gradients, batches: Vec::new() })
    }
}

/// A step as another rank hears of it.
struct HeardStep {
    batches: Vec<NamedInputs>,
    counted: usize,
    rate: f32,
}

impl<D: PlanDevice> Trainer<D> {
    /// The weights or the state have changed other than by a step.
    pub(crate) fn changed_by_hand(&mut self) {
        if let Some(state) = &mut self.ranks {
            state.is_shared = false;
        }
    }

    /// The first rank's part of a step on all ranks.
    pub(crate) fn lead_step<B: MicroBatch>(
        &mut self,
        batches: &[B],
        counted: usize,
        rate: f32,
    ) -> Result<StepReport, TrainError> {
        let mut state = self.ranks.take().expect("asked for by a step on ranks");
        let made = self.lead_with(&mut state, batches, counted, rate);
        self.ranks = Some(state);
        made
    }

    fn lead_with<B: MicroBatch>(
        &mut self,
        state: &mut RankState,
        batches: &[B],
        counted: usize,
        rate: f32,
    ) -> Result<StepReport, TrainError> {
        if !state.is_shared {
            self.send_state(&state.ranks)?;
            state.is_shared = true;
        }
        let mut message = self.write_step(batches, counted, rate);
        state.ranks.order(Order::Step(message.len() as u64))?;
        state.ranks.lock().engine.broadcast(0, &mut message)?;
        state.ranks.set_in_step(true);
        let report = self.step_of_lanes(state, batches, counted, rate)?;
        state.ranks.set_in_step(false);
        Ok(report)
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

    /// All weights and all optimizer state, by name.
    fn shared_tensors(&self) -> Vec<(String, usize)> {
        let is_shared = |class: TensorClass| {
            matches!(class, TensorClass::Parameter(_) | TensorClass::OptimizerState)
        };
        let all = self.plan().lasting.iter().map(|lasting| &lasting.tensor);
        let mut tensors: Vec<(String, usize)> = (all.filter(|tensor| is_shared(tensor.class)))
            .map(|tensor| (tensor.name.clone(), tensor.size_bytes()))
            .collect();
        tensors.sort();
        tensors
    }

    fn send_state(&mut self, ranks: &Ranks) -> Result<(), TrainError> {
        self.flush()?;
        ranks.order(Order::Take(u64::from(self.updates())))?;
        let mut buffer = Vec::new();
        for (name, size) in self.shared_tensors() {
            for first in (0..size).step_by(SENT_BYTES) {
                buffer.resize(SENT_BYTES.min(size - first), 0);
                self.planned.read_bytes(&name, first, &mut buffer)?;
                ranks.lock().engine.broadcast(0, &mut buffer)?;
            }
        }
        Ok(())
    }

    fn take_state(&mut self, ranks: &Ranks, updates: u64) -> Result<(), TrainError> {
        // What is pending is part of what comes.
        self.pending = None;
        let mut buffer = Vec::new();
        for (name, size) in self.shared_tensors() {
            for first in (0..size).step_by(SENT_BYTES) {
                buffer.resize(SENT_BYTES.min(size - first), 0);
                ranks.lock().engine.broadcast(0, &mut buffer)?;
                self.planned.write_bytes(&name, first, &buffer)?;
            }
        }
        self.set_updates(updates as u32);
        Ok(())
    }

    /// A step for the other ranks: targets that count, learning rate, and the inputs of all micro-batches.
    fn write_step<B: MicroBatch>(&self, batches: &[B], counted: usize, rate: f32) -> Vec<u8> {
        let mut message = Vec::new();
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
        let (counted, rest) = message.split_first_chunk().ok_or_else(damaged)?;
        let (rate, mut rest) = rest.split_first_chunk().ok_or_else(damaged)?;
        let count = self.planned.micro_batches() * self.options().lanes;
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
        let counted = u64::from_le_bytes(*counted) as usize;
        Ok(HeardStep { batches, counted, rate: f32::from_bits(u32::from_le_bytes(*rate)) })
    }

    /// This rank's lanes of a step, the gradients of all, and the update.
    fn step_of_lanes<B: MicroBatch>(
        &mut self,
        state: &mut RankState,
        batches: &[B],
        counted: usize,
        rate: f32,
    ) -> Result<StepReport, TrainError> {
        check_rate(rate)?;
        let Place { rank, ranks } = state.ranks.place;
        let (rank, ranks) = (rank as usize, ranks as usize);
        let (lanes, in_lane) = (self.options().lanes, self.planned.micro_batches());
        let mut found = Losses::default();
        for round in 0..lanes / ranks {
            let lane = round * ranks + rank;
            let first = lane * in_lane;
            let own = &batches[first..first + in_lane];
            // Losses of the lane, then how many of its targets were found.
            let mut results = vec![0.0; 2 * in_lane];
            self.lane(own, first, counted as f32, &mut results)?;
            let mut all = vec![0.0; ranks * results.len()];
            state.ranks.gather(&results, &mut all)?;
            for of_lane in all.chunks(2 * in_lane) {
                let (losses, correct) = of_lane.split_at(in_lane);
                losses.iter().for_each(|loss| found.loss += loss);
                correct.iter().for_each(|correct| found.correct += correct);
            }
            for index in 0..state.gradients.len() {
                let GradientSum { name, dtype, sum } = &mut state.gradients[index];
                let part = LanePart { ranks: &state.ranks, name, begins: round == 0 };
                match dtype {
                    DType::F32 => self.add_lanes::<f32>(part, sum)?,
                    _ => self.add_lanes::<bf16>(part, sum)?,
                }
            }
        }
        let mut squares = Vec::with_capacity(state.gradients.len());
        for GradientSum { name, dtype, sum } in &state.gradients {
            squares.push(match dtype {
                DType::F32 => self.round_gradient::<f32>(name, sum)?,
                _ => self.round_gradient::<bf16>(name, sum)?,
            });
        }
        let gradient_norm = sum::global_norm(squares.into_iter());
        let max_norm = self.options().optimizer.max_norm.unwrap_or(f32::INFINITY);
        let clip = sum::clip_scale(gradient_norm, max_norm);
        self.planned.write(names::CLIP, &[clip])?;
        let update = self.updates() + 1;
        if gradient_norm.is_finite() {
            self.pending = Some(self.options().optimizer.method.scalars(rate, update));
            self.set_updates(update);
        }
        let accuracy = self.exchange.classifies().then_some(found.correct / counted as f32);
        Ok(StepReport { loss: found.loss, accuracy, gradient_norm })
    }

    /// Adds the gradients that all ranks have now, in the order of the ranks, which is that of their lanes.
    fn add_lanes<E: Element + Scalar + Default>(
        &mut self,
        part: LanePart<'_>,
        sums: &mut [f32],
    ) -> Result<(), TrainError> {
        let ranks = part.ranks.place.ranks as usize;
        let (mut own, mut all) = (Vec::<E>::new(), Vec::<E>::new());
        for (piece, sums) in sums.chunks_mut(GATHERED_ELEMENTS).enumerate() {
            own.resize(sums.len(), E::default());
            all.resize(ranks * sums.len(), E::default());
            self.planned.read_part(part.name, piece * GATHERED_ELEMENTS, &mut own)?;
            part.ranks.gather(&own, &mut all)?;
            for (rank, lane) in all.chunks(sums.len()).enumerate() {
                match part.begins && rank == 0 {
                    true => layout::convert::<E, f32>(lane, sums),
                    false => elementwise::accumulate::<E, f32>(lane, sums),
                }
            }
        }
        Ok(())
    }

    /// Rounds a sum of lanes to the gradient of the step, and returns the sum of its squares.
    fn round_gradient<E: Element + Scalar + Default>(
        &mut self,
        name: &str,
        sums: &[f32],
    ) -> Result<f32, TrainError> {
        let mut gradient = vec![E::default(); sums.len()];
        layout::convert::<f32, E>(sums, &mut gradient);
        self.planned.write(name, &gradient)?;
        let mut partials = vec![0.0; sums.len().div_ceil(SUM_BLOCK)];
        Ok(sum::sum_of_squares(&gradient, &mut partials))
    }
}

/// Whose gradients are added to what.
struct LanePart<'a> {
    ranks: &'a Ranks,
    name: &'a str,
    /// Whether the first of them begins the sum.
    begins: bool,
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
