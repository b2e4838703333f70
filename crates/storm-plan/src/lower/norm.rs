//! The end of the backward pass: sums the parts of tied gradients and computes the norm.

use super::emit::{Bound, Emit, Ends, copy_values};
use super::residency::Class;
use crate::TensorKind;
use crate::pack::aligned;
use crate::plan::GraphId;
use std::sync::Arc;
use storm_graph::{DType, Graph, Op, TensorClass, TensorId};

impl Emit<'_> {
    /// Adds to a block's gradients the parts that blocks of other stages computed.
    pub(super) fn fold_tied(&mut self, block: usize) {
        let blocks = &self.lowering.blocks;
        let stage = blocks.get(block).stage;
        for (user, set) in self.lowering.sets.iter().enumerate() {
            for (part, gradient) in set.gradients.iter().enumerate() {
                if gradient.owner == stage && user != stage {
                    let whole = self.lowering.sets[stage].gradient(&gradient.name);
                    let whole = whole.expect("the owner learns it, too");
                    let user = blocks.number(user, 0);
                    self.fold((block, whole), (user, part), gradient.dtype);
                }
            }
        }
    }

    /// Adds one gradient to another, piece by piece: the part may be in host memory.
    fn fold(&mut self, whole: (usize, usize), part: (usize, usize), dtype: DType) {
        let (user, position) = part;
        let stage = self.lowering.blocks.get(user).stage;
        let index = self.lowering.blocks.get(user).index;
        let slab = &self.layout.cut.stages[stage].gradients;
        let pieces = slab.entries[position].pieces.len();
        let is_there = self.is_there(Class::Gradients, user);
        let (sum, added) =
            (self.gradient_bound(whole.0, whole.1), self.gradient_bound(user, position));
        let mut offset = 0;
        for piece in 0..pieces {
            let slab = &self.layout.cut.stages[stage].gradients;
            let bytes = slab.entries[position].pieces[piece];
            let runs = slab.runs_of(std::iter::once((position, piece)));
            let at = |bound: Bound, start: usize| {
                Bound::one(start, super::emit::Pieces { first: bound.first, count: 0 }.piece(piece))
            };
            let sum = at(sum, sum.offset + offset);
            let mut slot = None;
            let added = match is_there {
                true => at(added, added.offset + offset),
                false => {
                    let next = self.state_turns.next();
                    let start = self.layout.state_ring.slot(next);
                    let after = self.state_turns.free_after(next);
                    let host = self.layout.gradients[stage].host(index);
                    for run in &runs {
                        let ends = Ends {
                            kind: TensorKind::Gradients,
                            device: start,
                            host: host + self.gradient_on_host(stage, run),
                        };
                        let pieces = &self.values.gradients[user];
                        let values = copy_values(run, |entry, piece| pieces[entry].piece(piece));
                        self.copy_in(after, ends, run, values);
                    }
                    slot = Some(next);
                    at(added, start)
                }
            };
            let graph = self.fold_graph(dtype, bytes / dtype.size_bytes());
            self.compute(graph, 0, 0, &[sum, added], &[sum]);
            if let Some(slot) = slot {
                let now = self.position();
                self.state_turns.touch(slot, now);
            }
            offset += bytes;
        }
    }

    fn fold_graph(&mut self, dtype: DType, elements: usize) -> GraphId {
        if let Some(&id) = self.fold_graphs.get(&(dtype, elements)) {
            return id;
        }
        let mut graph = Graph::new();
        let sum = graph.source("sum", [elements], dtype, TensorClass::Gradient);
        let x = graph.source("part", [elements], dtype, TensorClass::Gradient);
        graph.apply("fold", Op::Accumulate { sum, x }).expect("both have one shape");
        let id = GraphId(self.plan.graphs.len() as u32);
        self.plan.graphs.push(Arc::new(graph));
        self.fold_graphs.insert((dtype, elements), id);
        id
    }

    /// Computes the sums of squares of a block's final gradients. Each has separate scratch while there is room, so
    /// that a device can run several at once.
    pub(super) fn sum_squares(&mut self, block: usize) {
        if self.lowering.task.rank.is_shared() {
            return self.sum_own_squares(block);
        }
        let program = self.lowering.task.program();
        let mut taken = 0;
        let which = self.lowering.blocks.get(block);
        let set = &self.lowering.sets[which.stage];
        for position in 0..set.trainable().count() {
            let name = program.gradient_name(which, &set.gradients[position].name);
            let node = self.lowering.squares_node(&name);
            let gradient = self.gradient_bound(block, position);
            let scratch = scratch_bytes(&self.lowering.training().norm, node);
            if taken + scratch > self.layout.work_bytes {
                taken = 0;
            }
            self.norm_node(node, &[gradient], self.layout.work + taken);
            taken += scratch;
        }
    }

    /// Emits a node of the norm graph. Results are scalars with separate addresses; scratch is in `work`.
    fn norm_node(&mut self, node: usize, reads: &[Bound], mut work: usize) {
        let lowering = self.lowering;
        let graph = &lowering.training().norm;
        let mut writes = Vec::new();
        for &id in &graph.nodes()[node].outputs {
            let tensor = graph.tensor(id);
            if tensor.class == TensorClass::Scratch {
                let value = self.norm_scratch(tensor, id);
                writes.push(Bound::one(work, value));
                work += aligned(tensor.size_bytes());
            } else {
                writes.push(self.scalar(&tensor.name));
            }
        }
        self.compute(self.norm_graph, node as u32, 0, reads, &writes);
    }

    /// Computes the norm and the clip scale from the sums of squares of all gradients.
    pub(super) fn finish_norm(&mut self) {
        let lowering = self.lowering;
        let graph = &lowering.training().norm;
        if lowering.task.rank.is_shared() {
            self.gather_squares();
        }
        for (index, node) in graph.nodes().iter().enumerate() {
            if matches!(node.op, Op::SumOfSquares { .. }) {
                continue;
            }
            let reads: Vec<Bound> = (node.op.operands().into_iter())
                .map(|(_, id)| self.scalar(&graph.tensor(id).name))
                .collect();
            self.norm_node(index, &reads, self.layout.work);
        }
    }
}

/// Work area of a node of the norm graph.
pub(super) fn scratch_bytes(norm: &Graph, node: usize) -> usize {
    let outputs = norm.nodes()[node].outputs.iter().map(|&id| norm.tensor(id));
    let scratch = outputs.filter(|tensor| tensor.class == TensorClass::Scratch);
    scratch.map(|tensor| aligned(tensor.size_bytes())).sum()
}

/// Names of the norm and of the clip scale.
pub(super) fn norm_names(norm: &Graph) -> (String, String) {
    let name = |wanted: fn(&Op<TensorId>) -> bool| {
        let node = norm.nodes().iter().find(|node| wanted(&node.op));
        node.map_or(String::new(), |node| norm.tensor(node.outputs[0]).name.clone())
    };
    (name(|op| matches!(op, Op::GlobalNorm { .. })), name(|op| matches!(op, Op::ClipScale { .. })))
}
