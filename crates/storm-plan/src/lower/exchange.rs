//! What the ranks of a step send each other: gradients of lanes to the owners of their pieces, sums of squares, and updated weights.

use super::emit::{Bound, Emit, Pieces};
use super::residency::Class;
use super::shards::{Copies, partials_bytes};
use crate::plan::{GraphId, Operand};
use crate::{CollectiveKind, Moved, RankPlace, TensorKind};
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

    /// What another rank of this machine has sent of a piece that this one adds up.
    pub(super) fn received_lane(&self, block: usize, at: (usize, usize), from: u32) -> Bound {
        let of_block = &self.layout.cut.received[self.lowering.blocks.get(block).stage];
        let number = number_of(from, self.lowering.task.rank, CollectiveKind::Exchange);
        let values = &self.values.received[block].lanes;
        self.copy_of(values, &of_block.lanes, self.layout.received[0], at, number)
    }

    /// What this machine has of a piece that this rank adds up.
    pub(super) fn machine_sum(&self, block: usize, at: (usize, usize)) -> Bound {
        let of_block = &self.layout.cut.received[self.lowering.blocks.get(block).stage];
        let values = &self.values.received[block].machine;
        self.copy_of(values, &of_block.machine, self.layout.received[1], at, 0)
    }

    /// What another machine has of an own piece.
    pub(super) fn received_sum(&self, block: usize, at: (usize, usize), from: u32) -> Bound {
        let of_block = &self.layout.cut.received[self.lowering.blocks.get(block).stage];
        let number = number_of(from, self.lowering.task.rank, CollectiveKind::ExchangeSums);
        let values = &self.values.received[block].sums;
        self.copy_of(values, &of_block.sums, self.layout.received[2], at, number)
    }

    fn copy_of(
        &self,
        values: &[Vec<Option<Pieces>>],
        copies: &Copies,
        start: usize,
        at: (usize, usize),
        number: usize,
    ) -> Bound {
        let value = values[at.0][at.1].expect("one of the pieces").piece(number);
        let bytes = self.plan.value(value).size_bytes;
        Bound::one(start + copies.place(at, number, bytes), value)
    }

    /// Positions of the pieces of a block's own gradients, in order.
    fn owned_pieces(&self, block: usize) -> Vec<(usize, usize)> {
        let stage = self.lowering.blocks.get(block).stage;
        let slab = &self.layout.cut.stages[stage].gradients;
        let count = self.lowering.sets[stage].trainable().count();
        let pieces = |t: usize| (0..slab.entries[t].pieces.len()).map(move |piece| (t, piece));
        (0..count).flat_map(pieces).collect()
    }

    /// Those that this rank adds up for its machine.
    pub(super) fn pieces_to_add(&self, block: usize) -> Vec<(usize, usize)> {
        let (stage, shards) = (self.lowering.blocks.get(block).stage, &self.layout.cut.shards);
        let all = self.owned_pieces(block).into_iter();
        all.filter(|&(t, piece)| shards.adds(stage, t, piece)).collect()
    }

    /// Sends the pieces of a block's gradients to the ranks that add them up. Returns whether there was anything to send.
    pub(super) fn exchange_gradients(&mut self, block: usize) -> bool {
        if !self.lowering.shares_step() {
            return false;
        }
        let (stage, place) = (self.lowering.blocks.get(block).stage, self.lowering.task.rank);
        let mut moved = Vec::new();
        for at in self.owned_pieces(block) {
            let owner = self.layout.cut.shards.owner(stage, at.0, at.1);
            let (mut sent, mut received) = (None, Vec::new());
            if place.adder(owner) == place.rank {
                let others = place.in_machine().filter(|&other| other != place.rank);
                let from = |from| (from, operand(self.received_lane(block, at, from)));
                received = others.map(from).collect();
            } else {
                sent = Some(operand(self.gradient_piece(block, at.0, at.1)));
            }
            moved.push(Moved { owner, sent, received });
        }
        let is_any = !moved.is_empty();
        if is_any {
            self.collective(CollectiveKind::Exchange, TensorKind::Gradients, moved);
        }
        is_any
    }

    /// Sends what this machine has of the pieces of a block's gradients to their owners. Every rank takes part, even one that has added
    /// up nothing, so that all have the same collectives.
    pub(super) fn exchange_sums(&mut self, block: usize) {
        let (stage, place) = (self.lowering.blocks.get(block).stage, self.lowering.task.rank);
        let mut moved = Vec::new();
        for at in self.pieces_to_add(block) {
            let owner = self.layout.cut.shards.owner(stage, at.0, at.1);
            let (mut sent, mut received) = (None, Vec::new());
            if owner == place.rank {
                let others = place.peers().filter(|&other| other != place.rank);
                let from = |from| (from, operand(self.received_sum(block, at, from)));
                received = others.map(from).collect();
            } else {
                sent = Some(operand(self.machine_sum(block, at)));
            }
            moved.push(Moved { owner, sent, received });
        }
        self.collective(CollectiveKind::ExchangeSums, TensorKind::Gradients, moved);
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
        if !moved.is_empty() {
            self.collective(CollectiveKind::Gather, TensorKind::Weights, moved);
        }
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
        if !moved.is_empty() {
            self.collective(CollectiveKind::Gather, TensorKind::Gradients, moved);
        }
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

/// The number of a rank among those that send to this one.
fn number_of(from: u32, place: RankPlace, kind: CollectiveKind) -> usize {
    let members = kind.members(place);
    let others = members.iter().filter(|&&other| other != place.rank);
    others.into_iter().position(|&other| other == from).expect("one of the others")
}

/// One value where it lies.
fn operand(bound: Bound) -> Operand {
    Operand { value: bound.first, offset: bound.offset }
}
