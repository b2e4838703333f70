//! What the ranks of a step send each other: gradients of lanes to the owners of their pieces, sums of squares, and updated weights.

use super::emit::{Bound, Emit};
use super::residency::Class;
use super::shards::partials_bytes;
use crate::plan::{GraphId, Operand};
use crate::{CollectiveKind, Moved, TensorKind};
use std::sync::Arc;
use storm_graph::{DType, Graph, Op, Shape, TensorClass};

impl Emit<'_> {
    /// A piece of a block's gradient, where its slot is.
    pub(super) fn gradient_piece(&self, block: usize, t: usize, piece: usize) -> Bound {
        let stage = self.lowering.blocks.get(block).stage;
        let slab = &self.layout.cut.stages[stage].gradients;
        let offset = self.place(Class::Gradients, block) + slab.piece_offset(t, piece);
        Bound::one(offset, self.values.gradients[block][t].piece(piece))
    }

    /// What another rank has sent of an own piece.
    pub(super) fn received_piece(&self, block: usize, t: usize, piece: usize, from: u32) -> Bound {
        let stage = self.lowering.blocks.get(block).stage;
        let number = self.lowering.task.rank.others().position(|other| other == from);
        let number = number.expect("one of the others");
        let bytes = self.layout.cut.stages[stage].gradients.entries[t].pieces[piece];
        let place = self.layout.cut.received[stage].place(t, piece, number, bytes);
        let values = self.values.received[block][t][piece].expect("an own piece");
        Bound::one(self.layout.received + place, values.piece(number))
    }

    /// Positions of the pieces of a block's own gradients, in order.
    fn owned_pieces(&self, block: usize) -> Vec<(usize, usize)> {
        let stage = self.lowering.blocks.get(block).stage;
        let slab = &self.layout.cut.stages[stage].gradients;
        let count = self.lowering.sets[stage].trainable().count();
        let pieces = |t: usize| (0..slab.entries[t].pieces.len()).map(move |piece| (t, piece));
        (0..count).flat_map(pieces).collect()
    }

    /// Sends the pieces of a block's gradients to their owners. Returns whether there was anything to send.
    pub(super) fn exchange_gradients(&mut self, block: usize) -> bool {
        if !self.lowering.shares_step() {
            return false;
        }
        let (stage, place) = (self.lowering.blocks.get(block).stage, self.lowering.task.rank);
        let mut moved = Vec::new();
        for (t, piece) in self.owned_pieces(block) {
            let owner = self.layout.cut.shards.owner(stage, t, piece);
            let (mut sent, mut received) = (None, Vec::new());
            if owner == place.rank {
                let from = |from| (from, operand(self.received_piece(block, t, piece, from)));
                received = place.others().map(from).collect();
            } else {
                sent = Some(operand(self.gradient_piece(block, t, piece)));
            }
            moved.push(Moved { owner, sent, received });
        }
        let is_any = !moved.is_empty();
        self.collective(CollectiveKind::Exchange, TensorKind::Gradients, moved);
        is_any
    }

    /// Brings pieces of weights that other ranks have updated, and sends those that this one has.
    pub(super) fn gather_weights(&mut self, block: usize, pieces: &[(usize, usize)]) {
        if !self.lowering.shares_step() {
            return;
        }
        let (stage, place) = (self.lowering.blocks.get(block).stage, self.lowering.task.rank);
        let trainable: Vec<usize> = self.lowering.sets[stage].trainable().collect();
        let start = self.place(Class::Weights, block);
        let slab = &self.layout.cut.stages[stage].weights;
        let mut moved = Vec::new();
        for &(t, piece) in pieces {
            let owner = self.layout.cut.shards.owner(stage, t, piece);
            let value = self.values.weights[block][trainable[t]].piece(piece);
            let here = Operand { value, offset: start + slab.piece_offset(trainable[t], piece) };
            moved.push(match owner == place.rank {
                true => Moved { owner, sent: Some(here), received: Vec::new() },
                false => Moved { owner, sent: None, received: vec![(owner, here)] },
            });
        }
        self.collective(CollectiveKind::Gather, TensorKind::Weights, moved);
    }

    /// Partial sums of squares of the pieces of a block's gradients that this rank owns, which are final.
    pub(super) fn sum_own_squares(&mut self, block: usize) {
        let stage = self.lowering.blocks.get(block).stage;
        for (t, piece) in self.owned_pieces(block) {
            if !self.layout.cut.shards.is_own(stage, t, piece) {
                continue;
            }
            let gradient = self.gradient_piece(block, t, piece);
            let bytes = self.layout.cut.stages[stage].gradients.entries[t].pieces[piece];
            let dtype = self.lowering.sets[stage].gradients[t].dtype;
            let graph = self.square_graph(dtype, bytes / dtype.size_bytes());
            let whole = self.graph_value(graph, 0);
            let partials = self.values.squares[block][t].piece(piece);
            let place = self.layout.squares[block][t].pieces[piece];
            let writes = [Bound::one(self.layout.work, whole), Bound::one(place, partials)];
            self.compute(graph, 0, 0, &[gradient], &writes);
        }
    }

    /// Brings the partial sums of squares of all pieces together, and adds up those of each gradient.
    pub(super) fn gather_squares(&mut self) {
        let (lowering, place) = (self.lowering, self.lowering.task.rank);
        let mut moved = Vec::new();
        for block in 0..lowering.blocks.count() {
            let stage = lowering.blocks.get(block).stage;
            for (t, piece) in self.owned_pieces(block) {
                let owner = self.layout.cut.shards.owner(stage, t, piece);
                let value = self.values.squares[block][t].piece(piece);
                let places = &self.layout.squares[block][t];
                let before = partials_bytes(piece * self.decisions.piece_elements);
                let sent = Operand { value, offset: places.pieces[piece] };
                let received = Operand { value, offset: places.whole + before };
                let sent = (owner == place.rank).then_some(sent);
                moved.push(Moved { owner, sent, received: vec![(owner, received)] });
            }
        }
        self.collective(CollectiveKind::Gather, TensorKind::Gradients, moved);
        let program = lowering.task.program();
        let norm = &lowering.training().norm;
        for block in 0..lowering.blocks.count() {
            let which = lowering.blocks.get(block);
            let set = &lowering.sets[which.stage];
            for (t, parameter) in set.trainable().enumerate() {
                let name = program.gradient_name(which, &set.gradients[t].name);
                let node = &norm.nodes()[lowering.squares_node(&name)];
                let sum = self.scalar(&norm.tensor(node.outputs[0]).name);
                let elements = set.parameters[parameter].tensor.shape.elements();
                let graph = self.partial_graph(partials_bytes(elements) / size_of::<f32>());
                let partials =
                    self.values.squares[block][t].at(self.layout.squares[block][t].whole);
                self.compute(graph, 0, 0, &[partials], &[sum]);
            }
        }
    }

    fn square_graph(&mut self, dtype: DType, elements: usize) -> GraphId {
        if let Some(&id) = self.square_graphs.get(&(dtype, elements)) {
            return id;
        }
        let id = self.push_graph(square_graph(dtype, elements));
        self.square_graphs.insert((dtype, elements), id);
        id
    }

    fn partial_graph(&mut self, count: usize) -> GraphId {
        if let Some(&id) = self.partial_graphs.get(&count) {
            return id;
        }
        let id = self.push_graph(partial_graph(count));
        self.partial_graphs.insert(count, id);
        id
    }

    fn push_graph(&mut self, graph: Graph) -> GraphId {
        let id = GraphId(self.plan.graphs.len() as u32);
        self.plan.graphs.push(Arc::new(graph));
        id
    }
}

/// Squares of a piece.
pub(super) fn square_graph(dtype: DType, elements: usize) -> Graph {
    let mut graph = Graph::new();
    let x = graph.source("piece", [elements], dtype, TensorClass::Gradient);
    graph.apply("squares", Op::SumOfSquares { x }).expect("a gradient is of floats");
    graph
}

/// The sum of this many partial sums.
pub(super) fn partial_graph(count: usize) -> Graph {
    let mut graph = Graph::new();
    let shape = Shape::from([count]);
    let partials = graph.source("partials", shape, DType::F32, TensorClass::Activation);
    graph.apply("sum", Op::SumOfPartials { partials }).expect("they are f32");
    graph
}

/// One value where it lies.
fn operand(bound: Bound) -> Operand {
    Operand { value: bound.first, offset: bound.offset }
}
