//! Binds the tensors of a block to addresses for one of its passes.

use super::emit::{Bound, Emit};
use super::residency::Class;
use super::variant::Variant;
use std::sync::Arc;
use storm_graph::{Block, ParameterGradient, Section, TensorClass, TensorId, Training};

/// The binding of each tensor of the block's graph; `None` for temporaries.
pub(super) type Bindings = Vec<Option<Bound>>;

fn bind(bound: &mut [Option<Bound>], id: TensorId, to: Bound) {
    bound[id.index()] = Some(to);
}

impl Emit<'_> {
    /// Binds parameters, inputs, exports, results and parameter gradients of a block, and carried tensors that bypass
    /// blocks.
    pub(super) fn bind_block(
        &mut self,
        variant: &Arc<Variant>,
        block: usize,
        m: usize,
    ) -> Bindings {
        let section = &variant.section;
        let graph = &section.graph;
        let mut bound: Bindings = vec![None; graph.tensors().len()];
        for id in section.outside_tensors() {
            let tensor = graph.tensor(id);
            bound[id.index()] = match tensor.class {
                TensorClass::Parameter(Training::Running) | TensorClass::Cache => None,
                TensorClass::Parameter(_) => Some(self.weight_bound(block, &tensor.name)),
                _ => match self.values.exports[m].get(&tensor.name) {
                    Some(&value) => Some(Bound::one(self.export(&tensor.name, m), value)),
                    None => self.input(&tensor.name, m),
                },
            };
        }
        for (name, id) in &section.exports {
            let place = self.export(name, m);
            bind(&mut bound, *id, Bound::one(place, self.values.exports[m][name]));
        }
        for (number, result) in self.lowering.shared.results.iter().enumerate() {
            if result.block == block {
                let place = self.layout.results[number].0.of(m);
                let value = self.values.results[number][m];
                bind(&mut bound, section.results[result.position].1, Bound::one(place, value));
            }
        }
        self.bind_changing(section, &variant.storage, block, &mut bound);
        self.bind_gradients(section, &variant.storage, block, &mut bound);
        self.bind_skips(section, block, m, &mut bound);
        bound
    }

    /// Binds the tensors that a block receives from the block before it, at `place`.
    pub(super) fn bind_taken(
        &self,
        bound: &mut Bindings,
        section: &Section,
        block: usize,
        m: usize,
        place: usize,
    ) {
        let seam = &self.lowering.blocks.seams[block];
        for (entry, &(input, _)) in seam.tensors.iter().enumerate() {
            let offset = place + seam.slab.entries[entry].offset;
            let to = self.values.seams[block][m][entry].at(offset);
            bind(bound, section.carried_in[input].tensor, to);
        }
    }

    /// Binds the tensors that a block passes to the block after it, at `place`.
    pub(super) fn bind_handed_on(
        &self,
        bound: &mut Bindings,
        section: &Section,
        block: usize,
        m: usize,
        place: usize,
    ) {
        let seam = &self.lowering.blocks.seams[block + 1];
        for (entry, &(_, output)) in seam.tensors.iter().enumerate() {
            let offset = place + seam.slab.entries[entry].offset;
            let to = self.values.seams[block + 1][m][entry].at(offset);
            bind(bound, section.carried_out[output].tensor, to);
        }
    }

    /// Binds the gradients of the tensors received from the block before and passed to the block after.
    pub(super) fn bind_carried_gradients(
        &self,
        bound: &mut Bindings,
        section: &Section,
        block: usize,
        m: usize,
    ) {
        let Some(backward) = &section.backward else { return };
        let seams = &self.lowering.blocks.seams;
        for (entry, &(input, _)) in seams[block].tensors.iter().enumerate() {
            if let Some(id) = backward.carried_in_gradients[input] {
                bind(bound, id, self.carry(block, entry, m));
            }
        }
        if let Some(seam) = seams.get(block + 1) {
            for (entry, &(_, output)) in seam.tensors.iter().enumerate() {
                let id = backward.carried_out_gradients[output];
                bind(bound, id, self.carry(block + 1, entry, m));
            }
        }
    }

    /// The gradient of a block's input: written by that block, read by the one before.
    fn carry(&self, block: usize, entry: usize, m: usize) -> Bound {
        let from_the_end = self.lowering.blocks.last() - block;
        let place = self.places().carry_ring.slot(from_the_end * self.group_size() + m);
        let offset = self.lowering.blocks.seams[block].slab.entries[entry].offset;
        Bound::one(place + offset, self.values.carries[block][m][entry])
    }

    fn bind_skips(&self, section: &Section, block: usize, m: usize, bound: &mut Bindings) {
        for (number, skip) in self.lowering.blocks.skips.iter().enumerate() {
            let (place, gradient_place) = self.places().skips[number][m];
            let (value, gradient) = self.values.skips[number][m];
            let (value, gradient) =
                (Bound::one(place, value), Bound::one(gradient_place, gradient));
            if skip.from.block == block {
                bind(bound, section.carried_out[skip.from.output].tensor, value);
                if let Some(backward) = &section.backward {
                    bind(bound, backward.carried_out_gradients[skip.from.output], gradient);
                }
            }
            if skip.to.0 == block {
                bind(bound, section.carried_in[skip.to.1].tensor, value);
                let backward = section.backward.as_ref();
                if let Some(id) = backward.and_then(|b| b.carried_in_gradients[skip.to.1]) {
                    bind(bound, id, gradient);
                }
            }
        }
    }

    /// A parameter that a block reads: its own, or one that another stage owns.
    fn weight_bound(&self, block: usize, name: &str) -> Bound {
        let program = self.lowering.task.program();
        let Block { stage, index } = self.lowering.blocks.get(block);
        let owner = program.owner(stage, name);
        let index = if owner == stage { index } else { 0 };
        let block = self.lowering.blocks.number(owner, index);
        let position = self.lowering.sets[owner].position(name).expect("its owner has it");
        let offset = self.layout.cut.stages[owner].weights.entries[position].offset;
        let place = self.place(Class::Weights, block);
        self.values.weights[block][position].at(place + offset)
    }

    /// A gradient that a block computes, by its index in the stage's set.
    pub(super) fn gradient_bound(&self, block: usize, position: usize) -> Bound {
        let stage = self.lowering.blocks.get(block).stage;
        let offset = self.layout.cut.stages[stage].gradients.entries[position].offset;
        let place = self.place(Class::Gradients, block);
        self.values.gradients[block][position].at(place + offset)
    }

    /// Binds running statistics and caches, and every tensor that overwrites one.
    fn bind_changing(
        &self,
        section: &Section,
        storage: &[TensorId],
        block: usize,
        bound: &mut Bindings,
    ) {
        let set = &self.lowering.sets[self.lowering.blocks.get(block).stage];
        for (position, statistic) in set.changing.iter().enumerate() {
            let to = Bound::one(
                self.layout.changing[block][position],
                self.values.changing[block][position],
            );
            let graph = &section.graph;
            for id in graph.ids() {
                let root = storage[id.index()];
                if graph.producer(root).is_none() && graph.tensor(root).name == statistic.name {
                    bind(bound, id, to);
                }
            }
        }
    }

    /// Binds a gradient, and every tensor that it is accumulated through.
    fn bind_gradients(
        &self,
        section: &Section,
        storage: &[TensorId],
        block: usize,
        bound: &mut Bindings,
    ) {
        let Some(backward) = &section.backward else { return };
        let set = &self.lowering.sets[self.lowering.blocks.get(block).stage];
        for &ParameterGradient { parameter, gradient, .. } in &backward.parameters {
            let name = &section.graph.tensor(parameter).name;
            let position = set.gradient(name).expect("collected from the sections");
            let all = self.gradient_bound(block, position);
            let root = storage[gradient.index()];
            for id in section.graph.ids().filter(|id| storage[id.index()] == root) {
                bound[id.index()] = Some(all);
            }
        }
    }

    /// A scalar of the step, or an input that is written once per step.
    pub(super) fn scalar(&self, name: &str) -> Bound {
        if let Some(offset) = self.layout.scalar(self.lowering, name) {
            return Bound::one(offset, self.values.scalars[name]);
        }
        self.input(name, 0).unwrap_or_else(|| unreachable!("no scalar `{name}`"))
    }

    /// An input of a micro-batch.
    fn input(&self, name: &str, micro_batch: usize) -> Option<Bound> {
        let index = self.layout.inputs.iter().position(|input| input.tensor.name == name)?;
        let input = &self.layout.inputs[index];
        let which = micro_batch.min(input.count - 1);
        Some(Bound::one(input.device.of(which), self.values.inputs[index][which]))
    }

    /// The offset of a micro-batch's export.
    fn export(&self, name: &str, micro_batch: usize) -> usize {
        self.places().exports.of(micro_batch) + self.lowering.shared.exports.offsets[name]
    }
}
