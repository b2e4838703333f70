//! Optimizer updates in pieces: gradient, parameter and state of a piece are on the device together.

use super::disk::Staged;
use super::emit::{Bound, Emit, Ends, copy_values};
use super::homes::Home;
use super::parameters::{Set, SetSlabs};
use super::residency::Class;
use super::shards::Shards;
use super::slab::CopyRun;
use crate::TensorKind;
use crate::pack::aligned;
use crate::plan::{GraphId, Operands};
use std::collections::{BTreeMap, VecDeque};
use storm_graph::Block;

/// One group of a block's updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Update {
    block: usize,
    /// Index among the groups of its stage.
    group: usize,
}

/// Pieces that are updated together, because their state is fetched together.
#[derive(Clone, Debug)]
pub(super) struct UpdateGroup {
    /// Index among the set's trainable parameters, and the piece.
    pub(super) pieces: Vec<(usize, usize)>,
    /// The pieces that this rank owns and updates.
    pub(super) own: Vec<(usize, usize)>,
    pub(super) runs: Vec<StateRun>,
    pub(super) slot_bytes: usize,
    /// Copies of the sums of lanes, with their offsets in a slot of the device's ring; empty if the rank has one lane.
    pub(super) sums: Vec<(CopyRun, usize)>,
    pub(super) sums_bytes: usize,
}

/// A copy of state.
#[derive(Clone, Debug)]
pub(super) struct StateRun {
    /// Index of the kind of state.
    pub(super) kind: usize,
    pub(super) copy: CopyRun,
    /// Its offset in a slot of the device's ring.
    pub(super) place: usize,
}

/// Spreads updates evenly over other work.
pub(super) struct Pace<T = Update> {
    due: VecDeque<T>,
    count: usize,
    /// Time of the work that updates are spread over, and how much of it is done.
    total: f64,
    done: f64,
}

impl<T> Pace<T> {
    pub(super) fn over(due: Vec<T>, total: f64) -> Pace<T> {
        Pace { count: due.len(), due: due.into(), total, done: 0.0 }
    }

    /// Advances by some work, and returns the updates that are now due.
    pub(super) fn advance(&mut self, seconds: f64) -> Vec<T> {
        self.done += seconds;
        let share = if self.total > 0.0 { self.done / self.total } else { 1.0 };
        // Give the first one time to arrive, and the last one time to be used.
        let by_now = (share * (self.count + 1) as f64) as usize;
        let given = self.count - self.due.len();
        let now = by_now.saturating_sub(given).min(self.due.len());
        self.due.drain(..now).collect()
    }

    pub(super) fn rest(&mut self) -> Vec<T> {
        self.due.drain(..).collect()
    }
}

/// Splits the trainable parameters of a set into groups of about one piece per rank. All ranks have the same groups.
pub(super) fn groups(
    stage: usize,
    set: &Set,
    slabs: &SetSlabs,
    piece_elements: usize,
    shards: &Shards,
) -> Vec<UpdateGroup> {
    let group_elements = piece_elements.saturating_mul(shards.place.ranks as usize);
    let trainable: Vec<usize> = set.trainable().collect();
    let mut groups: Vec<Vec<(usize, usize)>> = Vec::new();
    let mut elements_in_last = usize::MAX;
    for (t, &parameter) in trainable.iter().enumerate() {
        let elements = set.parameters[parameter].tensor.shape.elements();
        for piece in 0..slabs.gradients.entries[t].pieces.len() {
            let size = piece_elements.min(elements - piece * piece_elements);
            if elements_in_last.saturating_add(size) > group_elements {
                groups.push(Vec::new());
                elements_in_last = 0;
            }
            elements_in_last += size;
            groups.last_mut().expect("just pushed").push((t, piece));
        }
    }
    let kinds = set.kinds().len();
    groups
        .into_iter()
        .map(|pieces| {
            let mut runs = Vec::new();
            let mut slot_bytes = 0;
            for kind in 0..kinds {
                let entries = pieces.iter().map(|&(t, piece)| (kind * trainable.len() + t, piece));
                let stored = entries.filter(|&(e, _)| slabs.states.entries[e].size_bytes > 0);
                for run in slabs.states.runs_of(stored) {
                    let place = slot_bytes;
                    slot_bytes += aligned(run.size_bytes);
                    runs.push(StateRun { kind, copy: run, place });
                }
            }
            let (mut sums, mut sums_bytes) = (Vec::new(), 0);
            if slabs.sums.size_bytes > 0 {
                for run in slabs.sums.runs_of(pieces.iter().copied()) {
                    let place = sums_bytes;
                    sums_bytes += aligned(run.size_bytes);
                    sums.push((run, place));
                }
            }
            let is_own = |&&(t, piece): &&(usize, usize)| shards.is_own(stage, t, piece);
            let own = pieces.iter().filter(is_own).copied().collect();
            UpdateGroup { pieces, own, runs, slot_bytes, sums, sums_bytes }
        })
        .collect()
}

impl Emit<'_> {
    /// All updates of a block.
    pub(super) fn updates(&self, block: usize) -> Vec<Update> {
        let stage = self.lowering.blocks.get(block).stage;
        let groups = 0..self.layout.cut.updates[stage].len();
        groups.map(|group| Update { block, group }).collect()
    }

    /// Updates some pieces. Fetches state that is not on the device and writes it back, together with the parameter.
    /// Receives the pieces that other ranks own.
    pub(super) fn update(&mut self, Update { block, group: number }: Update) {
        let Block { stage, index } = self.lowering.blocks.get(block);
        let states = self.layout.states[stage];
        let slot = (!states.streaming.is_pinned(index)).then(|| self.state_turns.next());
        let group = self.layout.cut.updates[stage][number].clone();
        // Not before its state's slot is free: copies for later updates must not delay those due first.
        let after = slot.map_or(0, |slot| self.state_turns.free_after(slot));
        self.fetch_for_update(block, &group.own, number, after);
        let homes = self.state_homes(block, number);
        let staged = homes.iter().any(|home| matches!(home, Home::Disk { .. }));
        let staged = staged.then(|| self.stage_state(block, number));
        // The current place of each piece of state, by entry and piece.
        let mut state_places: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let slot = slot.map(|slot| (slot, self.layout.state_ring.slot(slot)));
        match slot {
            None => {
                let slab = &self.layout.cut.stages[stage].states;
                for &(entry, piece, _) in group.runs.iter().flat_map(|run| &run.copy.pieces) {
                    let place = states.device(index) + slab.piece_offset(entry, piece);
                    state_places.insert((entry, piece), place);
                }
            }
            Some((_, start)) => {
                for (run, &home) in group.runs.iter().zip(&homes) {
                    for &(entry, piece, relative) in &run.copy.pieces {
                        state_places.insert((entry, piece), start + run.place + relative);
                    }
                    let ends = self.state_ends(block, home, staged, start + run.place);
                    let values = self.state_values(block, &run.copy);
                    self.copy_in(after, ends, &run.copy, values);
                }
            }
        }
        for &(t, piece) in &group.own {
            self.update_piece(block, t, piece, &state_places);
        }
        self.gather_weights(block, &group.pieces);
        if let Some((slot, start)) = slot {
            for (run, &home) in group.runs.iter().zip(&homes) {
                let ends = self.state_ends(block, home, staged, start + run.place);
                let values = self.state_values(block, &run.copy);
                self.copy_out(ends, &run.copy, values);
            }
            let now = self.position();
            self.state_turns.touch(slot, now);
        }
        if let Some(staged) = staged {
            self.store_state(block, number, staged);
        }
        for class in Class::ALL {
            self.touch(class, block);
        }
        let trainable: Vec<usize> = self.lowering.sets[stage].trainable().collect();
        let pieces: Vec<(usize, usize)> =
            group.pieces.iter().map(|&(t, piece)| (trainable[t], piece)).collect();
        self.write_back_weights(block, &pieces);
    }

    /// The values in a copy of state.
    pub(super) fn state_values(&self, block: usize, run: &CopyRun) -> Operands {
        let pieces = &self.values.states[block];
        copy_values(run, |entry, piece| pieces[entry].piece(piece))
    }

    /// Both ends of a copy of state: its place on the device, and its place in host memory or its staging slot.
    fn state_ends(&self, block: usize, home: Home, staged: Option<Staged>, device: usize) -> Ends {
        let host = match (home, staged) {
            (Home::Disk { slot, .. }, Some(staged)) => staged.start + slot,
            (Home::Host { offset }, _) => self.state_home(block).host + offset,
            (Home::Disk { .. }, None) => unreachable!("it was staged"),
        };
        Ends { kind: TensorKind::OptimizerState, device, host }
    }

    fn update_piece(
        &mut self,
        block: usize,
        t: usize,
        piece: usize,
        state_places: &BTreeMap<(usize, usize), usize>,
    ) {
        let Block { stage, index } = self.lowering.blocks.get(block);
        let set = &self.lowering.sets[stage];
        let trainable: Vec<usize> = set.trainable().collect();
        let kinds = set.kinds();
        let graph_id = self.update_graph(stage, t, piece);
        let graph = self.plan.graphs[graph_id.0 as usize].clone();
        let name = &set.parameters[trainable[t]].tensor.name;
        let slabs = &self.layout.cut.stages[stage];
        let weight_offset =
            self.place(Class::Weights, block) + slabs.weights.piece_offset(trainable[t], piece);
        let gradient_offset =
            self.place(Class::Gradients, block) + slabs.gradients.piece_offset(t, piece);
        let mut bound: Vec<Option<Bound>> = vec![None; graph.tensors().len()];
        for id in graph.ids().filter(|&id| graph.producer(id).is_none()) {
            let tensor = graph.tensor(id);
            let suffix = tensor.name.strip_prefix(name.as_str());
            bound[id.index()] = Some(match suffix {
                Some("") => {
                    Bound::one(weight_offset, self.values.weights[block][trainable[t]].piece(piece))
                }
                Some(".grad") => {
                    Bound::one(gradient_offset, self.values.gradients[block][t].piece(piece))
                }
                Some(suffix) if kinds.iter().any(|kind| suffix[1..] == **kind) => {
                    let kind = kinds.iter().position(|kind| suffix[1..] == **kind);
                    let entry = kind.unwrap_or(0) * trainable.len() + t;
                    let value = self.values.states[block][entry].piece(piece);
                    Bound::one(state_places[&(entry, piece)], value)
                }
                _ => self.scalar(&tensor.name),
            });
        }
        // Every output overwrites its operand.
        let node = &graph.nodes()[0];
        for (operand, output) in node.op.in_place() {
            bound[node.outputs[output].index()] = bound[operand.index()];
        }
        let all = |ids: &mut dyn Iterator<Item = storm_graph::TensorId>| -> Vec<Bound> {
            ids.map(|id| bound[id.index()].expect("every source and output is bound")).collect()
        };
        let reads = all(&mut node.op.operands().into_iter().map(|(_, id)| id));
        let writes = all(&mut node.outputs.iter().copied());
        self.compute(graph_id, 0, index, &reads, &writes);
    }

    fn update_graph(&mut self, stage: usize, t: usize, piece: usize) -> GraphId {
        if let Some(&id) = self.update_graphs.get(&(stage, t, piece)) {
            return id;
        }
        let set = &self.lowering.sets[stage];
        let parameter = set.trainable().nth(t).expect("one of the trainable");
        let elements = set.parameters[parameter].tensor.shape.elements();
        let rule = set.parameters[parameter].rule.expect("trainable");
        let first = piece * self.decisions.piece_elements;
        let size = self.decisions.piece_elements.min(elements - first);
        let id = GraphId(self.plan.graphs.len() as u32);
        let graph = self.lowering.update_graph(rule, (first, size), self.decisions.update);
        self.plan.graphs.push(graph);
        self.update_graphs.insert((stage, t, piece), id);
        id
    }
}
