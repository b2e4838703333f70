//! The optimizer in pieces: gradient, parameter and state of a piece meet on the device.

use super::emit::{Bound, Emit};
use super::parameters::{Set, SetSlabs};
use super::slab::{CopyRun, Slab};
use crate::pack::aligned;
use crate::plan::GraphId;
use std::collections::{BTreeMap, VecDeque};

/// Whose parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Layer(usize),
    Edge,
}

/// Pieces that are updated together, because their state comes in together.
#[derive(Clone, Debug)]
pub(super) struct UpdateGroup {
    /// Position among the trainable parameters of the set, and the piece.
    pub(super) pieces: Vec<(usize, usize)>,
    /// Copies of state, and where each goes in a slot of the ring.
    runs: Vec<(CopyRun, usize)>,
    pub(super) slot_bytes: usize,
}

/// Updates that are due, spread over other work.
#[derive(Default)]
pub(super) struct Pace {
    due: VecDeque<(Owner, usize)>,
    count: usize,
    /// Seconds of the work they are spread over, and how much of it is done.
    total: f64,
    done: f64,
}

impl Pace {
    pub(super) fn over(due: Vec<(Owner, usize)>, total: f64) -> Pace {
        Pace { count: due.len(), due: due.into(), total, done: 0.0 }
    }

    /// Counts work, and says which updates are due by now.
    pub(super) fn advance(&mut self, seconds: f64) -> Vec<(Owner, usize)> {
        self.done += seconds;
        let share = if self.total > 0.0 { self.done / self.total } else { 1.0 };
        // The first one is given time to arrive, the last one time to be used.
        let by_now = (share * (self.count + 1) as f64) as usize;
        let given = self.count - self.due.len();
        let now = by_now.saturating_sub(given).min(self.due.len());
        self.due.drain(..now).collect()
    }

    pub(super) fn rest(&mut self) -> Vec<(Owner, usize)> {
        self.due.drain(..).collect()
    }
}

/// Cuts the trainable parameters of a set for which `wanted` holds, by their position among the
/// trainable ones, into groups of about one piece's elements.
pub(super) fn groups(
    set: &Set,
    slabs: &SetSlabs,
    piece_elements: usize,
    wanted: impl Fn(usize) -> bool,
) -> Vec<UpdateGroup> {
    let trainable: Vec<usize> = set.trainable().collect();
    let mut groups: Vec<Vec<(usize, usize)>> = Vec::new();
    let mut elements_in_last = usize::MAX;
    for (t, &parameter) in trainable.iter().enumerate().filter(|&(t, _)| wanted(t)) {
        let elements = set.parameters[parameter].tensor.shape.elements();
        for piece in 0..slabs.gradients.entries[t].pieces.len() {
            let size = piece_elements.min(elements - piece * piece_elements);
            if elements_in_last.saturating_add(size) > piece_elements {
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
                    runs.push((run, place));
                }
            }
            UpdateGroup { pieces, runs, slot_bytes }
        })
        .collect()
}

impl Emit<'_> {
    /// All update groups of a layer, or of prologue (`first` parameters) or epilogue (the rest).
    pub(super) fn layer_updates(&self, layer: usize) -> Vec<(Owner, usize)> {
        (0..self.layer_groups.len()).map(|group| (Owner::Layer(layer), group)).collect()
    }

    pub(super) fn prologue_updates(&self) -> Vec<(Owner, usize)> {
        (0..self.prologue_groups).map(|group| (Owner::Edge, group)).collect()
    }

    pub(super) fn epilogue_updates(&self) -> Vec<(Owner, usize)> {
        (self.prologue_groups..self.edge_groups.len()).map(|group| (Owner::Edge, group)).collect()
    }

    /// Updates some pieces: state comes in unless it lives on the device, and goes back out; so does
    /// the parameter.
    pub(super) fn update(&mut self, (owner, index): (Owner, usize)) {
        let is_resident = match owner {
            Owner::Layer(layer) => self.decisions.states.is_pinned(layer),
            Owner::Edge => self.decisions.edge_states_resident,
        };
        let host = self.states_host(owner);
        let slot = (!is_resident).then(|| self.state_ring.next());
        let group = match owner {
            Owner::Layer(layer) => {
                let group = self.layer_groups[index].clone();
                // No earlier than its state: parts that are due later must not hold up those that are
                // due first.
                let after = slot.map_or(0, |slot| self.state_ring.free_after(slot));
                self.fetch_for_update(layer, &group.pieces, index, after);
                group
            }
            Owner::Edge => self.edge_groups[index].clone(),
        };
        // Where each piece of state is now, by entry and piece.
        let mut state_places: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        match slot {
            None => {
                let (base, slab) = (self.states_device(owner), self.states_slab(owner));
                for (run, _) in &group.runs {
                    for &(entry, piece, _) in &run.pieces {
                        state_places.insert((entry, piece), base + slab.piece_offset(entry, piece));
                    }
                }
            }
            Some(slot) => {
                let start = self.layout.state_ring.slot(slot);
                let after = self.state_ring.free_after(slot);
                for (run, place) in &group.runs {
                    for &(entry, piece, relative) in &run.pieces {
                        state_places.insert((entry, piece), start + place + relative);
                    }
                    let values = |entry: usize, piece: usize| self.state_value(owner, entry, piece);
                    let values = self.copy_values(run, values);
                    self.copy_in(after, start + place, host + run.offset, run.size_bytes, values);
                }
            }
        }
        for &(t, piece) in &group.pieces {
            self.update_piece(owner, t, piece, &state_places);
        }
        if let Some(slot) = slot {
            let start = self.layout.state_ring.slot(slot);
            for (run, place) in &group.runs {
                let values = |entry: usize, piece: usize| self.state_value(owner, entry, piece);
                let values = self.copy_values(run, values);
                self.copy_out(start + place, host + run.offset, run.size_bytes, values);
            }
            let now = self.position();
            self.state_ring.touch(slot, now);
        }
        if let Owner::Layer(layer) = owner {
            self.touch_weights(layer);
            self.touch_gradients(layer);
            let set = &self.lowering.parameters.layer;
            let trainable: Vec<usize> = set.trainable().collect();
            let pieces: Vec<(usize, usize)> =
                group.pieces.iter().map(|&(t, piece)| (trainable[t], piece)).collect();
            self.write_back_weights(layer, &pieces);
        }
    }

    fn update_piece(
        &mut self,
        owner: Owner,
        t: usize,
        piece: usize,
        state_places: &BTreeMap<(usize, usize), usize>,
    ) {
        let set = self.set(owner);
        let trainable: Vec<usize> = set.trainable().collect();
        let parameter = set.parameters[trainable[t]].clone();
        let kinds = set.kinds();
        let graph_id = self.update_graph(owner, t, piece);
        let graph = self.plan.graphs[graph_id.0 as usize].clone();
        let name = &parameter.tensor.name;
        let (weights, gradients) = (self.weights_slab(owner), self.gradients_slab(owner));
        let weight_offset = self.weights_place(owner) + weights.piece_offset(trainable[t], piece);
        let gradient_offset = self.gradients_place(owner) + gradients.piece_offset(t, piece);
        let mut bound: Vec<Option<Bound>> = vec![None; graph.tensors().len()];
        for id in graph.ids().filter(|&id| graph.producer(id).is_none()) {
            let tensor = graph.tensor(id);
            let suffix = tensor.name.strip_prefix(name.as_str());
            bound[id.index()] = Some(match suffix {
                Some("") => {
                    Bound::one(weight_offset, self.weight_value(owner, trainable[t], piece))
                }
                Some(".grad") => Bound::one(gradient_offset, self.gradient_value(owner, t, piece)),
                Some(suffix) if kinds.iter().any(|kind| suffix[1..] == **kind) => {
                    let kind = kinds.iter().position(|kind| suffix[1..] == **kind);
                    let entry = kind.unwrap_or(0) * trainable.len() + t;
                    Bound::one(state_places[&(entry, piece)], self.state_value(owner, entry, piece))
                }
                _ => self.scalar(&tensor.name),
            });
        }
        // Every output lies over its operand.
        let node = &graph.nodes()[0];
        for (operand, output) in node.op.in_place() {
            bound[node.outputs[output].index()] = bound[operand.index()];
        }
        let layer = match owner {
            Owner::Layer(layer) => layer as u16,
            Owner::Edge => 0,
        };
        let operands: Vec<_> = node.op.operands().into_iter().map(|(_, id)| id).collect();
        self.compute_bound(graph_id, 0, layer, &operands, &node.outputs, &bound);
    }

    fn update_graph(&mut self, owner: Owner, t: usize, piece: usize) -> GraphId {
        let is_edge = owner == Owner::Edge;
        if let Some(&id) = self.update_graphs.get(&(is_edge, t, piece)) {
            return id;
        }
        let set = self.set(owner);
        let parameter = set.trainable().nth(t).expect("one of the trainable");
        let elements = set.parameters[parameter].tensor.shape.elements();
        let rule = set.parameters[parameter].rule.expect("trainable");
        let first = piece * self.decisions.piece_elements;
        let size = self.decisions.piece_elements.min(elements - first);
        let graph = self.lowering.task.updates[rule].piece(first, size);
        let id = GraphId(self.plan.graphs.len() as u32);
        self.plan.graphs.push(graph.expect("checked when the lowering was made"));
        self.update_graphs.insert((is_edge, t, piece), id);
        id
    }

    fn states_slab(&self, owner: Owner) -> &Slab {
        match owner {
            Owner::Layer(_) => &self.layout.cut.layer.states,
            Owner::Edge => &self.layout.cut.edge.states,
        }
    }

    fn weights_slab(&self, owner: Owner) -> &Slab {
        match owner {
            Owner::Layer(_) => &self.layout.cut.layer.weights,
            Owner::Edge => &self.layout.cut.edge.weights,
        }
    }

    fn gradients_slab(&self, owner: Owner) -> &Slab {
        match owner {
            Owner::Layer(_) => &self.layout.cut.layer.gradients,
            Owner::Edge => &self.layout.cut.edge.gradients,
        }
    }

    /// Where streamed state waits.
    pub(super) fn states_host(&self, owner: Owner) -> usize {
        match owner {
            Owner::Layer(layer) => {
                let beyond = layer.saturating_sub(self.decisions.states.pinned);
                self.layout.states.host + beyond * self.layout.states.slot_bytes
            }
            Owner::Edge => self.layout.edge_states,
        }
    }

    /// Where resident state lies.
    pub(super) fn states_device(&self, owner: Owner) -> usize {
        match owner {
            Owner::Layer(layer) => {
                self.layout.states.device + layer * self.layout.states.slot_bytes
            }
            Owner::Edge => self.layout.edge_states,
        }
    }
}
