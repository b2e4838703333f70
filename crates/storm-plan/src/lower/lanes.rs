//! Lanes of a step: each accumulates gradients by itself. The lanes of a group are added in f32 in their order, then the sums of groups
//! in theirs, which is the gradient of the step.
//!
//! The first group is added straight to the sum of groups, which it begins. Others have a sum of their own, which is added to that.

use super::emit::{Bound, Emit, Ends, copy_values};
use super::slab::CopyRun;
use super::update::UpdateGroup;
use crate::pack::aligned;
use crate::plan::{GraphId, Operands};
use crate::{Task, TensorKind};
use std::sync::Arc;
use storm_graph::{Block, DType, Graph, Op, TensorClass};

/// Which lane of a rank, and what of the lanes of all ranks that are added with it. Lanes that do the same are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    begins_step: bool,
    ends_step: bool,
    /// Lanes of all ranks that are added with it.
    ranks: usize,
    /// The first so many of these are of the first group.
    in_first: usize,
    /// Whether the rest continues a group.
    continues_group: bool,
    /// How many lanes of the rest there are up to the end of a group; one more than all if it does not end here.
    to_end: usize,
    group_lanes: usize,
}

/// One of the lanes that are added together, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Added {
    /// Whether it is added to the sum of its group and not to the sum of groups.
    to_group: bool,
    /// Whether it begins that sum.
    begins: bool,
    /// Whether the sum of its group is then added to the sum of groups.
    ends_group: bool,
}

impl Added {
    /// Whether it begins a sum.
    pub(super) fn begins(self) -> bool {
        self.begins
    }

    /// Whether the sum of its group is then added to the sum of groups.
    pub(super) fn ends_group(self) -> bool {
        self.ends_group
    }
}

impl Lane {
    /// The only lane of a rank without others, or of a task that does not train.
    pub(super) const ONLY: Lane = Lane {
        begins_step: true,
        ends_step: true,
        ranks: 1,
        in_first: 1,
        continues_group: false,
        to_end: 0,
        group_lanes: 1,
    };

    /// The lanes of a step in order, each with how often it runs in a row.
    pub(super) fn of_step(task: &Task) -> Vec<(Lane, usize)> {
        let mut runs: Vec<(Lane, usize)> = Vec::new();
        let count = task.lanes.max(1);
        if task.lane_groups == 1 && count > 2 {
            let [first, middle, last] = [0, 1, count - 1].map(|number| Lane::new(task, number));
            return vec![(first, 1), (middle, count - 2), (last, 1)];
        }
        for number in 0..count {
            let lane = Lane::new(task, number);
            match runs.last_mut() {
                Some((last, times)) if *last == lane => *times += 1,
                _ => runs.push((lane, 1)),
            }
        }
        runs
    }

    /// The lanes of a step that differ, the first and the last at their places, each with how often it runs.
    pub(super) fn kinds_of_step(task: &Task) -> Vec<(Lane, usize)> {
        let mut kinds: Vec<(Lane, usize)> = Vec::new();
        for (lane, times) in Lane::of_step(task) {
            match kinds.iter_mut().find(|(known, _)| *known == lane) {
                Some((_, known)) => *known += times,
                None => kinds.push((lane, times)),
            }
        }
        kinds
    }

    fn new(task: &Task, number: usize) -> Lane {
        let (ranks, group_lanes) = (task.rank.ranks as usize, task.group_lanes().max(1));
        let first = number * ranks;
        let in_first = group_lanes.saturating_sub(first).min(ranks);
        let (begins_step, ends_step) = (number == 0, number + 1 == task.lanes.max(1));
        let (continues_group, to_end) = match in_first {
            0 => (!first.is_multiple_of(group_lanes), group_lanes - first % group_lanes),
            _ => (false, group_lanes),
        };
        let rest = ranks - in_first;
        let to_end = if rest == 0 { 0 } else { to_end.min(rest + 1) };
        Lane { begins_step, ends_step, ranks, in_first, continues_group, to_end, group_lanes }
    }

    /// The lanes of all ranks that are added with it, in order.
    pub(super) fn added(self) -> Vec<Added> {
        let mut added = Vec::new();
        for number in 0..self.in_first {
            let begins = self.begins_step && number == 0;
            added.push(Added { to_group: false, begins, ends_group: false });
        }
        let (mut is_open, mut left) = (self.continues_group, self.to_end);
        for _ in self.in_first..self.ranks {
            left -= 1;
            let ends_group = left == 0;
            added.push(Added { to_group: true, begins: !is_open, ends_group });
            is_open = !ends_group;
            left = if ends_group { self.group_lanes } else { left };
        }
        added
    }

    /// Whether it is the only lane of its rank: no sum lasts until another.
    pub(super) fn is_only(self) -> bool {
        self.begins_step && self.ends_step
    }

    /// Whether it begins a step.
    pub(super) fn begins_step(self) -> bool {
        self.begins_step
    }

    /// Whether it ends a step: then the sum of groups becomes the gradient of the step, rounded.
    pub(super) fn ends_step(self) -> bool {
        self.ends_step
    }

    fn touches_sum(self) -> bool {
        self.in_first > 0 || self.added().iter().any(|added| added.ends_group)
    }

    /// Whether the sum of groups so far is read.
    pub(super) fn reads_sum(self) -> bool {
        !self.begins_step && self.touches_sum()
    }

    /// Whether the sum of groups changes, and a later lane reads it.
    pub(super) fn leaves_sum(self) -> bool {
        !self.ends_step && self.touches_sum()
    }

    /// Whether the sum of a group that earlier lanes began is read.
    pub(super) fn reads_group(self) -> bool {
        self.continues_group
    }

    /// Whether a later lane reads the sum of a group.
    pub(super) fn leaves_group(self) -> bool {
        self.added().last().is_some_and(|last| last.to_group && !last.ends_group)
    }
}

/// Nodes of the graph that adds a piece of a lane's gradient.
const BEGIN: u32 = 0;
const ADD: u32 = 1;
const ROUND: u32 = 2;

/// Where the sums of a piece lie.
#[derive(Clone, Copy)]
struct SumPlaces {
    /// Of groups.
    sum: usize,
    /// Of the group.
    group: usize,
}

impl Emit<'_> {
    /// Adds a block's gradients, which are those of a lane now, to the sum of lanes, piece by piece: the sum may be in host
    /// memory.
    pub(super) fn sum_lane(&mut self, block: usize, lane: Lane) {
        let Block { stage, index } = self.lowering.blocks.get(block);
        if lane.is_only() {
            if self.lowering.task.rank.is_shared() {
                self.sum_only_lanes(block, stage, lane);
            }
            return;
        }
        let (sums, group_sums) = (self.layout.sums[stage], self.layout.group_sums[stage]);
        let keeps_groups = self.lowering.task.keeps_group_sums();
        let passing = self.passing_group();
        for number in 0..self.layout.cut.updates[stage].len() {
            let group = self.layout.cut.updates[stage][number].clone();
            if sums.streaming.is_pinned(index) {
                self.add_pieces(block, &group, lane, |run, _, piece| SumPlaces {
                    sum: sums.device(index) + run.offset + piece,
                    group: match keeps_groups {
                        true => group_sums.device(index) + run.offset + piece,
                        false => passing,
                    },
                });
                continue;
            }
            let slot = self.state_turns.next();
            let start = self.layout.state_ring.slot(slot);
            let group_start = start + group.sums_bytes;
            let after = self.state_turns.free_after(slot);
            // Which sums come in and go out: of groups, and of the group.
            let kinds = [
                (sums.host(index), start, lane.reads_sum(), lane.leaves_sum()),
                (group_sums.host(index), group_start, lane.reads_group(), lane.leaves_group()),
            ];
            for (kind, (host, device, reads, _)) in kinds.into_iter().enumerate() {
                for (run, in_slot) in group.sums.iter().filter(|_| reads) {
                    let values = self.sum_values(block, kind, run);
                    let (device, host) = (device + in_slot, host + run.offset);
                    let ends = Ends { kind: TensorKind::Gradients, device, host };
                    self.copy_in(after, ends, run, values);
                }
            }
            self.add_pieces(block, &group, lane, |_, in_slot, piece| SumPlaces {
                sum: start + in_slot + piece,
                group: if keeps_groups { group_start + in_slot + piece } else { passing },
            });
            for (kind, (host, device, _, leaves)) in kinds.into_iter().enumerate() {
                for (run, in_slot) in group.sums.iter().filter(|_| leaves) {
                    let values = self.sum_values(block, kind, run);
                    let (device, host) = (device + in_slot, host + run.offset);
                    let ends = Ends { kind: TensorKind::Gradients, device, host };
                    self.copy_out(ends, run, values);
                }
            }
            let now = self.position();
            self.state_turns.touch(slot, now);
        }
    }

    /// What a copy of sums carries: of groups, or of the group.
    fn sum_values(&self, block: usize, kind: usize, run: &CopyRun) -> Operands {
        let pieces = [&self.values.sums, &self.values.group_sums][kind];
        copy_values(run, |entry, piece| pieces[block][entry].piece(piece))
    }

    /// Where the sum of a group is that does not last until another lane.
    fn passing_group(&self) -> usize {
        self.layout.work + aligned(self.decisions.piece_elements * DType::F32.size_bytes())
    }

    /// The kernels that add some pieces. `at` says where the sums of a piece are, given its copy, the place of that in a slot of the
    /// ring, and that of the piece in the copy.
    fn add_pieces(
        &mut self,
        block: usize,
        group: &UpdateGroup,
        lane: Lane,
        at: impl Fn(&CopyRun, usize, usize) -> SumPlaces,
    ) {
        for (run, in_slot) in &group.sums {
            for &(t, piece, relative) in &run.pieces {
                self.add_piece(block, (t, piece), lane, at(run, *in_slot, relative));
            }
        }
    }

    /// The only lane of each rank: its sum need not last, so it is in the work area.
    fn sum_only_lanes(&mut self, block: usize, stage: usize, lane: Lane) {
        let places = SumPlaces { sum: self.layout.work, group: self.passing_group() };
        for number in 0..self.layout.cut.updates[stage].len() {
            for at in self.layout.cut.updates[stage][number].own.clone() {
                self.add_piece(block, at, lane, places);
            }
        }
    }

    /// Adds a piece of a gradient to its sums: that of this rank and those that others sent, in the order of the ranks, which is
    /// that of their lanes. If machines have added up their lanes, the sums of these.
    fn add_piece(&mut self, block: usize, at: (usize, usize), lane: Lane, places: SumPlaces) {
        let (t, piece) = at;
        let stage = self.lowering.blocks.get(block).stage;
        let place = self.lowering.task.rank;
        let sum = Bound::one(places.sum, self.values.sums[block][t].piece(piece));
        let own = self.gradient_piece(block, t, piece);
        let (dtype, elements) = self.piece_of_gradient(stage, at);
        let graph = self.lane_graph(dtype, elements);
        if place.has_levels() {
            let graph = self.lane_graph(DType::F32, elements);
            for peer in place.peers() {
                let added = match peer == place.rank {
                    true => self.machine_sum(block, at),
                    false => self.received_sum(block, at, peer),
                };
                let begins = lane.begins_step() && peer < place.machine;
                self.add(graph, begins, added, sum);
            }
        } else {
            for (rank, lane) in (0..).zip(lane.added()) {
                let added = match rank == place.rank {
                    true => own,
                    false => self.received_lane(block, at, rank),
                };
                if !lane.to_group {
                    self.add(graph, lane.begins, added, sum);
                    continue;
                }
                let group = self.values.group_sums[block][t].piece(piece);
                let group = Bound::one(places.group, group);
                self.add(graph, lane.begins, added, group);
                if lane.ends_group {
                    let graph = self.lane_graph(DType::F32, elements);
                    self.add(graph, false, group, sum);
                }
            }
        }
        if lane.ends_step() {
            self.compute(graph, ROUND, 0, &[sum], &[own]);
        }
    }

    /// Adds up what the ranks of this machine have of a block's gradients, where this one is to do that.
    pub(super) fn sum_machine(&mut self, block: usize) {
        let (stage, place) = (self.lowering.blocks.get(block).stage, self.lowering.task.rank);
        for at in self.pieces_to_add(block) {
            let (t, piece) = at;
            let (dtype, elements) = self.piece_of_gradient(stage, at);
            let graph = self.lane_graph(dtype, elements);
            let sum = self.machine_sum(block, at);
            for (number, rank) in place.in_machine().enumerate() {
                let added = match rank == place.rank {
                    true => self.gradient_piece(block, t, piece),
                    false => self.received_lane(block, at, rank),
                };
                self.add(graph, number == 0, added, sum);
            }
        }
    }

    fn add(&mut self, graph: GraphId, begins: bool, added: Bound, sum: Bound) {
        match begins {
            true => self.compute(graph, BEGIN, 0, &[added], &[sum]),
            false => self.compute(graph, ADD, 0, &[sum, added], &[sum]),
        }
    }

    /// Dtype and elements of a piece of a gradient.
    fn piece_of_gradient(&self, stage: usize, (t, piece): (usize, usize)) -> (DType, usize) {
        let bytes = self.layout.cut.stages[stage].gradients.entries[t].pieces[piece];
        let dtype = self.lowering.sets[stage].gradients[t].dtype;
        (dtype, bytes / dtype.size_bytes())
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
