//! Lanes of a step: each accumulates gradients by itself, and their sum in f32, in order, is the gradient of the step.

use super::emit::{Bound, Emit, Ends, copy_values};
use super::update::UpdateGroup;
use crate::TensorKind;
use crate::plan::GraphId;
use std::sync::Arc;
use storm_graph::{Block, DType, Graph, Op, TensorClass};

/// Which lane of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    /// There is no other: its gradient is that of the step.
    Only,
    /// Its gradient begins the sum.
    First,
    /// Its gradient is added to the sum.
    Middle,
    /// Its gradient is added to the sum, which then becomes the gradient of the step, rounded.
    Last,
}

impl Lane {
    /// The lanes of a step in order, each with how often it runs in a row.
    pub(super) fn of_step(lanes: usize) -> Vec<(Lane, usize)> {
        match lanes {
            0 | 1 => vec![(Lane::Only, 1)],
            2 => vec![(Lane::First, 1), (Lane::Last, 1)],
            _ => vec![(Lane::First, 1), (Lane::Middle, lanes - 2), (Lane::Last, 1)],
        }
    }

    /// Whether it begins a step.
    pub(super) fn begins_step(self) -> bool {
        matches!(self, Lane::Only | Lane::First)
    }

    /// Whether it ends a step.
    pub(super) fn ends_step(self) -> bool {
        matches!(self, Lane::Only | Lane::Last)
    }

    /// Whether the sum of earlier lanes is read.
    pub(super) fn reads_sum(self) -> bool {
        matches!(self, Lane::Middle | Lane::Last)
    }

    /// Whether a later lane reads the sum.
    pub(super) fn leaves_sum(self) -> bool {
        matches!(self, Lane::First | Lane::Middle)
    }
}

/// Nodes of the graph that adds a piece of a lane's gradient.
const BEGIN: u32 = 0;
const ADD: u32 = 1;
const ROUND: u32 = 2;

impl Emit<'_> {
    /// Adds a block's gradients, which are those of a lane now, to the sum of lanes, piece by piece: the sum may be in host
    /// memory.
    pub(super) fn sum_lane(&mut self, block: usize, lane: Lane) {
        let Block { stage, index } = self.lowering.blocks.get(block);
        if lane == Lane::Only {
            if self.lowering.task.rank.is_shared() {
                self.sum_only_lanes(block, stage);
            }
            return;
        }
        let sums = self.layout.sums[stage];
        let is_pinned = sums.streaming.is_pinned(index);
        for number in 0..self.layout.cut.updates[stage].len() {
            let group = self.layout.cut.updates[stage][number].clone();
            if is_pinned {
                self.add_pieces(block, &group, lane, |place| sums.device(index) + place.in_slab);
                continue;
            }
            let slot = self.state_turns.next();
            let start = self.layout.state_ring.slot(slot);
            let after = self.state_turns.free_after(slot);
            let ends = |run: usize| Ends {
                kind: TensorKind::Gradients,
                device: start + group.sums[run].1,
                host: sums.host(index) + group.sums[run].0.offset,
            };
            let values = |emit: &Self, run: usize| {
                let pieces = &emit.values.sums[block];
                copy_values(&group.sums[run].0, |entry, piece| pieces[entry].piece(piece))
            };
            if lane.reads_sum() {
                for run in 0..group.sums.len() {
                    let values = values(self, run);
                    self.copy_in(after, ends(run), &group.sums[run].0, values);
                }
            }
            self.add_pieces(block, &group, lane, |place| start + place.in_slot);
            if lane.leaves_sum() {
                for run in 0..group.sums.len() {
                    let values = values(self, run);
                    self.copy_out(ends(run), &group.sums[run].0, values);
                }
            }
            let now = self.position();
            self.state_turns.touch(slot, now);
        }
    }

    /// The kernels that add some pieces, whose sums are where `at` says.
    fn add_pieces(
        &mut self,
        block: usize,
        group: &UpdateGroup,
        lane: Lane,
        at: impl Fn(SumPlace) -> usize,
    ) {
        for (run, in_slot) in &group.sums {
            for &(t, piece, relative) in &run.pieces {
                let place =
                    SumPlace { in_slab: run.offset + relative, in_slot: in_slot + relative };
                self.add_piece(block, (t, piece), lane, at(place));
            }
        }
    }

    /// The only lane of each rank: its sum need not last, so it is in the work area.
    fn sum_only_lanes(&mut self, block: usize, stage: usize) {
        for number in 0..self.layout.cut.updates[stage].len() {
            for at in self.layout.cut.updates[stage][number].own.clone() {
                self.add_piece(block, at, Lane::Only, self.layout.work);
            }
        }
    }

    /// Adds a piece of a gradient to the sum at `place`: that of this rank and those that others sent, in the order of the ranks,
    /// which is that of their lanes.
    fn add_piece(&mut self, block: usize, at: (usize, usize), lane: Lane, place: usize) {
        let (t, piece) = at;
        let stage = self.lowering.blocks.get(block).stage;
        let sum = Bound::one(place, self.values.sums[block][t].piece(piece));
        let own = self.gradient_piece(block, t, piece);
        let bytes = self.layout.cut.stages[stage].gradients.entries[t].pieces[piece];
        let dtype = self.lowering.sets[stage].gradients[t].dtype;
        let graph = self.lane_graph(dtype, bytes / dtype.size_bytes());
        let mut adds = lane.reads_sum();
        for rank in 0..self.lowering.task.rank.ranks {
            let added = match rank == self.lowering.task.rank.rank {
                true => own,
                false => self.received_piece(block, t, piece, rank),
            };
            match adds {
                false => self.compute(graph, BEGIN, 0, &[added], &[sum]),
                true => self.compute(graph, ADD, 0, &[sum, added], &[sum]),
            }
            adds = true;
        }
        if !lane.leaves_sum() {
            self.compute(graph, ROUND, 0, &[sum], &[own]);
        }
    }

    fn lane_graph(&mut self, dtype: DType, elements: usize) -> GraphId {
        if let Some(&id) = self.lane_graphs.get(&(dtype, elements)) {
            return id;
        }
        let id = GraphId(self.plan.graphs.len() as u32);
        self.plan.graphs.push(Arc::new(lane_graph(dtype, elements)));
        self.lane_graphs.insert((dtype, elements), id);
        id
    }
}

/// Where a piece of a sum lies.
#[derive(Clone, Copy)]
struct SumPlace {
    /// Relative to the slab of its block.
    in_slab: usize,
    /// Relative to a slot of the ring.
    in_slot: usize,
}

/// Begins a sum, adds to it, and rounds it.
pub(super) fn lane_graph(dtype: DType, elements: usize) -> Graph {
    let mut graph = Graph::new();
    let lane = graph.source("lane", [elements], dtype, TensorClass::Gradient);
    let sum = graph.source("sum", [elements], DType::F32, TensorClass::Gradient);
    let mut apply = |name: &str, op| graph.apply(name, op).expect("all have one shape")[0];
    apply("begin", Op::Convert { x: lane, dtype: DType::F32 });
    let sum = apply("add", Op::Accumulate { sum, x: lane });
    apply("round", Op::Convert { x: sum, dtype });
    graph
}
