//! Declares where persistent tensors are between steps.

use super::emit::{Emit, Pieces};
use super::norm::norm_names;
use super::parameters::State;
use super::residency::Class;
use super::slab::Slab;
use crate::decisions::UpdateTime;
use crate::plan::{Lasting, Place, Shard, Sharded};
use crate::tier::Tier;
use storm_graph::{Block, DType, MomentFormat, Shape, Tensor, TensorClass};

fn on_device(offset: usize) -> Place {
    Place { tier: Tier::DEVICE, offset }
}

fn on_host(offset: usize) -> Place {
    Place { tier: Tier::HOST, offset }
}

/// A place `offset` bytes after another.
fn behind(place: Place, offset: usize) -> Place {
    Place { offset: place.offset + offset, ..place }
}

/// A persistent tensor at these places.
fn lasting(tensor: Tensor, pieces: Pieces, places: Vec<Place>) -> Lasting {
    let pieces = (0..pieces.count as usize).map(|index| pieces.piece(index)).collect();
    Lasting { tensor, pieces, places, parts: Vec::new(), shard: None }
}

impl Emit<'_> {
    /// Declares the plan's persistent tensors. Called when the last group is emitted.
    pub(super) fn declare_lasting(&mut self) {
        let (mut all, mut sharded) = (Vec::new(), Vec::new());
        for block in 0..self.lowering.blocks.count() {
            self.declare_block(block, &mut all, &mut sharded);
        }
        self.plan.sharded = sharded;
        if self.decisions.update == UpdateTime::NextStep && self.lowering.task.training.is_some() {
            let (_, clip) = norm_names(&self.lowering.training().norm);
            let bound = self.scalar(&clip);
            all.push(Lasting {
                tensor: Tensor {
                    name: clip,
                    shape: Shape::scalar(),
                    dtype: DType::F32,
                    class: TensorClass::Activation,
                },
                pieces: vec![bound.first],
                places: vec![on_device(bound.offset)],
                parts: Vec::new(),
                shard: None,
            });
        }
        self.plan.lasting = all;
    }

    fn declare_block(&self, number: usize, all: &mut Vec<Lasting>, sharded: &mut Vec<Sharded>) {
        let block = self.lowering.blocks.get(number);
        let Block { stage, index } = block;
        let program = self.lowering.task.program();
        let (set, slabs) = (&self.lowering.sets[stage], &self.layout.cut.stages[stage]);
        let full = |name: &str| program.stages()[stage].full_name(index, name);

        let mut parts = self.frozen_parts(number);
        for (position, parameter) in set.parameters.iter().enumerate() {
            let tensor = Tensor { name: full(&parameter.tensor.name), ..parameter.tensor.clone() };
            let offset = slabs.weights.entries[position].offset;
            let host = self.layout.weight_homes[stage][index].host;
            let host = match self.frozen_homes(number) {
                Some(homes) => homes.on_host(position).map(|offset| host + offset),
                None => (!self.is_pinned(Class::Weights, number)).then_some(host + offset),
            };
            let device = self.is_there(Class::Weights, number);
            let device = device.then(|| self.place(Class::Weights, number) + offset);
            let places: Vec<Place> =
                host.map(on_host).into_iter().chain(device.map(on_device)).collect();
            let parts = parts.remove(&position).unwrap_or_default();
            let pieces = self.values.weights[number][position];
            all.push(Lasting { parts, ..lasting(tensor, pieces, places) });
        }

        for (position, statistic) in set.changing.iter().enumerate() {
            let tensor = Tensor { name: full(&statistic.name), ..statistic.clone() };
            all.push(Lasting {
                tensor,
                pieces: vec![self.values.changing[number][position]],
                places: vec![on_device(self.layout.changing[number][position])],
                parts: Vec::new(),
                shard: None,
            });
        }

        let mut gradients = Vec::new();
        if self.gradients_leave(number, true) {
            let slab = self.lowering.gradients_on_host(self.decisions, slabs);
            gradients.push((on_host(self.layout.gradients[stage].host(index)), slab));
        }
        if self.is_there(Class::Gradients, number) {
            gradients.push((on_device(self.place(Class::Gradients, number)), &slabs.gradients));
        }
        let states = &self.layout.states[stage];
        let is_pinned = states.streaming.is_pinned(index);
        let mut parts = self.state_parts(number);
        let trainable: Vec<usize> = set.trainable().collect();
        for (t, &position) in trainable.iter().enumerate() {
            let parameter = &set.parameters[position];
            let shape = &parameter.tensor.shape;
            if self.decisions.update == UpdateTime::NextStep {
                let name = program.gradient_name(block, &parameter.tensor.name);
                let tensor = Tensor {
                    name,
                    shape: shape.clone(),
                    dtype: set.gradients[t].dtype,
                    class: TensorClass::Gradient,
                };
                let whole = Whole { tensor, pieces: self.values.gradients[number][t], shape };
                let size = |elements: usize| elements * set.gradients[t].dtype.size_bytes();
                self.declare((stage, t), whole, (&gradients, t), size, (all, sharded));
            }
            for (kind, name) in set.kinds().iter().enumerate() {
                let Some(State { format, .. }) = parameter.state_of(name) else { continue };
                let tensor = Tensor {
                    name: full(&format!("{}.{name}", parameter.tensor.name)),
                    shape: format.shape(shape),
                    dtype: format.dtype(),
                    class: TensorClass::OptimizerState,
                };
                let entry = kind * trainable.len() + t;
                if self.lowering.task.rank.is_shared() {
                    // These are never on disk, so all kinds of a block are in one place.
                    let start = match is_pinned {
                        true => on_device(states.device(index)),
                        false => on_host(self.state_home(number).host),
                    };
                    let whole = Whole { tensor, pieces: self.values.states[number][entry], shape };
                    let size = |elements: usize| format.size_bytes(elements);
                    let places = (&[(start, &slabs.states)][..], entry);
                    self.declare((stage, t), whole, places, size, (all, sharded));
                    continue;
                }
                let offset = slabs.states.entries[entry].offset;
                let home = self.state_home(number).host;
                let place = match is_pinned {
                    true => Some(on_device(states.device(index) + offset)),
                    false => (self.layout.homes(stage, index).on_host(kind, offset))
                        .map(|offset| on_host(home + offset)),
                };
                let pieces = self.values.states[number][entry];
                let places: Vec<Place> = place.into_iter().collect();
                let parts = parts.remove(&entry).unwrap_or_default();
                all.push(Lasting { parts, ..lasting(tensor, pieces, places) });
            }
        }
    }

    /// Declares a tensor of a block: a slab entry at these places. If ranks share it, each piece that this rank owns
    /// becomes a separate tensor.
    fn declare(
        &self,
        (stage, t): (usize, usize),
        whole: Whole<'_>,
        (slabs, entry): (&[(Place, &Slab)], usize),
        size: impl Fn(usize) -> usize,
        (all, sharded): (&mut Vec<Lasting>, &mut Vec<Sharded>),
    ) {
        let Whole { tensor, pieces, shape } = whole;
        let shards = &self.layout.cut.shards;
        if !shards.place.is_shared() {
            let place = |(start, slab): &(Place, &Slab)| behind(*start, slab.entries[entry].offset);
            let places = slabs.iter().map(place).collect();
            all.push(lasting(tensor, pieces, places));
            return;
        }
        let mut parts = Vec::new();
        for piece in 0..pieces.count as usize {
            let first = piece * self.decisions.piece_elements;
            let count = self.decisions.piece_elements.min(shape.elements() - first);
            parts.push((shards.owner(stage, t, piece), size(first + count) - size(first)));
            if !shards.is_own(stage, t, piece) {
                continue;
            }
            let piece_shape = match tensor.class {
                TensorClass::OptimizerState => {
                    MomentFormat::of(tensor.dtype).shape(&Shape::from([count]))
                }
                _ => Shape::from([count]),
            };
            let part = Tensor {
                name: format!("{}[{first}..{}]", tensor.name, first + count),
                shape: piece_shape,
                ..tensor.clone()
            };
            let value = Pieces { first: pieces.piece(piece), count: 1 };
            let shard = Shard { tensor: tensor.name.clone(), first_byte: size(first) };
            let place =
                |(start, slab): &(Place, &Slab)| behind(*start, slab.piece_offset(entry, piece));
            let places = slabs.iter().map(place).collect();
            all.push(Lasting { shard: Some(shard), ..lasting(part, value, places) });
        }
        sharded.push(Sharded { tensor, parts });
    }
}

/// A tensor with its pieces, and the shape of its parameter.
struct Whole<'a> {
    tensor: Tensor,
    pieces: Pieces,
    shape: &'a Shape,
}
