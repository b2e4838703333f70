//! The plan under construction: values, the instructions of the current segment, and what is in the
//! rings.

use super::Lowering;
use super::layout::Layout;
use super::parameters::Set;
use super::slab::{CopyRun, Slab};
use super::update::{Owner, UpdateGroup, groups};
use super::variant::{Pass, Variant};
use crate::Decisions;
use crate::decisions::{Streaming, UpdateTime};
use crate::plan::{
    Compute, Copy, Direction, GraphId, Instruction, InstructionId, Operand, Plan, Segment,
    SegmentId, Value, ValueId, Work,
};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use storm_graph::{TensorClass, TensorId};

/// A tensor at an offset: one value or several consecutive ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub(super) offset: usize,
    pub(super) first: ValueId,
    pub(super) count: u32,
}

impl Bound {
    pub(super) fn one(offset: usize, value: ValueId) -> Bound {
        Bound { offset, first: value, count: 1 }
    }
}

/// Consecutive values: the pieces of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    pub(super) first: ValueId,
    pub(super) count: u32,
}

impl Pieces {
    pub(super) fn at(self, offset: usize) -> Bound {
        Bound { offset, first: self.first, count: self.count }
    }

    pub(super) fn piece(self, index: usize) -> ValueId {
        ValueId(self.first.0 + index as u32)
    }
}

/// What the host must know of a copy, once its position is known.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mark {
    None,
    Input(usize),
    Result(usize),
}

/// Which layers are in the slots of a class, and until when each slot is in use.
#[derive(Clone, Debug)]
struct Stream {
    streaming: Streaming,
    contents: Vec<Option<usize>>,
    free_after: Vec<usize>,
}

/// Slots that are taken in turn.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    next: usize,
    free_after: Vec<usize>,
}

impl Turns {
    pub(super) fn new(slots: usize) -> Turns {
        Turns { next: 0, free_after: vec![0; slots.max(1)] }
    }

    pub(super) fn next(&mut self) -> usize {
        let slot = self.next % self.free_after.len();
        self.next += 1;
        slot
    }

    pub(super) fn free_after(&self, slot: usize) -> usize {
        self.free_after[slot]
    }

    pub(super) fn touch(&mut self, slot: usize, position: usize) {
        self.free_after[slot] = position;
    }

    fn begin_segment(&mut self) {
        self.free_after.fill(0);
        self.next = 0;
    }
}

impl Stream {
    fn new(streaming: Streaming, layers: usize, lowest_first: bool) -> Stream {
        let slots = streaming.slots();
        let mut contents = vec![None; slots];
        let mut order: Vec<usize> = (0..layers).collect();
        if lowest_first {
            order.reverse();
        }
        // The last to use a slot is what it holds.
        for layer in order {
            contents[streaming.slot(layer)] = Some(layer);
        }
        Stream { streaming, contents, free_after: vec![0; slots] }
    }
}

/// The values of everything that is not a temporary.
pub(super) struct Values {
    pub(super) inputs: Vec<Vec<ValueId>>,
    pub(super) scalars: BTreeMap<String, ValueId>,
    pub(super) losses: Vec<ValueId>,
    /// By layer and parameter.
    pub(super) weights: Vec<Vec<Pieces>>,
    pub(super) gradients: Vec<Vec<Pieces>>,
    pub(super) states: Vec<Vec<Pieces>>,
    pub(super) edge_weights: Vec<Pieces>,
    pub(super) edge_gradients: Vec<Pieces>,
    pub(super) edge_states: Vec<Pieces>,
    /// By layer, micro-batch and slab entry.
    pub(super) kept: Vec<Vec<Vec<Pieces>>>,
    pub(super) offloaded: Vec<Vec<Vec<Pieces>>>,
    /// By layer (and one beyond) and micro-batch.
    pub(super) boundary: Vec<Vec<Pieces>>,
    /// Gradients of layer inputs, by micro-batch, of even and odd layers.
    pub(super) carry: Vec<[ValueId; 2]>,
    pub(super) exports: Vec<BTreeMap<String, ValueId>>,
    pub(super) prologue_kept: Vec<BTreeMap<TensorId, ValueId>>,
}

pub(super) struct Emit<'a> {
    pub(super) lowering: &'a Lowering<'a>,
    pub(super) decisions: &'a Decisions,
    pub(super) layout: Layout,
    pub(super) plan: Plan,
    pub(super) values: Values,
    pub(super) layer_groups: Vec<UpdateGroup>,
    pub(super) edge_groups: Vec<UpdateGroup>,
    /// How many of `edge_groups` are the prologue's.
    pub(super) prologue_groups: usize,
    pub(super) update_graphs: BTreeMap<(bool, usize, usize), GraphId>,
    pub(super) state_ring: Turns,
    pub(super) activation_turns: Turns,
    pub(super) boundary_turns: Turns,
    pub(super) norm_graph: GraphId,
    variants: Vec<(Arc<Variant>, GraphId)>,
    /// By graph and tensor.
    temporaries: HashMap<(u32, usize), ValueId>,
    weights: Stream,
    gradients: Stream,
    /// What each copy of a fetch of a layer's weights covers.
    weight_runs: Vec<Range<usize>>,
    /// After how many kernels the weights and gradients of the layer that is being updated may come
    /// in; none if they are there.
    arriving: (Option<usize>, Option<usize>),
    computes: Vec<Instruction>,
    /// After how many of the segment's kernels each copy is given out.
    copies: Vec<(usize, Instruction, Mark)>,
    /// When host memory was last written in this segment, by offset.
    host_written: HashMap<usize, usize>,
}

impl<'a> Emit<'a> {
    pub(super) fn new(lowering: &'a Lowering<'a>, decisions: &'a Decisions) -> Emit<'a> {
        let layout = Layout::new(lowering, decisions);
        let mut plan = Plan {
            device_bytes: layout.device.size_bytes,
            host_bytes: layout.host.size_bytes,
            regions: layout.device.regions.iter().chain(&layout.host.regions).cloned().collect(),
            ..Plan::default()
        };
        let values = Values::new(&mut plan, lowering, decisions, &layout);
        let parameters = &lowering.parameters;
        // Groups never mix prologue and epilogue: one is updated long before the other.
        let first = parameters.prologue_trainable;
        let size = decisions.piece_elements;
        let layer_groups = groups(&parameters.layer, &layout.cut.layer, size, |_| true);
        let prologue_groups = groups(&parameters.edge, &layout.cut.edge, size, |t| t < first);
        let epilogue_groups = groups(&parameters.edge, &layout.cut.edge, size, |t| t >= first);
        let lowest_first = decisions.update == UpdateTime::NextStep;
        let layers = lowering.task.layer_count();
        let norm_graph = GraphId(0);
        plan.graphs.push(lowering.task.norm.clone());
        let weight_runs = all_runs(&layout.cut.layer.weights)
            .iter()
            .map(|run| run.offset..run.offset + run.size_bytes)
            .collect();
        let slots = (layout.state_ring.slots, layout.activation_ring.slots);
        let boundary_slots = layout.boundary_ring.slots;
        Emit {
            lowering,
            decisions,
            layer_groups,
            prologue_groups: prologue_groups.len(),
            edge_groups: prologue_groups.into_iter().chain(epilogue_groups).collect(),
            layout,
            plan,
            values,
            update_graphs: BTreeMap::new(),
            state_ring: Turns::new(slots.0),
            activation_turns: Turns::new(slots.1),
            boundary_turns: Turns::new(boundary_slots),
            norm_graph,
            variants: Vec::new(),
            temporaries: HashMap::new(),
            weights: Stream::new(decisions.weights, layers, lowest_first),
            gradients: Stream::new(decisions.gradients, layers, lowest_first),
            weight_runs,
            arriving: (None, None),
            computes: Vec::new(),
            copies: Vec::new(),
            host_written: HashMap::new(),
        }
    }

    // ---- segments -----------------------------------------------------------------------------

    /// How many kernels the segment has so far.
    pub(super) fn position(&self) -> usize {
        self.computes.len()
    }

    /// Moves the collected instructions into the plan: each copy right after the kernel before it.
    pub(super) fn end_segment(&mut self, name: &'static str) -> SegmentId {
        let start = self.plan.instructions.len();
        let mut copies: Vec<Option<_>> =
            std::mem::take(&mut self.copies).into_iter().map(Some).collect();
        let after = |copy: &Option<(usize, Instruction, Mark)>| copy.as_ref().map_or(0, |c| c.0);
        let mut order: Vec<(usize, usize)> =
            copies.iter().enumerate().map(|(index, copy)| (after(copy), index)).collect();
        order.sort_unstable();
        let mut order = order.into_iter().peekable();
        let computes = std::mem::take(&mut self.computes);
        let count = computes.len();
        let mut computes = computes.into_iter();
        for position in 0..=count {
            while let Some((_, index)) = order.next_if(|&(after, _)| after <= position) {
                let (_, copy, mark) = copies[index].take().expect("each is given out once");
                let id = InstructionId(self.plan.instructions.len() as u32);
                match mark {
                    Mark::None => {}
                    Mark::Input(index) => self.plan.inputs[index].copies.push(id),
                    Mark::Result(index) => self.plan.results[index].copies.push(id),
                }
                self.plan.instructions.push(copy);
            }
            self.plan.instructions.extend(computes.next());
        }
        self.host_written.clear();
        self.weights.free_after.fill(0);
        self.gradients.free_after.fill(0);
        for turns in [&mut self.state_ring, &mut self.activation_turns, &mut self.boundary_turns] {
            turns.begin_segment();
        }
        let instructions = start..self.plan.instructions.len();
        self.plan.segments.push(Segment { name, instructions });
        SegmentId(self.plan.segments.len() as u32 - 1)
    }

    // ---- kernels ------------------------------------------------------------------------------

    /// The number of a variant's graph.
    fn graph_of(&mut self, variant: &Arc<Variant>) -> GraphId {
        if let Some((_, id)) = self.variants.iter().find(|(known, _)| Arc::ptr_eq(known, variant)) {
            return *id;
        }
        let id = GraphId(self.plan.graphs.len() as u32);
        self.plan.graphs.push(variant.section.graph.clone());
        self.variants.push((Arc::clone(variant), id));
        id
    }

    /// Runs the nodes of a pass. `bound` has the tensors that are not temporaries; `after_each` is
    /// called with the pass's node after each.
    pub(super) fn run_pass(
        &mut self,
        variant: &Arc<Variant>,
        pass: &Pass,
        layer: u16,
        bound: &[Option<Bound>],
        mut after_each: impl FnMut(&mut Emit<'a>, &super::variant::PassNode),
    ) {
        let graph = self.graph_of(variant);
        let work = self.layout.work;
        for node in &pass.nodes {
            let resolve = |emit: &mut Emit<'a>, id: TensorId| -> Bound {
                let root = variant.storage[id.index()];
                let offset = match pass.offsets[root.index()] {
                    Some(offset) => work + offset,
                    None => {
                        let bound = bound[root.index()];
                        bound.unwrap_or_else(|| unbound(variant, root)).offset
                    }
                };
                match bound[id.index()] {
                    Some(bound) if pass.offsets[root.index()].is_none() => bound,
                    _ => Bound::one(offset, emit.temporary(graph, variant, id)),
                }
            };
            let reads: Vec<Bound> = node.operands.iter().map(|&id| resolve(self, id)).collect();
            let writes: Vec<Bound> = node.outputs.iter().map(|&id| resolve(self, id)).collect();
            self.compute(graph, node.index, layer, &reads, &writes);
            after_each(self, node);
        }
    }

    fn temporary(&mut self, graph: GraphId, variant: &Variant, id: TensorId) -> ValueId {
        let plan = &mut self.plan;
        *self.temporaries.entry((graph.0, id.index())).or_insert_with(|| {
            let tensor = variant.section.graph.tensor(id);
            push_value(plan, tensor.name.clone(), tensor.size_bytes(), tensor.class)
        })
    }

    /// The value of a scratch tensor of the norm graph.
    pub(super) fn norm_scratch(&mut self, id: TensorId) -> ValueId {
        let (plan, graph) = (&mut self.plan, self.norm_graph);
        let tensor = self.lowering.task.norm.tensor(id);
        *self.temporaries.entry((graph.0, id.index())).or_insert_with(|| {
            push_value(plan, tensor.name.clone(), tensor.size_bytes(), tensor.class)
        })
    }

    /// A node all of whose tensors are bound.
    pub(super) fn compute_bound(
        &mut self,
        graph: GraphId,
        node: u32,
        layer: u16,
        operands: &[TensorId],
        outputs: &[TensorId],
        bound: &[Option<Bound>],
    ) {
        let all = |ids: &[TensorId]| -> Vec<Bound> {
            ids.iter().map(|id| bound[id.index()].expect("the caller bound all tensors")).collect()
        };
        self.compute(graph, node, layer, &all(operands), &all(outputs));
    }

    pub(super) fn compute(
        &mut self,
        graph: GraphId,
        node: u32,
        layer: u16,
        reads: &[Bound],
        writes: &[Bound],
    ) {
        let places = reads.iter().chain(writes).map(|bound| bound.offset).collect();
        let operands = |bounds: &[Bound]| -> Vec<Operand> {
            let mut operands = Vec::with_capacity(bounds.len());
            for bound in bounds {
                let mut offset = bound.offset;
                for index in 0..bound.count {
                    let value = ValueId(bound.first.0 + index);
                    operands.push(Operand { value, offset });
                    offset += self.plan.values[value.index()].size_bytes;
                }
            }
            operands
        };
        let (reads, writes) = (operands(reads), operands(writes));
        let work = Work::Compute(Compute { graph, node, layer, places, reads, writes });
        self.computes.push(Instruction { work, waits: Vec::new() });
    }

    // ---- copies -------------------------------------------------------------------------------

    pub(super) fn copy_values(
        &self,
        run: &CopyRun,
        value: impl Fn(usize, usize) -> ValueId,
    ) -> Vec<Operand> {
        let operand = |&(entry, piece, offset): &(usize, usize, usize)| Operand {
            value: value(entry, piece),
            offset,
        };
        run.pieces.iter().map(operand).collect()
    }

    /// Brings bytes in, as soon as `after` kernels of the segment are given out and whatever wrote
    /// them to host memory is.
    pub(super) fn copy_in(
        &mut self,
        after: usize,
        device: usize,
        host: usize,
        bytes: usize,
        values: Vec<Operand>,
    ) {
        let written = self.host_written.get(&host).copied().unwrap_or(0);
        let after = after.max(written);
        self.copy(after, Direction::ToDevice, device, host, bytes, values, Mark::None);
    }

    /// Takes bytes out, right after the last kernel so far.
    pub(super) fn copy_out(
        &mut self,
        device: usize,
        host: usize,
        bytes: usize,
        values: Vec<Operand>,
    ) {
        let after = self.position();
        self.host_written.insert(host, after);
        self.copy(after, Direction::ToHost, device, host, bytes, values, Mark::None);
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn copy(
        &mut self,
        after: usize,
        direction: Direction,
        device: usize,
        host: usize,
        bytes: usize,
        values: Vec<Operand>,
        mark: Mark,
    ) {
        let work = Work::Copy(Copy { direction, device, host, bytes, values });
        self.copies.push((after, Instruction { work, waits: Vec::new() }, mark));
    }

    /// Copies a slab's entries between a place on the device and one in host memory.
    pub(super) fn move_runs(
        &mut self,
        runs: &[CopyRun],
        pieces: &[Pieces],
        device: usize,
        host: usize,
        into_device: Option<usize>,
    ) {
        for run in runs {
            let values = self.copy_values(run, |entry, piece| pieces[entry].piece(piece));
            let (device, host) = (device + run.offset, host + run.offset);
            match into_device {
                Some(after) => self.copy_in(after, device, host, run.size_bytes, values),
                None => self.copy_out(device, host, run.size_bytes, values),
            }
        }
    }

    // ---- streamed classes -----------------------------------------------------------------------

    /// Brings a layer's weights in unless they are there.
    pub(super) fn fetch_weights(&mut self, layer: usize) {
        if let Some(after) = self.weights.enter(layer) {
            let runs = all_runs(&self.layout.cut.layer.weights);
            let pieces = self.values.weights[layer].clone();
            let device = self.weights_place(Owner::Layer(layer));
            let host = self.weights_host(layer);
            self.move_runs(&runs, &pieces, device, host, Some(after));
        }
    }

    /// Brings a layer's gradients in unless they are there.
    pub(super) fn fetch_gradients(&mut self, layer: usize) {
        if let Some(after) = self.gradients.enter(layer) {
            let runs = all_runs(&self.layout.cut.layer.gradients);
            let pieces = self.values.gradients[layer].clone();
            let device = self.gradients_place(Owner::Layer(layer));
            let host = self.gradients_host(layer);
            self.move_runs(&runs, &pieces, device, host, Some(after));
        }
    }

    /// Brings in what one group of a layer's updates needs, unless it is there. All groups of a layer
    /// are updated in a row; each fetches its own part, so that the first need not wait for the last.
    pub(super) fn fetch_for_update(
        &mut self,
        layer: usize,
        pieces: &[(usize, usize)],
        group: usize,
        not_before: usize,
    ) {
        if group == 0 {
            self.arriving = (self.weights.enter(layer), self.gradients.enter(layer));
        }
        let later = |after: usize| after.max(not_before);
        let (weights, gradients) = (self.arriving.0.map(later), self.arriving.1.map(later));
        if let Some(after) = weights {
            let set = &self.lowering.parameters.layer;
            let trainable: Vec<usize> = set.trainable().collect();
            let mut wanted: Vec<(usize, usize)> =
                pieces.iter().map(|&(t, piece)| (trainable[t], piece)).collect();
            if group == 0 {
                // What is not updated comes with the first group.
                let frozen = (0..set.parameters.len()).filter(|p| !trainable.contains(p));
                let pieces_of = |p: usize| self.layout.cut.layer.weights.entries[p].pieces.len();
                wanted.extend(frozen.flat_map(|p| (0..pieces_of(p)).map(move |piece| (p, piece))));
                wanted.sort_unstable();
            }
            let runs = self.layout.cut.layer.weights.runs_of(wanted.into_iter());
            let values = self.values.weights[layer].clone();
            let device = self.weights_place(Owner::Layer(layer));
            let host = self.weights_host(layer);
            self.move_runs(&runs, &values, device, host, Some(after));
        }
        if let Some(after) = gradients {
            let runs = self.layout.cut.layer.gradients.runs_of(pieces.iter().copied());
            let values = self.values.gradients[layer].clone();
            let device = self.gradients_place(Owner::Layer(layer));
            let host = self.gradients_host(layer);
            self.move_runs(&runs, &values, device, host, Some(after));
        }
    }

    /// Gives a layer's gradients their slot without bringing anything in: they are about to be written.
    pub(super) fn start_gradients(&mut self, layer: usize) {
        let slot = self.gradients.streaming.slot(layer);
        self.gradients.contents[slot] = Some(layer);
    }

    /// Takes a layer's gradients out.
    pub(super) fn write_back_gradients(&mut self, layer: usize) {
        let runs = all_runs(&self.layout.cut.layer.gradients);
        let pieces = self.values.gradients[layer].clone();
        let device = self.gradients_place(Owner::Layer(layer));
        let host = self.gradients_host(layer);
        self.move_runs(&runs, &pieces, device, host, None);
    }

    /// Takes pieces of a layer's weights out, unless the layer stays on the device.
    pub(super) fn write_back_weights(&mut self, layer: usize, pieces: &[(usize, usize)]) {
        if self.decisions.weights.is_pinned(layer) {
            return;
        }
        let runs = self.layout.cut.layer.weights.runs_of(pieces.iter().copied());
        let values = self.values.weights[layer].clone();
        let device = self.weights_place(Owner::Layer(layer));
        let host = self.weights_host(layer);
        // A fetch brings in longer runs, which must come after every part of them.
        let after = self.position();
        let start = runs.first().map_or(0, |run| run.offset);
        let end = runs.last().map_or(0, |run| run.offset + run.size_bytes);
        let first = self.weight_runs.partition_point(|run| run.end <= start);
        for run in self.weight_runs[first..].iter().take_while(|run| run.start < end) {
            self.host_written.insert(host + run.start, after);
        }
        self.move_runs(&runs, &values, device, host, None);
    }

    pub(super) fn touch_weights(&mut self, layer: usize) {
        let slot = self.weights.streaming.slot(layer);
        self.weights.free_after[slot] = self.computes.len();
    }

    pub(super) fn touch_gradients(&mut self, layer: usize) {
        let slot = self.gradients.streaming.slot(layer);
        self.gradients.free_after[slot] = self.computes.len();
    }

    /// Layers beyond the pinned ones whose weights are on the device now.
    pub(super) fn weights_in_ring(&self) -> Vec<usize> {
        self.weights.in_ring()
    }

    /// The same for gradients.
    pub(super) fn gradients_in_ring(&self) -> Vec<usize> {
        self.gradients.in_ring()
    }

    // ---- places and values ----------------------------------------------------------------------

    pub(super) fn set(&self, owner: Owner) -> &'a Set {
        match owner {
            Owner::Layer(_) => &self.lowering.parameters.layer,
            Owner::Edge => &self.lowering.parameters.edge,
        }
    }

    pub(super) fn weights_place(&self, owner: Owner) -> usize {
        match owner {
            Owner::Layer(layer) => {
                let places = self.layout.weights;
                places.device + self.decisions.weights.slot(layer) * places.slot_bytes
            }
            Owner::Edge => self.layout.edge_weights,
        }
    }

    pub(super) fn gradients_place(&self, owner: Owner) -> usize {
        match owner {
            Owner::Layer(layer) => {
                let places = self.layout.gradients;
                places.device + self.decisions.gradients.slot(layer) * places.slot_bytes
            }
            Owner::Edge => self.layout.edge_gradients,
        }
    }

    pub(super) fn weights_host(&self, layer: usize) -> usize {
        let places = self.layout.weights;
        places.host + (layer - self.decisions.weights.pinned) * places.slot_bytes
    }

    pub(super) fn gradients_host(&self, layer: usize) -> usize {
        let places = self.layout.gradients;
        places.host + (layer - self.decisions.gradients.pinned) * places.slot_bytes
    }

    pub(super) fn weight_value(&self, owner: Owner, parameter: usize, piece: usize) -> ValueId {
        match owner {
            Owner::Layer(layer) => self.values.weights[layer][parameter].piece(piece),
            Owner::Edge => self.values.edge_weights[parameter].piece(piece),
        }
    }

    pub(super) fn gradient_value(&self, owner: Owner, t: usize, piece: usize) -> ValueId {
        match owner {
            Owner::Layer(layer) => self.values.gradients[layer][t].piece(piece),
            Owner::Edge => self.values.edge_gradients[t].piece(piece),
        }
    }

    pub(super) fn state_value(&self, owner: Owner, entry: usize, piece: usize) -> ValueId {
        match owner {
            Owner::Layer(layer) => self.values.states[layer][entry].piece(piece),
            Owner::Edge => self.values.edge_states[entry].piece(piece),
        }
    }

    /// A scalar of the step, or an input that a step has once.
    pub(super) fn scalar(&self, name: &str) -> Bound {
        if let Some(offset) = self.layout.scalar(self.lowering, name) {
            return Bound::one(offset, self.values.scalars[name]);
        }
        self.input(name, 0).unwrap_or_else(|| unreachable!("no scalar `{name}`"))
    }

    /// An input of a micro-batch.
    pub(super) fn input(&self, name: &str, micro_batch: usize) -> Option<Bound> {
        let index = self.layout.inputs.iter().position(|input| input.tensor.name == name)?;
        let places = &self.layout.inputs[index].places;
        let which = micro_batch.min(places.len() - 1);
        Some(Bound::one(places[which].0, self.values.inputs[index][which]))
    }
}

impl Stream {
    /// Makes room for a layer; after how many kernels it may come in, or none if it is there.
    fn enter(&mut self, layer: usize) -> Option<usize> {
        let slot = self.streaming.slot(layer);
        if self.contents[slot] == Some(layer) {
            return None;
        }
        self.contents[slot] = Some(layer);
        Some(self.free_after[slot])
    }

    fn in_ring(&self) -> Vec<usize> {
        let beyond = self.contents[self.streaming.pinned..].iter();
        beyond.filter_map(|&layer| layer).collect()
    }
}

fn unbound(variant: &Variant, id: TensorId) -> Bound {
    let name = &variant.section.graph.tensor(id).name;
    unreachable!("`{name}` of `{}` has no place", variant.section.name)
}

pub(super) fn all_runs(slab: &Slab) -> Vec<CopyRun> {
    slab.runs(0..slab.entries.len())
}

fn push_value(plan: &mut Plan, name: String, size_bytes: usize, class: TensorClass) -> ValueId {
    plan.values.push(Value { name, size_bytes, class });
    ValueId(plan.values.len() as u32 - 1)
}

fn push_pieces(plan: &mut Plan, name: &str, sizes: &[usize], class: TensorClass) -> Pieces {
    let first = ValueId(plan.values.len() as u32);
    for (index, &size) in sizes.iter().enumerate() {
        let name =
            if sizes.len() == 1 { name.to_owned() } else { format!("{name} (part {index})") };
        push_value(plan, name, size, class);
    }
    Pieces { first, count: sizes.len() as u32 }
}

impl Values {
    fn new(
        plan: &mut Plan,
        lowering: &Lowering<'_>,
        decisions: &Decisions,
        layout: &Layout,
    ) -> Values {
        let (group, layers) = (decisions.group, lowering.task.layer_count());
        let f32_bytes = 4;
        let inputs = layout
            .inputs
            .iter()
            .map(|input| {
                let bytes = input.tensor.size_bytes();
                let name = &input.tensor.name;
                (0..input.places.len())
                    .map(|m| push_value(plan, numbered(name, m), bytes, TensorClass::Input))
                    .collect()
            })
            .collect();
        let scalars = (lowering.shared.scalars.keys())
            .map(|name| {
                let class = TensorClass::Activation;
                (name.clone(), push_value(plan, name.clone(), f32_bytes, class))
            })
            .collect();
        let losses = (0..group)
            .map(|m| push_value(plan, numbered("loss", m), f32_bytes, TensorClass::Activation))
            .collect();
        let parameters = &lowering.parameters;
        let mut set_values = |set: &Set, slabs: &super::parameters::SetSlabs, prefix: String| {
            let mut weights = Vec::new();
            for (parameter, entry) in set.parameters.iter().zip(&slabs.weights.entries) {
                let name = format!("{prefix}{}", parameter.tensor.name);
                weights.push(push_pieces(plan, &name, &entry.pieces, parameter.tensor.class));
            }
            let mut gradients = Vec::new();
            for (parameter, entry) in set.trainable().zip(&slabs.gradients.entries) {
                let name = format!("{prefix}{}.grad", set.parameters[parameter].tensor.name);
                gradients.push(push_pieces(plan, &name, &entry.pieces, TensorClass::Gradient));
            }
            let mut states = Vec::new();
            let mut entries = slabs.states.entries.iter();
            for kind in set.kinds() {
                for (parameter, entry) in set.trainable().zip(&mut entries) {
                    let name = &set.parameters[parameter].tensor.name;
                    let name = format!("{prefix}{name}.{kind}");
                    let class = TensorClass::OptimizerState;
                    states.push(push_pieces(plan, &name, &entry.pieces, class));
                }
            }
            (weights, gradients, states)
        };
        let (edge_weights, edge_gradients, edge_states) =
            set_values(&parameters.edge, &layout.cut.edge, String::new());
        let (mut weights, mut gradients, mut states) = (Vec::new(), Vec::new(), Vec::new());
        for layer in 0..layers {
            let prefix = format!("layers.{layer}.");
            let (w, g, s) = set_values(&parameters.layer, &layout.cut.layer, prefix);
            weights.push(w);
            gradients.push(g);
            states.push(s);
        }
        let graph = &lowering.task.proceed.layer.graph;
        let activation = TensorClass::Activation;
        let mut slab_values = |slabs: &[super::layout::ActivationSlab]| -> Vec<Vec<Vec<Pieces>>> {
            let mut all = Vec::new();
            for (layer, slab) in slabs.iter().enumerate() {
                let mut of_layer = Vec::new();
                for m in 0..group {
                    let mut pieces = Vec::new();
                    for (&(_, id), entry) in slab.tensors.iter().zip(&slab.slab.entries) {
                        let name = format!("layers.{layer}.{}", graph.tensor(id).name);
                        let name = numbered(&name, m);
                        pieces.push(push_pieces(plan, &name, &entry.pieces, activation));
                    }
                    of_layer.push(pieces);
                }
                all.push(of_layer);
            }
            all
        };
        let kept = slab_values(&layout.kept_slabs);
        let offloaded = slab_values(&layout.offloaded_slabs);
        let mut boundary = Vec::new();
        for layer in 0..=layers {
            let pieces = &layout.boundary_slab.entries[0].pieces;
            let name = format!("layers.{layer}.input");
            boundary.push(
                (0..group)
                    .map(|m| push_pieces(plan, &numbered(&name, m), pieces, activation))
                    .collect(),
            );
        }
        let carried_bytes = layout.boundary_slab.entries[0].size_bytes;
        let carry = (0..group)
            .map(|m| {
                [0, 1]
                    .map(|_| push_value(plan, numbered("input.grad", m), carried_bytes, activation))
            })
            .collect();
        let prologue = &lowering.task.proceed.prologue;
        let exports = (0..group)
            .map(|m| {
                let export = |(name, id): &(String, TensorId)| {
                    let bytes = prologue.graph.tensor(*id).size_bytes();
                    (name.clone(), push_value(plan, numbered(name, m), bytes, activation))
                };
                prologue.exports.iter().map(export).collect()
            })
            .collect();
        let prologue_kept = layout
            .prologue_kept
            .iter()
            .enumerate()
            .map(|(m, kept)| {
                let value = |&id: &TensorId| {
                    let tensor = prologue.graph.tensor(id);
                    let name = numbered(&tensor.name, m);
                    (id, push_value(plan, name, tensor.size_bytes(), activation))
                };
                kept.keys().map(value).collect()
            })
            .collect();
        Values {
            inputs,
            scalars,
            losses,
            weights,
            gradients,
            states,
            edge_weights,
            edge_gradients,
            edge_states,
            kept,
            offloaded,
            boundary,
            carry,
            exports,
            prologue_kept,
        }
    }
}

/// `name` of a micro-batch of the group.
fn numbered(name: &str, micro_batch: usize) -> String {
    format!("{name}[{micro_batch}]")
}
