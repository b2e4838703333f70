//! Where everything persistent is kept between steps.

use super::emit::{Emit, Pieces};
use super::norm::norm_names;
use super::parameters::State;
use super::residency::Class;
use crate::decisions::UpdateTime;
use crate::plan::{Lasting, Place};
use crate::tier::Tier;
use storm_graph::{Block, DType, Shape, Tensor, TensorClass};

fn on_device(offset: usize) -> Place {
    Place { tier: Tier::DEVICE, offset }
}

fn on_host(offset: usize) -> Place {
    Place { tier: Tier::HOST, offset }
}

/// A tensor of a block, wherever it is kept.
fn lasting(tensor: Tensor, pieces: Pieces, starts: &[Place], offset: usize) -> Lasting {
    let places =
        starts.iter().map(|place| Place { offset: place.offset + offset, ..*place }).collect();
    let pieces = (0..pieces.count as usize).map(|index| pieces.piece(index)).collect();
    Lasting { tensor, pieces, places, parts: Vec::new() }
}

impl Emit<'_> {
    /// Declares the plan's persistent tensors. Called when the last group is emitted.
    pub(super) fn declare_lasting(&mut self) {
        let mut all = Vec::new();
        for block in 0..self.lowering.blocks.count() {
            self.declare_block(block, &mut all);
        }
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
            });
        }
        self.plan.lasting = all;
    }

    fn declare_block(&self, number: usize, all: &mut Vec<Lasting>) {
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
            all.push(Lasting { parts, ..lasting(tensor, pieces, &places, 0) });
        }

        for (position, statistic) in set.changing.iter().enumerate() {
            let tensor = Tensor { name: full(&statistic.name), ..statistic.clone() };
            all.push(Lasting {
                tensor,
                pieces: vec![self.values.changing[number][position]],
                places: vec![on_device(self.layout.changing[number][position])],
                parts: Vec::new(),
            });
        }

        let mut gradients = Vec::new();
        if self.gradients_leave(number, true) {
            gradients.push(on_host(self.layout.gradients[stage].host(index)));
        }
        if self.is_there(Class::Gradients, number) {
            gradients.push(on_device(self.place(Class::Gradients, number)));
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
                let offset = slabs.gradients.entries[t].offset;
                all.push(lasting(tensor, self.values.gradients[number][t], &gradients, offset));
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
                all.push(Lasting { parts, ..lasting(tensor, pieces, &places, 0) });
            }
        }
    }
}
