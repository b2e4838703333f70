//! The host memory of predictions: the state to restore when jumps are undone, the weights at the
//! start of a window, and the state of a direction. All of it is allocated before the first step.

use super::direction::{Course, RandomWords};
use super::int8::int8_bytes;
use super::jump::{Form, f32_at};
use super::modes::{Gram, INTERVALS, factors};
use super::rssm::Rssm;
use super::updates::STATISTICS_COPIES;
use super::write::Origin;
use super::{Accept, Controller, Direction, PredictOptions, ProbeWeights};
use crate::checkpoint::{Base, snapshot_bytes, state_tensors};
use crate::optimizer::names;
use crate::{
    Precision, Snapshot, StatePart, StateTensor, TrainError, TrainOptions, Trainer, TrainingState,
};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use storm_device::PlanDevice;
use storm_graph::random::{Seed, Stream};
use storm_graph::{DType, ParameterInstance, Training};
use storm_model::AnyModel;

/// Elements computed at a time.
pub(super) const PIECE_ELEMENTS: usize = 1 << 20;

/// Elements that a thread computes together.
pub(super) const CHUNK: usize = 1 << 16;

/// Buffers for a piece of a parameter and of its master.
const WORK_BYTES: u64 = (PIECE_ELEMENTS * (size_of::<f32>() + size_of::<f32>())) as u64;

/// Host memory that predictions need besides the plan, without the probe data.
///
/// # Errors
/// The model is not valid with these options.
pub fn predict_bytes(
    model: impl Into<AnyModel>,
    options: &TrainOptions,
    predict: &PredictOptions,
) -> Result<u64, TrainError> {
    let model = model.into();
    let instances = model.build(&options.build_options())?.parameter_instances();
    let state = state_tensors(&instances, options, Base::of(Some(&model)));
    let weights = weights(&instances, options.precision);
    let undo = undo_tensors(&weights, &state, predict.accept);
    let mut bytes = snapshot_bytes(&undo) + snapshot_bytes(&reference_tensors(&weights, &state));
    if predict.direction.has_state() {
        bytes += snapshot_bytes(&direction_tensors(&weights, predict.direction));
    }
    bytes += snapshot_bytes(&controller_tensors(&predict.controller));
    if matches!(predict.controller, Controller::Rssm { .. }) {
        bytes += STATISTICS_COPIES * observed_bytes(&state);
    }
    let int8 = match predict.probe_weights {
        ProbeWeights::AsTrained => 0,
        ProbeWeights::Int8 => int8_bytes(&model, options)?,
    };
    Ok(bytes as u64 + WORK_BYTES + int8)
}

/// What copies add to a checkpoint, at most. The undo copy and that of a window are never needed at the same time.
///
/// # Errors
/// The model is not valid with these options.
pub fn predict_saved_bytes(
    model: impl Into<AnyModel>,
    options: &TrainOptions,
    predict: &PredictOptions,
) -> Result<u64, TrainError> {
    let model = model.into();
    let instances = model.build(&options.build_options())?.parameter_instances();
    let state = state_tensors(&instances, options, Base::of(Some(&model)));
    let weights = weights(&instances, options.precision);
    let bytes =
        |tensors: &[StateTensor]| tensors.iter().map(StateTensor::size_bytes).sum::<usize>();
    let reference = bytes(&reference_tensors(&weights, &state));
    let most = match predict.accept {
        Accept::IfLower => bytes(&undo_tensors(&weights, &state, predict.accept)).max(reference),
        // Nothing is undone.
        Accept::Always => reference,
    };
    let direction = match predict.direction.has_state() {
        true => bytes(&direction_tensors(&weights, predict.direction)),
        false => 0,
    };
    Ok((most + direction + bytes(&controller_tensors(&predict.controller))) as u64)
}

/// A parameter that predictions move.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Weight {
    pub(super) parameter: String,
    pub(super) form: Form,
    elements: usize,
    stream: Stream,
}

impl Weight {
    /// The tensor that has its value: the master if there is one.
    pub(super) fn value(&self) -> String {
        match self.form {
            Form::Bf16AndMaster => self.master(),
            Form::F32 | Form::Bf16 => self.parameter.clone(),
        }
    }

    pub(super) fn master(&self) -> String {
        format!("{}.master", self.parameter)
    }

    /// Its random words in a prediction after this many updates.
    pub(super) fn words(&self, seed: u64, updates: u32) -> RandomWords {
        RandomWords::new(Seed { seed, step: updates }, self.stream)
    }
}

fn weights(instances: &[ParameterInstance], precision: Precision) -> Vec<Weight> {
    let trainable = instances.iter().filter(|i| i.parameter.training == Training::Trainable);
    trainable
        .map(|ParameterInstance { name, index, parameter }| Weight {
            parameter: name.clone(),
            form: match precision.of_parameter(parameter.dtype) {
                Precision::F32 => Form::F32,
                Precision::Bf16Master => Form::Bf16AndMaster,
                Precision::Bf16Stochastic | Precision::Fp8 => Form::Bf16,
            },
            elements: parameter.shape.elements(),
            stream: Stream { tensor: parameter.number, layer: *index },
        })
        .collect()
}

/// The state that an undo restores: everything, or only the weights if every jump is accepted.
fn undo_tensors(weights: &[Weight], state: &[StateTensor], accept: Accept) -> Vec<StateTensor> {
    match accept {
        Accept::IfLower => state.to_vec(),
        Accept::Always => {
            let moved: BTreeSet<String> = weights
                .iter()
                .flat_map(|weight| [weight.parameter.clone(), weight.value()])
                .collect();
            state.iter().filter(|tensor| moved.contains(&tensor.name)).cloned().collect()
        }
    }
}

/// Bytes of the update statistics that the optimizer records, if it does.
fn observed_bytes(state: &[StateTensor]) -> usize {
    let observed = state.iter().filter(|tensor| tensor.part == StatePart::Optimizer);
    let suffix = format!(".{}", names::OBSERVED);
    let observed = observed.filter(|tensor| tensor.name.ends_with(&suffix));
    observed.map(StateTensor::size_bytes).sum()
}

/// The tensors that have the values of weights.
fn reference_tensors(weights: &[Weight], state: &[StateTensor]) -> Vec<StateTensor> {
    let by_name: BTreeMap<&str, &StateTensor> =
        state.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    weights.iter().map(|weight| by_name[weight.value().as_str()].clone()).collect()
}

/// The state of a direction: an f32 per weight, then copies of all weights.
fn direction_tensors(weights: &[Weight], direction: Direction) -> Vec<StateTensor> {
    let copies = (1..=direction.copies_at().len()).flat_map(|number| {
        weights.iter().map(move |weight| StateTensor {
            name: format!("{}.{number}", weight.parameter),
            shape: [weight.elements].into(),
            dtype: match weight.form {
                Form::F32 | Form::Bf16AndMaster => DType::F32,
                Form::Bf16 => DType::BF16,
            },
            part: StatePart::Direction,
        })
    });
    let tensor = |weight: &Weight| StateTensor {
        name: weight.parameter.clone(),
        shape: [weight.elements].into(),
        dtype: DType::F32,
        part: StatePart::Direction,
    };
    weights.iter().map(tensor).chain(copies).collect()
}

/// The state of a learned controller.
fn controller_tensors(controller: &Controller) -> Vec<StateTensor> {
    let tensor = || StateTensor {
        name: "rssm".to_owned(),
        shape: [Rssm::state_bytes()].into(),
        dtype: DType::U8,
        part: StatePart::Controller,
    };
    match controller {
        Controller::Rssm { .. } => vec![tensor()],
        Controller::Constant { .. } | Controller::LineSearch { .. } => Vec::new(),
    }
}

/// All copies.
#[derive(Debug)]
pub(super) struct Copies {
    pub(super) weights: Vec<Weight>,
    /// For each weight: the index of its value in `undo`, and of its parameter.
    base: Vec<usize>,
    parameters: Vec<usize>,
    /// All state, or only the weights if every jump is accepted.
    pub(super) undo: Snapshot,
    /// The weights at the start of the window.
    pub(super) reference: Snapshot,
    /// The state of the direction.
    pub(super) state: Option<Snapshot>,
    /// The state of a learned controller, filled in for checkpoints.
    pub(super) controller: Option<Snapshot>,
    /// Locations of the tensors by their names in a checkpoint.
    places: BTreeMap<String, (StatePart, usize)>,
}

impl Copies {
    /// Allocates the memory.
    ///
    /// # Errors
    /// The machine or a limit does not allow it.
    pub(super) fn new<D: PlanDevice>(
        trainer: &Trainer<D>,
        options: &PredictOptions,
    ) -> Result<Copies, TrainError> {
        let weights = weights(trainer.instances(), trainer.options().precision);
        let state = trainer.state_tensors();
        let undo = Snapshot::of(trainer, undo_tensors(&weights, &state, options.accept))?;
        let positions: BTreeMap<&str, usize> = undo
            .tensors()
            .iter()
            .enumerate()
            .map(|(at, tensor)| (tensor.name.as_str(), at))
            .collect();
        let base = weights.iter().map(|weight| positions[weight.value().as_str()]).collect();
        let parameters =
            weights.iter().map(|weight| positions[weight.parameter.as_str()]).collect();
        let reference = Snapshot::of(trainer, reference_tensors(&weights, undo.tensors()))?;
        let state = match options.direction.has_state() {
            true => Some(Snapshot::of(trainer, direction_tensors(&weights, options.direction))?),
            false => None,
        };
        let controller = match controller_tensors(&options.controller) {
            tensors if tensors.is_empty() => None,
            tensors => Some(Snapshot::of(trainer, tensors)?),
        };
        let places = BTreeMap::new();
        let mut copies =
            Copies { weights, base, parameters, undo, reference, state, controller, places };
        copies.clear_state();
        copies.places = copies
            .parts()
            .flat_map(|(part, snapshot)| {
                let names =
                    snapshot.tensors().iter().map(move |tensor| name_in(part, &tensor.name));
                names.enumerate().map(move |(at, name)| (name, (part, at)))
            })
            .collect();
        Ok(copies)
    }

    /// Host memory of the copies and of the work buffers.
    pub(super) fn size_bytes(&self) -> u64 {
        let snapshots = self.parts().map(|(_, snapshot)| snapshot.size_bytes() as u64);
        snapshots.sum::<u64>() + WORK_BYTES
    }

    /// θ of a weight.
    pub(super) fn base(&self, origin: Origin, weight: usize) -> &[u8] {
        match origin {
            Origin::Undo => self.undo.bytes(self.base[weight]),
            Origin::Reference => self.reference.bytes(weight),
        }
    }

    /// No direction, for each weight.
    pub(super) fn nowhere(&self) -> Vec<Course> {
        vec![Course::Nowhere; self.weights.len()]
    }

    /// Restores the weights from before the jumps.
    pub(super) fn restore_weights<D: PlanDevice>(
        &self,
        trainer: &mut Trainer<D>,
    ) -> Result<(), TrainError> {
        for (weight, (&base, &parameter)) in
            self.weights.iter().zip(self.base.iter().zip(&self.parameters))
        {
            trainer.write_state(&weight.parameter, 0, self.undo.bytes(parameter))?;
            if weight.form == Form::Bf16AndMaster {
                trainer.write_state(&weight.master(), 0, self.undo.bytes(base))?;
            }
        }
        Ok(())
    }

    /// state ← momentum · state + θ − reference, for one weight.
    pub(super) fn add_to_state(&mut self, index: usize, momentum: f32) {
        let Copies { weights, base, undo, reference, state, .. } = self;
        let Some(state) = state else { return };
        let (now, before) = (undo.bytes(base[index]), reference.bytes(index));
        let form = weights[index].form;
        let chunks = state.bytes_mut(index).par_chunks_mut(size_of::<f32>() * CHUNK);
        chunks.enumerate().for_each(|(chunk, values)| {
            for (at, value) in values.chunks_exact_mut(size_of::<f32>()).enumerate() {
                let at = chunk * CHUNK + at;
                let step = form.read(now, at) - form.read(before, at);
                value.copy_from_slice(&(momentum * f32_at(value, 0) + step).to_ne_bytes());
            }
        });
    }

    /// Copies the current weights into the direction's copy with this number.
    pub(super) fn copy_weights<D: PlanDevice>(
        &mut self,
        trainer: &mut Trainer<D>,
        number: usize,
    ) -> Result<(), TrainError> {
        let Copies { weights, state, .. } = self;
        let Some(state) = state else { return Ok(()) };
        for (index, weight) in weights.iter().enumerate() {
            let at = (1 + number) * weights.len() + index;
            trainer.read_state(&weight.value(), 0, state.bytes_mut(at))?;
        }
        Ok(())
    }

    /// state ← the predicted change over the next window, from the modes of the last one, for one
    /// weight.
    pub(super) fn extrapolate(&mut self, index: usize) {
        let Copies { weights, base, undo, reference, state: Some(state), .. } = self else {
            return;
        };
        let Weight { form, elements, .. } = weights[index];
        let factors = {
            let copy = |number: usize| state.bytes((1 + number) * weights.len() + index);
            let mut snapshots = vec![reference.bytes(index)];
            snapshots.extend((0..INTERVALS - 1).map(copy));
            snapshots.push(undo.bytes(base[index]));
            let difference = |interval: usize, at: usize| {
                let [from, to] = [interval, interval + 1].map(|n| form.read(snapshots[n], at));
                f64::from(to) - f64::from(from)
            };
            let parts: Vec<Gram> = (0..elements.div_ceil(CHUNK))
                .into_par_iter()
                .map(|chunk| {
                    let mut gram = Gram::default();
                    for at in chunk * CHUNK..elements.min((chunk + 1) * CHUNK) {
                        let x: [f64; INTERVALS] = std::array::from_fn(|n| difference(n, at));
                        for (row, a) in gram.iter_mut().zip(x) {
                            row.iter_mut().zip(x).for_each(|(sum, b)| *sum += a * b);
                        }
                    }
                    gram
                })
                .collect();
            // Summed in order, so the result does not depend on the number of threads.
            let mut gram = Gram::default();
            for part in &parts {
                for (row, more) in gram.iter_mut().zip(part) {
                    row.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
                }
            }
            factors(&gram)
        };
        // Σ factor · (later − earlier), per snapshot.
        let of_snapshot: [f64; INTERVALS + 1] = std::array::from_fn(|n| {
            let [before, after] = [n.checked_sub(1), Some(n).filter(|&n| n < INTERVALS)];
            before.map_or(0.0, |n| factors[n]) - after.map_or(0.0, |n| factors[n])
        });
        let mut sums = vec![0.0_f64; elements.min(CHUNK)];
        for first in (0..elements).step_by(CHUNK) {
            let count = CHUNK.min(elements - first);
            for (n, factor) in of_snapshot.into_iter().enumerate() {
                let bytes = match n {
                    0 => reference.bytes(index),
                    INTERVALS => undo.bytes(base[index]),
                    n => state.bytes(n * weights.len() + index),
                };
                for (at, sum) in sums[..count].iter_mut().enumerate() {
                    let term = factor * f64::from(form.read(bytes, first + at));
                    *sum = if n == 0 { term } else { *sum + term };
                }
            }
            let out = &mut state.bytes_mut(index)[4 * first..4 * (first + count)];
            for (value, sum) in out.chunks_exact_mut(4).zip(&sums) {
                value.copy_from_slice(&(*sum as f32).to_ne_bytes());
            }
        }
    }

    /// Root mean square of θ − reference, for one weight.
    pub(super) fn root_mean_square(&self, index: usize) -> f32 {
        let Weight { form, elements, .. } = self.weights[index];
        let (now, before) = (self.base(Origin::Undo, index), self.reference.bytes(index));
        let sum = |chunk: usize| -> f64 {
            (chunk * CHUNK..elements.min((chunk + 1) * CHUNK))
                .map(|at| f64::from(form.read(now, at) - form.read(before, at)).powi(2))
                .sum()
        };
        let sums: Vec<f64> = (0..elements.div_ceil(CHUNK)).into_par_iter().map(sum).collect();
        // Summed in order, so the result does not depend on the number of threads.
        (sums.iter().sum::<f64>() / elements.max(1) as f64).sqrt() as f32
    }

    /// Resets the direction.
    pub(super) fn clear_state(&mut self) {
        let Some(state) = &mut self.state else { return };
        for index in 0..self.weights.len() {
            state.bytes_mut(index).fill(0);
        }
    }

    fn parts(&self) -> impl Iterator<Item = (StatePart, &Snapshot)> {
        let state = self.state.as_ref().map(|state| (StatePart::Direction, state));
        let controller = self.controller.as_ref().map(|state| (StatePart::Controller, state));
        [(StatePart::Undo, &self.undo), (StatePart::Reference, &self.reference)]
            .into_iter()
            .chain(state)
            .chain(controller)
    }

    /// The tensors under their names in a checkpoint.
    pub(super) fn tensors(&self) -> Vec<StateTensor> {
        let named = |part: StatePart| {
            move |tensor: &StateTensor| StateTensor {
                name: name_in(part, &tensor.name),
                part,
                ..tensor.clone()
            }
        };
        self.parts()
            .flat_map(|(part, snapshot)| snapshot.tensors().iter().map(named(part)))
            .collect()
    }

    /// The bytes of a checkpoint tensor, if it is one of these.
    pub(super) fn bytes_mut(&mut self, name: &str) -> Option<&mut [u8]> {
        let &(part, at) = self.places.get(name)?;
        let snapshot = match part {
            StatePart::Undo => &mut self.undo,
            StatePart::Reference => &mut self.reference,
            StatePart::Controller => self.controller.as_mut()?,
            _ => self.state.as_mut()?,
        };
        Some(snapshot.bytes_mut(at))
    }
}

fn name_in(part: StatePart, name: &str) -> String {
    let prefix = match part {
        StatePart::Undo => "undo",
        StatePart::Reference => "reference",
        StatePart::Controller => "controller",
        _ => "direction",
    };
    format!("{prefix}:{name}")
}

/// A trainer with the copies of its predictions, for checkpoints.
pub(crate) struct WithCopies<'a, D: PlanDevice> {
    pub(super) trainer: &'a mut Trainer<D>,
    pub(super) copies: &'a mut Copies,
    /// The copies that are currently valid. Others are not saved.
    pub(super) held: Vec<StatePart>,
}

impl<D: PlanDevice> TrainingState for WithCopies<'_, D> {
    fn tensors(&self) -> Vec<StateTensor> {
        let mut tensors = self.trainer.state_tensors();
        tensors.extend(self.copies.tensors());
        tensors
    }

    fn holds(&self, part: StatePart) -> bool {
        part.is_always_saved() || self.held.contains(&part)
    }

    fn updates(&self) -> u32 {
        self.trainer.updates()
    }

    fn read(&mut self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), TrainError> {
        match self.copies.bytes_mut(name) {
            Some(copy) => bytes.copy_from_slice(&copy[first..first + bytes.len()]),
            None => self.trainer.read_state(name, first, bytes)?,
        }
        Ok(())
    }

    fn read_all(&mut self, reads: Vec<(&str, &mut [u8])>) -> Result<(), TrainError> {
        reads.into_iter().try_for_each(|(name, bytes)| self.read(name, 0, bytes))
    }

    fn host_buffer(&self, bytes: usize) -> Result<storm_device::HostBuffer, TrainError> {
        Trainer::host_buffer(self.trainer, bytes)
    }

    fn write(&mut self, name: &str, first: usize, bytes: &[u8]) -> Result<(), TrainError> {
        match self.copies.bytes_mut(name) {
            Some(copy) => copy[first..first + bytes.len()].copy_from_slice(bytes),
            None => self.trainer.write_state(name, first, bytes)?,
        }
        Ok(())
    }

    fn set_updates(&mut self, updates: u32) {
        self.trainer.set_updates(updates);
    }
}
