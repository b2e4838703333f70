//! The order of a step: groups of micro-batches, layer by layer, forward and back.

use super::Lowering;
use super::emit::{Bound, Emit, Mark, Pieces, all_runs};
use super::layout::longest_stretch;
use super::update::{Owner, Pace};
use super::variant::{PassNode, Variant};
use crate::decisions::UpdateTime;
use crate::plan::{
    Direction, Input, Lasting, Operand, Place, Plan, PlanResult, Run, SegmentId, Tier,
};
use crate::{Decisions, Storage};
use std::collections::BTreeSet;
use std::sync::Arc;
use storm_graph::{DType, Op, ParameterGradient, Section, Shape, Tensor, TensorClass, TensorId};

/// What is special about a group of micro-batches.
#[derive(Clone, Copy)]
struct Group {
    /// Starts the gradients, and applies what the step before left.
    is_first: bool,
    /// Ends them: norm, clipping.
    is_last: bool,
}

pub(super) fn emit(lowering: &Lowering<'_>, decisions: &Decisions) -> Plan {
    let mut emit = Emit::new(lowering, decisions);
    emit.declare_host_tensors();
    let groups = lowering.task.micro_batches / decisions.group;
    let middle = Group { is_first: false, is_last: false };
    let once = |segment: SegmentId| Run { segment, times: 1 };
    let mut step = Vec::new();
    if groups == 1 {
        step.push(once(emit.group(Group { is_first: true, is_last: true }, "whole step")));
    } else {
        step.push(once(emit.group(Group { is_first: true, ..middle }, "first group")));
        if groups > 2 {
            let segment = emit.group(middle, "middle group");
            step.push(Run { segment, times: groups - 2 });
        }
        step.push(once(emit.group(Group { is_last: true, ..middle }, "last group")));
    }
    emit.plan.step = step;
    emit.declare_lasting();
    if decisions.update == UpdateTime::NextStep {
        emit.plan.flush = Some(emit.flush());
    }
    emit.plan
}

impl<'a> Emit<'a> {
    fn layers(&self) -> usize {
        self.lowering.task.layer_count()
    }

    /// One group of micro-batches, forward and back.
    fn group(&mut self, group: Group, name: &'static str) -> SegmentId {
        self.copy_inputs(group.is_first);
        self.forward(group);
        self.backward(group);
        if group.is_last {
            self.finish();
        }
        self.end_segment(name)
    }

    /// Applies a pending update by itself, and leaves everything where it was.
    fn flush(&mut self) -> SegmentId {
        let (weights, gradients) = (self.weights_in_ring(), self.gradients_in_ring());
        self.copy_step_inputs();
        for &layer in &gradients {
            self.write_back_gradients(layer);
        }
        for update in self.prologue_updates() {
            self.update(update);
        }
        for layer in 0..self.layers() {
            for update in self.layer_updates(layer) {
                self.update(update);
            }
        }
        for update in self.epilogue_updates() {
            self.update(update);
        }
        for layer in weights {
            self.fetch_weights(layer);
        }
        for layer in gradients {
            self.fetch_gradients(layer);
        }
        self.end_segment("flush")
    }

    // ---- inputs and results ---------------------------------------------------------------------

    /// Tells the plan what the host writes and reads; their copies are filled in as they come.
    fn declare_host_tensors(&mut self) {
        let mut inputs = Vec::new();
        for (index, input) in self.layout.inputs.iter().enumerate() {
            for (m, &(_, host)) in input.places.iter().enumerate() {
                inputs.push(Input {
                    tensor: input.tensor.clone(),
                    value: self.values.inputs[index][m],
                    micro_batch: input.per_micro_batch.then_some(m as u16),
                    host,
                    copies: Vec::new(),
                });
            }
        }
        self.plan.inputs = inputs;
        let scalar = |name: &str| Tensor {
            name: name.to_owned(),
            shape: Shape::scalar(),
            dtype: DType::F32,
            class: TensorClass::Activation,
        };
        let mut results = Vec::new();
        for (m, &(_, host)) in self.layout.losses.iter().enumerate() {
            results.push(PlanResult {
                tensor: scalar("loss"),
                value: self.values.losses[m],
                micro_batch: Some(m as u16),
                host,
                copies: Vec::new(),
            });
        }
        let (norm, _) = self.norm_names();
        results.push(PlanResult {
            value: self.values.scalars[&norm],
            tensor: scalar(&norm),
            micro_batch: None,
            host: self.layout.norm_host,
            copies: Vec::new(),
        });
        self.plan.results = results;
    }

    /// Names of the norm and of the clip scale: what the last two nodes of the norm graph make.
    fn norm_names(&self) -> (String, String) {
        let graph = &self.lowering.task.norm;
        let name = |wanted: fn(&Op<TensorId>) -> bool| {
            let node = graph.nodes().iter().find(|node| wanted(&node.op));
            node.map_or(String::new(), |node| graph.tensor(node.outputs[0]).name.clone())
        };
        (
            name(|op| matches!(op, Op::GlobalNorm { .. })),
            name(|op| matches!(op, Op::ClipScale { .. })),
        )
    }

    fn copy_inputs(&mut self, first: bool) {
        if first {
            self.copy_step_inputs();
        }
        self.copy_inputs_where(true);
    }

    fn copy_step_inputs(&mut self) {
        self.copy_inputs_where(false);
    }

    fn copy_inputs_where(&mut self, per_micro_batch: bool) {
        let mut number = 0;
        for index in 0..self.layout.inputs.len() {
            let input = self.layout.inputs[index].clone();
            for (m, &(device, host)) in input.places.iter().enumerate() {
                if input.per_micro_batch == per_micro_batch {
                    let value = self.values.inputs[index][m];
                    let values = vec![Operand { value, offset: 0 }];
                    let (bytes, mark) = (input.tensor.size_bytes(), Mark::Input(number));
                    self.copy(0, Direction::ToDevice, device, host, bytes, values, mark);
                }
                number += 1;
            }
        }
    }

    /// Sends a scalar to the host.
    fn send_result(&mut self, index: usize, device: usize) {
        let PlanResult { value, host, ref tensor, .. } = self.plan.results[index];
        let bytes = tensor.size_bytes();
        let values = vec![Operand { value, offset: 0 }];
        let after = self.position();
        self.copy(after, Direction::ToHost, device, host, bytes, values, Mark::Result(index));
    }

    // ---- forward ----------------------------------------------------------------------------------

    fn forward(&mut self, group: Group) {
        let updates = group.is_first && self.decisions.update == UpdateTime::NextStep;
        let layers = self.layers();
        if updates {
            for update in self.prologue_updates() {
                self.update(update);
            }
        }
        // Layer inputs take the slots of their ring in turn.
        let mut places: Vec<usize> = Vec::new();
        for m in 0..self.decisions.group {
            places.push(self.prologue_forward(m));
        }
        // Updates of a layer go beside the layer before, which needs weights of both on the device.
        let weights = self.decisions.weights;
        let beside = |layer: usize| layer > 0 && weights.slot(layer - 1) != weights.slot(layer);
        for layer in 0..layers {
            if updates && !beside(layer) {
                for update in self.layer_updates(layer) {
                    self.update(update);
                }
            }
            if updates && layer + 1 == layers && layers == 1 {
                for update in self.epilogue_updates() {
                    self.update(update);
                }
            }
            let mut due = Vec::new();
            if updates && layer + 1 < layers && beside(layer + 1) {
                due = self.layer_updates(layer + 1);
            }
            if updates && layer + 2 == layers {
                due.extend(self.epilogue_updates());
            }
            self.fetch_weights(layer);
            let variant = self.lowering.layer(&self.decisions.saved[layer])[1].clone();
            let total = variant.forward.seconds * self.decisions.group as f64;
            let mut pace = Pace::over(due, total);
            for (m, place) in places.iter_mut().enumerate() {
                *place = self.layer_forward(layer, m, *place, &mut pace);
                if layer + 1 == layers {
                    self.epilogue(group, m, *place);
                }
            }
            for update in pace.rest() {
                self.update(update);
            }
            self.touch_weights(layer);
        }
    }

    /// Where the input of a layer is to be written in the forward pass.
    fn next_boundary(&mut self, layer: usize, m: usize) -> usize {
        match self.decisions.boundary.get(layer) {
            Some(Storage::Keep) => self.layout.boundary_kept[layer][m],
            _ => {
                let slot = self.boundary_turns.next();
                self.layout.boundary_ring.slot(slot)
            }
        }
    }

    /// Notes that a layer's input has been made: sends it away if it is to wait in host memory.
    fn made_boundary(&mut self, layer: usize, m: usize, place: usize) {
        if self.decisions.boundary.get(layer) == Some(&Storage::Offload) {
            let runs = all_runs(&self.layout.boundary_slab);
            let host = self.layout.boundary_host[layer][m];
            let pieces = [self.values.boundary[layer][m]];
            self.move_runs(&runs, &pieces, place, host, None);
        }
    }

    fn prologue_forward(&mut self, m: usize) -> usize {
        let variant = self.lowering.prologue[1].clone();
        let place = self.next_boundary(0, m);
        let mut bound = self.bind_section(&variant, Owner::Edge, m);
        let section = &variant.section;
        bind(&mut bound, section.carried_out[0], self.values.boundary[0][m].at(place));
        self.run_pass(&variant, &variant.forward, 0, &bound, |_, _| {});
        self.touch_ring(place);
        self.made_boundary(0, m, place);
        place
    }

    /// Runs a layer forward and returns where its result is.
    fn layer_forward(&mut self, layer: usize, m: usize, input: usize, pace: &mut Pace) -> usize {
        let variant = self.lowering.layer(&self.decisions.saved[layer])[1].clone();
        let output = self.next_boundary(layer + 1, m);
        let mut bound = self.bind_section(&variant, Owner::Layer(layer), m);
        let section = &variant.section;
        bind(&mut bound, section.carried_in[0], self.values.boundary[layer][m].at(input));
        bind(&mut bound, section.carried_out[0], self.values.boundary[layer + 1][m].at(output));
        self.bind_kept(&mut bound, layer, m);
        let slot = self.bind_offloaded(&mut bound, layer, m);
        let slab = self.layout.offloaded_slabs[layer].clone();
        let start = slot.map(|slot| self.layout.activation_ring.slot(slot));
        self.run_pass(&variant, &variant.forward, layer as u16, &bound, |emit, node| {
            if let Some(start) = start {
                emit.send_offloaded(layer, m, start, &slab, node);
            }
            for update in pace.advance(node.seconds) {
                emit.update(update);
            }
        });
        let now = self.position();
        if let Some(slot) = slot {
            self.activation_turns.touch(slot, now);
        }
        self.touch_ring(input);
        self.touch_ring(output);
        self.made_boundary(layer + 1, m, output);
        output
    }

    /// Sends what a node has just made of the offloaded units, each unit as a whole.
    fn send_offloaded(
        &mut self,
        layer: usize,
        m: usize,
        start: usize,
        slab: &super::layout::ActivationSlab,
        node: &PassNode,
    ) {
        let mut entry = 0;
        while entry < slab.tensors.len() {
            let unit = slab.tensors[entry].0;
            let end = (entry..slab.tensors.len())
                .find(|&e| slab.tensors[e].0 != unit)
                .unwrap_or(slab.tensors.len());
            if node.outputs.contains(&slab.tensors[entry].1) {
                let runs = slab.slab.runs(entry..end);
                let host = self.layout.offloaded_host[layer][m];
                let pieces = self.values.offloaded[layer][m].clone();
                self.move_runs(&runs, &pieces, start, host, None);
            }
            entry = end;
        }
    }

    /// Notes that a slot of the ring of layer inputs has been used, if the place is one.
    fn touch_ring(&mut self, place: usize) {
        let ring = self.layout.boundary_ring;
        if ring.slots > 0
            && place >= ring.start
            && place < ring.start + ring.slots * ring.slot_bytes
        {
            let now = self.position();
            self.boundary_turns.touch((place - ring.start) / ring.slot_bytes, now);
        }
    }

    // ---- epilogue ---------------------------------------------------------------------------------

    /// Head and loss of a micro-batch, forward and back.
    fn epilogue(&mut self, group: Group, m: usize, input: usize) {
        let which = usize::from(!(group.is_first && m == 0));
        let variant = self.lowering.epilogue[which].clone();
        let layers = self.layers();
        let mut bound = self.bind_section(&variant, Owner::Edge, m);
        let section = &variant.section;
        bind(&mut bound, section.carried_in[0], self.values.boundary[layers][m].at(input));
        if let Some(backward) = &section.backward {
            for &id in &backward.carried_in_gradients {
                bind(&mut bound, id, self.carry(layers, m));
            }
        }
        let loss = self.layout.losses[m].0;
        for (_, id) in &section.results {
            bind(&mut bound, *id, Bound::one(loss, self.values.losses[m]));
        }
        self.run_pass(&variant, &variant.backward, 0, &bound, |_, _| {});
        self.touch_ring(input);
        self.send_result(m, loss);
    }

    /// The gradient of a layer's input: written by that layer, read by the one before.
    fn carry(&self, layer: usize, m: usize) -> Bound {
        let group = self.decisions.group;
        let slot = (self.layers() - layer) * group + m;
        Bound::one(self.layout.carry_ring.slot(slot), self.values.carry[m][layer % 2])
    }

    // ---- backward ---------------------------------------------------------------------------------

    fn backward(&mut self, group: Group) {
        debug_assert!(longest_stretch(&self.decisions.boundary) >= 1);
        let mut end = self.layers();
        while end > 0 {
            let stored = |&layer: &usize| self.decisions.boundary[layer] != Storage::Recompute;
            let start = (0..end).rev().find(stored).unwrap_or(0);
            self.replay(start, end);
            for layer in (start..end).rev() {
                self.layer_backward(group, layer, start);
            }
            end = start;
        }
    }

    /// Runs layers forward again, for the inputs of those after the first.
    fn replay(&mut self, start: usize, end: usize) {
        for layer in start..end.saturating_sub(1) {
            self.fetch_weights(layer);
            // Nothing of these passes is kept but their result.
            let nothing = vec![Storage::Recompute; self.lowering.units.len()];
            let variant = self.lowering.layer(&nothing)[1].clone();
            for m in 0..self.decisions.group {
                let (input, fetched) = self.backward_input(layer, m, start);
                let output = self.layout.replayed.slot((layer - start) * self.decisions.group + m);
                let mut bound = self.bind_section(&variant, Owner::Layer(layer), m);
                let section = &variant.section;
                bind(&mut bound, section.carried_in[0], input);
                let made = self.values.boundary[layer + 1][m];
                bind(&mut bound, section.carried_out[0], made.at(output));
                self.run_pass(&variant, &variant.forward, layer as u16, &bound, |_, _| {});
                if fetched {
                    self.touch_ring(input.offset);
                }
            }
            self.touch_weights(layer);
        }
    }

    /// The input of a layer in the backward pass, and whether it came into the ring for it.
    fn backward_input(&mut self, layer: usize, m: usize, stretch: usize) -> (Bound, bool) {
        let pieces: Pieces = self.values.boundary[layer][m];
        if layer > stretch {
            let slot = (layer - stretch - 1) * self.decisions.group + m;
            return (pieces.at(self.layout.replayed.slot(slot)), false);
        }
        match self.decisions.boundary[layer] {
            Storage::Keep => (pieces.at(self.layout.boundary_kept[layer][m]), false),
            _ => {
                let slot = self.boundary_turns.next();
                let place = self.layout.boundary_ring.slot(slot);
                let after = self.boundary_turns.free_after(slot);
                let runs = all_runs(&self.layout.boundary_slab);
                let host = self.layout.boundary_host[layer][m];
                self.move_runs(&runs, &[pieces], place, host, Some(after));
                (pieces.at(place), true)
            }
        }
    }

    fn layer_backward(&mut self, group: Group, layer: usize, stretch: usize) {
        self.fetch_weights(layer);
        match group.is_first {
            true => self.start_gradients(layer),
            false => self.fetch_gradients(layer),
        }
        let pair = self.lowering.layer(&self.decisions.saved[layer]);
        for m in 0..self.decisions.group {
            let variant = pair[usize::from(!(group.is_first && m == 0))].clone();
            let (input, _) = self.backward_input(layer, m, stretch);
            let mut bound = self.bind_section(&variant, Owner::Layer(layer), m);
            let section = &variant.section;
            bind(&mut bound, section.carried_in[0], input);
            self.bind_kept(&mut bound, layer, m);
            let slot = self.bind_offloaded(&mut bound, layer, m);
            if let Some(slot) = slot {
                self.fetch_offloaded(layer, m, slot, &variant);
            }
            let backward = section.backward.as_ref().expect("checked with the task");
            for &id in &backward.carried_out_gradients {
                bind(&mut bound, id, self.carry(layer + 1, m));
            }
            for &id in &backward.carried_in_gradients {
                bind(&mut bound, id, self.carry(layer, m));
            }
            self.run_pass(&variant, &variant.backward, layer as u16, &bound, |_, _| {});
            let now = self.position();
            if let Some(slot) = slot {
                self.activation_turns.touch(slot, now);
            }
            self.touch_ring(input.offset);
            if layer == 0 {
                self.prologue_backward(group, m);
            }
        }
        self.touch_weights(layer);
        if group.is_last {
            self.sum_squares(Owner::Layer(layer));
        }
        self.touch_gradients(layer);
        if self.gradients_must_leave(layer, group) {
            self.write_back_gradients(layer);
        }
    }

    /// Whether a layer's gradients are needed again only after their slot has been used by others.
    fn gradients_must_leave(&self, layer: usize, group: Group) -> bool {
        let streaming = self.decisions.gradients;
        let ring_holds_all = streaming.slots() >= self.layers();
        let stays_for_update = group.is_last && layer < streaming.slots();
        !streaming.is_pinned(layer) && !ring_holds_all && !stays_for_update
    }

    /// Brings in the offloaded units of a layer, those that are needed first first.
    fn fetch_offloaded(&mut self, layer: usize, m: usize, slot: usize, variant: &Arc<Variant>) {
        let slab = self.layout.offloaded_slabs[layer].clone();
        let start = self.layout.activation_ring.slot(slot);
        let after = self.activation_turns.free_after(slot);
        let host = self.layout.offloaded_host[layer][m];
        let pieces = self.values.offloaded[layer][m].clone();
        let mut units: Vec<(usize, std::ops::Range<usize>)> = Vec::new();
        for (entry, &(unit, id)) in slab.tensors.iter().enumerate() {
            let first_use = variant
                .backward
                .nodes
                .iter()
                .position(|node| node.operands.contains(&id))
                .unwrap_or(usize::MAX);
            match units.last_mut() {
                Some((known, range)) if slab.tensors[range.start].0 == unit => {
                    range.end = entry + 1;
                    *known = (*known).min(first_use);
                }
                _ => units.push((first_use, entry..entry + 1)),
            }
        }
        units.sort_by_key(|&(first_use, _)| first_use);
        for (_, range) in units {
            let runs = slab.slab.runs(range);
            self.move_runs(&runs, &pieces, start, host, Some(after));
        }
    }

    fn prologue_backward(&mut self, group: Group, m: usize) {
        // A tied parameter's gradient was begun by the epilogue: the graphs know.
        let variant = self.lowering.prologue[usize::from(!(group.is_first && m == 0))].clone();
        let mut bound = self.bind_section(&variant, Owner::Edge, m);
        if let Some(backward) = &variant.section.backward {
            for &id in &backward.carried_out_gradients {
                bind(&mut bound, id, self.carry(0, m));
            }
        }
        self.run_pass(&variant, &variant.backward, 0, &bound, |_, _| {});
    }

    // ---- norm and update --------------------------------------------------------------------------

    /// Sums of squares of gradients that are final.
    fn sum_squares(&mut self, owner: Owner) {
        let prefix = match owner {
            Owner::Layer(layer) => format!("layers.{layer}."),
            Owner::Edge => String::new(),
        };
        let set = self.set(owner);
        let place = self.gradients_place(owner);
        for (t, parameter) in set.trainable().enumerate() {
            let name = format!("{prefix}{}.grad", set.parameters[parameter].tensor.name);
            let node = self.lowering.shared.squares.get(&name).copied();
            let (slab, pieces) = match owner {
                Owner::Layer(layer) => {
                    (&self.layout.cut.layer.gradients, self.values.gradients[layer][t])
                }
                Owner::Edge => (&self.layout.cut.edge.gradients, self.values.edge_gradients[t]),
            };
            let gradient = pieces.at(place + slab.entries[t].offset);
            let node = node.unwrap_or_else(|| unreachable!("the norm misses `{name}`"));
            self.norm_node(node, &[gradient]);
        }
    }

    /// A node of the norm graph: results are scalars with places of their own, scratch goes to the
    /// work area.
    fn norm_node(&mut self, node: usize, reads: &[Bound]) {
        let graph = &self.lowering.task.norm;
        let mut writes = Vec::new();
        let mut work = self.layout.work;
        for &id in &graph.nodes()[node].outputs {
            let tensor = graph.tensor(id);
            if tensor.class == TensorClass::Scratch {
                let value = self.norm_scratch(id);
                writes.push(Bound::one(work, value));
                work += crate::pack::aligned(tensor.size_bytes());
            } else {
                writes.push(self.scalar(&tensor.name));
            }
        }
        self.compute(self.norm_graph, node as u32, 0, reads, &writes);
    }

    /// After the last backward pass: norm, clip scale, and the update unless it is deferred.
    fn finish(&mut self) {
        self.sum_squares(Owner::Edge);
        let graph = &self.lowering.task.norm;
        for (index, node) in graph.nodes().iter().enumerate() {
            if matches!(node.op, Op::SumOfSquares { .. }) {
                continue;
            }
            let reads: Vec<Bound> = (node.op.operands().into_iter())
                .map(|(_, id)| self.scalar(&graph.tensor(id).name))
                .collect();
            self.norm_node(index, &reads);
        }
        let (norm, _) = self.norm_names();
        let place = self.layout.scalar(self.lowering, &norm).expect("the norm graph makes it");
        self.send_result(self.decisions.group, place);
        if self.decisions.update == UpdateTime::EndOfStep {
            let mut updates = self.prologue_updates();
            updates.extend(self.epilogue_updates());
            for update in updates {
                self.update(update);
            }
            for layer in 0..self.layers() {
                for update in self.layer_updates(layer) {
                    self.update(update);
                }
            }
        }
    }

    // ---- binding ----------------------------------------------------------------------------------

    /// Parameters, inputs, exports and parameter gradients of a section.
    fn bind_section(
        &mut self,
        variant: &Arc<Variant>,
        owner: Owner,
        m: usize,
    ) -> Vec<Option<Bound>> {
        let section = &variant.section;
        let graph = &section.graph;
        let mut bound: Vec<Option<Bound>> = vec![None; graph.tensors().len()];
        let set = self.set(owner);
        for id in section.outside_tensors() {
            let tensor = graph.tensor(id);
            bound[id.index()] = match tensor.class {
                TensorClass::Parameter(_) => {
                    let index = set.position(&tensor.name).expect("collected from the sections");
                    Some(self.weight_bound(owner, index))
                }
                _ => match self.values.exports[m].get(&tensor.name) {
                    Some(&value) => Some(Bound::one(self.layout.exports[m][&tensor.name], value)),
                    None => self.input(&tensor.name, m),
                },
            };
        }
        for (name, id) in &section.exports {
            let place = self.layout.exports[m][name];
            bind(&mut bound, *id, Bound::one(place, self.values.exports[m][name]));
        }
        if section.name == self.lowering.task.proceed.prologue.name {
            for (&id, &place) in &self.layout.prologue_kept[m] {
                bind(&mut bound, id, Bound::one(place, self.values.prologue_kept[m][&id]));
            }
        }
        self.bind_gradients(section, &variant.storage, owner, &mut bound);
        bound
    }

    fn weight_bound(&self, owner: Owner, index: usize) -> Bound {
        let place = self.weights_place(owner);
        match owner {
            Owner::Layer(layer) => {
                let offset = self.layout.cut.layer.weights.entries[index].offset;
                self.values.weights[layer][index].at(place + offset)
            }
            Owner::Edge => {
                let offset = self.layout.cut.edge.weights.entries[index].offset;
                self.values.edge_weights[index].at(place + offset)
            }
        }
    }

    /// A gradient, and every tensor that it is accumulated through.
    fn bind_gradients(
        &self,
        section: &Section,
        storage: &[TensorId],
        owner: Owner,
        bound: &mut [Option<Bound>],
    ) {
        let Some(backward) = &section.backward else { return };
        let set = self.set(owner);
        for &ParameterGradient { parameter, gradient, .. } in &backward.parameters {
            let name = &section.graph.tensor(parameter).name;
            let index = set.position(name).expect("collected from the sections");
            let t = set.trainable().position(|known| known == index).expect("it learns");
            let place = self.gradients_place(owner);
            let (slab, pieces) = match owner {
                Owner::Layer(layer) => {
                    (&self.layout.cut.layer.gradients, self.values.gradients[layer][t])
                }
                Owner::Edge => (&self.layout.cut.edge.gradients, self.values.edge_gradients[t]),
            };
            let all = pieces.at(place + slab.entries[t].offset);
            let root = storage[gradient.index()];
            for id in section.graph.ids().filter(|id| storage[id.index()] == root) {
                bound[id.index()] = Some(all);
            }
        }
    }

    fn bind_kept(&self, bound: &mut [Option<Bound>], layer: usize, m: usize) {
        let slab = &self.layout.kept_slabs[layer];
        let start = self.layout.kept[layer][m];
        for (entry, &(_, id)) in slab.tensors.iter().enumerate() {
            let place = start + slab.slab.entries[entry].offset;
            bound[id.index()] = Some(self.values.kept[layer][m][entry].at(place));
        }
    }

    /// Takes the next slot of the ring for a layer's offloaded units, if it has any.
    fn bind_offloaded(
        &mut self,
        bound: &mut [Option<Bound>],
        layer: usize,
        m: usize,
    ) -> Option<usize> {
        let slab = &self.layout.offloaded_slabs[layer];
        if slab.tensors.is_empty() {
            return None;
        }
        let slot = self.activation_turns.next();
        let start = self.layout.activation_ring.slot(slot);
        for (entry, &(_, id)) in slab.tensors.iter().enumerate() {
            let place = start + slab.slab.entries[entry].offset;
            bound[id.index()] = Some(self.values.offloaded[layer][m][entry].at(place));
        }
        Some(slot)
    }

    // ---- what outlives a step -----------------------------------------------------------------------

    /// Where everything that lasts rests between steps. Called when the last group is emitted.
    fn declare_lasting(&mut self) {
        let device = |offset: usize| Place { tier: Tier::Device, offset };
        let host = |offset: usize| Place { tier: Tier::Host, offset };
        let deferred = self.decisions.update == UpdateTime::NextStep;
        let mut lasting = Vec::new();
        let owners = std::iter::once(Owner::Edge).chain((0..self.layers()).map(Owner::Layer));
        let weights_there: BTreeSet<usize> = self.weights_in_ring().into_iter().collect();
        let gradients_there: BTreeSet<usize> = self.gradients_in_ring().into_iter().collect();
        for owner in owners {
            let set = self.set(owner);
            let (slabs, prefix) = match owner {
                Owner::Edge => (&self.layout.cut.edge, String::new()),
                Owner::Layer(layer) => (&self.layout.cut.layer, format!("layers.{layer}.")),
            };
            let named = |tensor: &Tensor, suffix: &str, dtype: DType, class: TensorClass| Tensor {
                name: format!("{prefix}{}{suffix}", tensor.name),
                shape: tensor.shape.clone(),
                dtype,
                class,
            };
            // Starts of the slabs, wherever they rest.
            let (mut weights, mut gradients) = (Vec::new(), Vec::new());
            let states = match owner {
                Owner::Edge if self.decisions.edge_states_resident => {
                    device(self.layout.edge_states)
                }
                Owner::Edge => host(self.layout.edge_states),
                Owner::Layer(layer) if self.decisions.states.is_pinned(layer) => {
                    device(self.states_device(owner))
                }
                Owner::Layer(_) => host(self.states_host(owner)),
            };
            match owner {
                Owner::Edge => {
                    weights.push(device(self.layout.edge_weights));
                    gradients.push(device(self.layout.edge_gradients));
                }
                Owner::Layer(layer) => {
                    let pinned = self.decisions.weights.is_pinned(layer);
                    if !pinned {
                        weights.push(host(self.weights_host(layer)));
                    }
                    if pinned || weights_there.contains(&layer) {
                        weights.push(device(self.weights_place(owner)));
                    }
                    let on_device = self.decisions.gradients.is_pinned(layer)
                        || gradients_there.contains(&layer);
                    gradients.push(match on_device {
                        true => device(self.gradients_place(owner)),
                        false => host(self.gradients_host(layer)),
                    });
                }
            }
            let mut add = |tensor: Tensor, pieces: Pieces, starts: &[Place], offset: usize| {
                let places = starts
                    .iter()
                    .map(|place| Place { offset: place.offset + offset, ..*place })
                    .collect();
                let pieces = (0..pieces.count as usize).map(|index| pieces.piece(index)).collect();
                lasting.push(Lasting { tensor, pieces, places });
            };
            for (index, parameter) in set.parameters.iter().enumerate() {
                let Tensor { dtype, class, .. } = parameter.tensor;
                let pieces = match owner {
                    Owner::Edge => self.values.edge_weights[index],
                    Owner::Layer(layer) => self.values.weights[layer][index],
                };
                let offset = slabs.weights.entries[index].offset;
                add(named(&parameter.tensor, "", dtype, class), pieces, &weights, offset);
            }
            let trainable: Vec<usize> = set.trainable().collect();
            for (t, &index) in trainable.iter().enumerate() {
                let parameter = &set.parameters[index];
                let (gradient_pieces, state_pieces) = match owner {
                    Owner::Edge => (self.values.edge_gradients[t], &self.values.edge_states),
                    Owner::Layer(layer) => {
                        (self.values.gradients[layer][t], &self.values.states[layer])
                    }
                };
                if deferred {
                    let dtype = parameter.gradient.expect("it learns");
                    let tensor = named(&parameter.tensor, ".grad", dtype, TensorClass::Gradient);
                    add(tensor, gradient_pieces, &gradients, slabs.gradients.entries[t].offset);
                }
                for (kind, name) in set.kinds().iter().enumerate() {
                    let state = parameter.state.iter().find(|(known, _)| known == name);
                    let Some(&(_, dtype)) = state else { continue };
                    let class = TensorClass::OptimizerState;
                    let tensor = named(&parameter.tensor, &format!(".{name}"), dtype, class);
                    let entry = kind * trainable.len() + t;
                    let offset = slabs.states.entries[entry].offset;
                    add(tensor, state_pieces[entry], &[states], offset);
                }
            }
        }
        if deferred {
            let (_, clip) = self.norm_names();
            let bound = self.scalar(&clip);
            lasting.push(Lasting {
                tensor: Tensor {
                    name: clip,
                    shape: Shape::scalar(),
                    dtype: DType::F32,
                    class: TensorClass::Activation,
                },
                pieces: vec![bound.first],
                places: vec![device(bound.offset)],
            });
        }
        self.plan.lasting = lasting;
    }
}

fn bind(bound: &mut [Option<Bound>], id: TensorId, to: Bound) {
    bound[id.index()] = Some(to);
}
