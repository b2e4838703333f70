//! The order of a step: groups of micro-batches, block by block, forward and backward.

use super::Lowering;
use super::emit::{Emit, Ends, Mark};
use super::lanes::Lane;
use super::layout::InputPlaces;
use super::norm::norm_names;
use super::residency::Class;
use super::streams::Gradients;
use super::update::Pace;
use super::variant::Variant;
use crate::decisions::UpdateTime;
use crate::plan::{Fetch, Input, Operand, Place, Plan, PlanResult, ReadAhead, Run, SegmentId};
use crate::queue::Link;
use crate::tier::Tier;
use crate::{Decisions, Storage, TensorKind};
use smallvec::smallvec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use storm_graph::{Block, DType, Shape, Tensor, TensorClass};

/// Which segments a plan has besides its step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Besides {
    Nothing,
    /// One that applies a pending update alone, if updates are deferred to the next step.
    Flush,
    /// That, and one that evaluates the model.
    FlushAndEvaluation,
}

/// What is special about a group of micro-batches.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    /// Starts the gradients.
    begins_lane: bool,
    /// The lane whose gradients it ends.
    ends_lane: Option<Lane>,
    /// The first of the step: applies what the previous step deferred.
    is_first: bool,
    pass: Pass,
}

impl Group {
    /// The last of the step: norm, clipping.
    fn is_last(self) -> bool {
        self.ends_lane.is_some_and(Lane::ends_step)
    }
}

/// A block whose gradients were sent to their owners, and not yet added up.
#[derive(Clone, Copy)]
pub(super) struct Exchanged {
    block: usize,
    group: Group,
}

/// What a group runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    ForwardOnly,
    Training,
}

pub(super) fn emit(lowering: &Lowering<'_>, decisions: &Decisions, besides: Besides) -> Plan {
    let mut emit = Emit::new(lowering, decisions);
    emit.settle();
    emit.declare_host_tensors();
    let forward = Group {
        begins_lane: true,
        ends_lane: Some(Lane::ONLY),
        is_first: true,
        pass: Pass::ForwardOnly,
    };
    match lowering.task.training {
        Some(_) => emit.lanes(),
        None => {
            for kind in 0..decisions.groups.len() {
                emit.begin_group(kind);
                let segment = emit.group(forward, "group");
                let times = decisions.groups[kind].times;
                emit.plan.step.push(Run { segment, times });
            }
        }
    }
    emit.declare_lasting();
    if lowering.task.training.is_none() {
        return emit.plan;
    }
    if decisions.update == UpdateTime::NextStep && besides >= Besides::Flush {
        emit.plan.flush = Some(emit.flush());
    }
    if besides == Besides::FlushAndEvaluation {
        // As many micro-batches as a block can take at once, so streamed weights are copied least
        // often.
        let kinds = 0..decisions.groups.len();
        let largest = kinds.max_by_key(|&kind| decisions.groups[kind].micro_batches);
        emit.begin_group(largest.expect("a step has groups"));
        emit.plan.evaluation = Some(emit.restoring("evaluation", |emit| {
            emit.copy_forward_inputs();
            emit.forward(forward);
        }));
    }
    emit.plan
}

impl Emit<'_> {
    fn count(&self) -> usize {
        self.lowering.blocks.count()
    }

    /// All lanes of a step, each with the groups that are decided. Groups that do the same are one segment: every group that
    /// does not end the step leaves the rings alike.
    fn lanes(&mut self) {
        let mut known = BTreeMap::new();
        for (lane, times) in Lane::of_step(self.lowering.task) {
            let mut runs = Vec::new();
            for kind in 0..self.decisions.groups.len() {
                self.groups(kind, lane, &mut known, &mut runs);
            }
            match &mut runs[..] {
                [run] => run.times *= times,
                _ => runs = runs.repeat(times),
            }
            self.plan.step.append(&mut runs);
        }
    }

    /// All groups of a kind in a lane. The first and the last group of the lane are separate segments.
    fn groups(
        &mut self,
        kind: usize,
        lane: Lane,
        known: &mut BTreeMap<(usize, Group), SegmentId>,
        runs: &mut Vec<Run>,
    ) {
        let begins_lane = kind == 0;
        let is_first = begins_lane && lane.begins_step();
        let ends_lane = (kind + 1 == self.decisions.groups.len()).then_some(lane);
        let middle =
            Group { begins_lane: false, ends_lane: None, is_first: false, pass: Pass::Training };
        let mut left = self.decisions.groups[kind].times;
        let mut run = |group: Group, name: &'static str, times: usize| {
            let segment = *known.entry((kind, group)).or_insert_with(|| {
                self.begin_group(kind);
                self.group(group, name)
            });
            runs.push(Run { segment, times });
        };
        let of_step = lane.is_only();
        if begins_lane && ends_lane.is_some() && left == 1 {
            let whole = Group { begins_lane, ends_lane, is_first, ..middle };
            run(whole, if of_step { "whole step" } else { "whole lane" }, 1);
            return;
        }
        if begins_lane {
            let name = if is_first { "first group" } else { "first group of a lane" };
            run(Group { begins_lane, is_first, ..middle }, name, 1);
            left -= 1;
        }
        let before_last = left - usize::from(ends_lane.is_some());
        if before_last > 0 {
            run(middle, "middle group", before_last);
        }
        if ends_lane.is_some() {
            let name = if lane.ends_step() { "last group" } else { "last group of a lane" };
            run(Group { ends_lane, ..middle }, name, 1);
        }
    }

    /// One group of micro-batches.
    fn group(&mut self, group: Group, name: &'static str) -> SegmentId {
        if group.pass == Pass::Training {
            self.take_data_of_group();
        }
        self.copy_inputs(group.is_first);
        self.forward(group);
        if group.pass == Pass::Training {
            self.backward(group);
            if group.is_last() {
                self.finish();
            }
        }
        self.end_segment(name)
    }

    /// Applies a pending update alone.
    fn flush(&mut self) -> SegmentId {
        self.restoring("flush", |emit| {
            emit.copy_inputs_where(false);
            for (class, stage, index) in emit.residency.in_rings() {
                if class == Class::Gradients {
                    let block = emit.lowering.blocks.number(stage, index);
                    emit.write_back_gradients(block, Gradients::Own);
                }
            }
            for block in 0..emit.count() {
                for update in emit.updates(block) {
                    emit.update(update);
                }
            }
        })
    }

    /// A segment outside of a step, which restores the contents of the rings.
    fn restoring(&mut self, name: &'static str, run: impl FnOnce(&mut Self)) -> SegmentId {
        let rest = self.residency.clone();
        run(self);
        for (class, stage, index) in rest.in_rings() {
            let block = self.lowering.blocks.number(stage, index);
            match class {
                Class::Weights => self.fetch_own_weights(block),
                // Gradients outlive a step only until a deferred update.
                Class::Gradients if self.decisions.update == UpdateTime::NextStep => {
                    self.fetch_gradients(block, Gradients::Own);
                }
                Class::Gradients => {}
            }
        }
        // The next segment follows a step, so it does not see what else this one left in the rings.
        self.residency = rest;
        self.end_segment(name)
    }

    /// Sets the rings to what a step leaves there. Every slot is used in a step, so earlier contents
    /// make no difference.
    fn settle(&mut self) {
        self.begin_group(self.decisions.groups.len() - 1);
        let last = self.lowering.blocks.last();
        let weights = |emit: &mut Self, block: usize| {
            for owner in emit.weight_blocks(block) {
                emit.enter(Class::Weights, owner);
            }
        };
        // The last group decides. If it is also the first, it applies deferred updates.
        let trains = self.lowering.task.training.is_some();
        let is_only_group = self.lowering.task.micro_batches == self.group_size();
        let updates = trains && is_only_group && self.decisions.update == UpdateTime::NextStep;
        for block in 0..=last {
            if updates && !self.updates_beside(block) {
                self.enter_for_update(block);
            }
            weights(self, block);
            if updates && block < last && self.updates_beside(block + 1) {
                self.enter_for_update(block + 1);
            }
        }
        if !trains {
            return;
        }
        self.enter(Class::Gradients, last);
        for stretch in self.stretches() {
            for block in stretch.start..stretch.end - 1 {
                weights(self, block);
            }
            for block in stretch.rev().filter(|&block| self.lowering.blocks.is_reached(block)) {
                weights(self, block);
                self.enter(Class::Gradients, block);
            }
        }
        if self.decisions.update == UpdateTime::EndOfStep {
            for block in 0..=last {
                self.enter_for_update(block);
            }
        }
    }

    /// Gives a block the slots that its updates need, if there are any.
    fn enter_for_update(&mut self, block: usize) {
        if !self.updates(block).is_empty() {
            for class in Class::ALL {
                self.enter(class, block);
            }
        }
    }

    // ---- inputs and results ---------------------------------------------------------------------

    /// Declares what the host writes and reads; the copies are filled in as they are emitted.
    fn declare_host_tensors(&mut self) {
        let mut inputs = Vec::new();
        for (index, input) in self.layout.inputs.iter().enumerate() {
            for m in 0..input.count {
                inputs.push(Input {
                    tensor: Tensor::clone(&input.tensor),
                    value: self.values.inputs[index][m],
                    micro_batch: input.per_micro_batch.then_some(m as u16),
                    place: Place { tier: Tier::HOST, offset: input.host.of(m) },
                    copies: Vec::new(),
                    fetches: Vec::new(),
                });
            }
        }
        self.plan.inputs = inputs;
        let mut results = Vec::new();
        for (index, result) in self.lowering.shared.results.iter().enumerate() {
            let (_, host) = self.layout.results[index];
            for m in 0..self.decisions.group_max() {
                results.push(PlanResult {
                    tensor: result.tensor.clone(),
                    value: self.values.results[index][m],
                    micro_batch: Some(m as u16),
                    place: Place { tier: Tier::HOST, offset: host.of(m) },
                    copies: Vec::new(),
                });
            }
        }
        if let Some(training) = &self.lowering.task.training {
            let (name, _) = norm_names(&training.norm);
            results.push(PlanResult {
                value: self.values.scalars[&name],
                tensor: Tensor {
                    name,
                    shape: Shape::scalar(),
                    dtype: DType::F32,
                    class: TensorClass::Activation,
                },
                micro_batch: None,
                place: Place { tier: Tier::HOST, offset: self.layout.norm_host },
                copies: Vec::new(),
            });
        }
        self.plan.results = results;
    }

    /// Fetches the inputs of a group that come from a data source, and reads ahead as many micro-batches.
    fn take_data_of_group(&mut self) {
        let micro_batches = self.group_size();
        let (mut inputs, mut bytes, mut number) = (Vec::new(), 0, 0);
        for input in &self.layout.inputs {
            for m in 0..input.count {
                if input.is_fetched && m < micro_batches {
                    inputs.push(number);
                    bytes += input.tensor.size_bytes();
                }
                number += 1;
            }
        }
        if !inputs.is_empty() {
            let read = ReadAhead { micro_batches, bytes };
            self.take_data(Fetch { inputs, micro_batches }, read);
        }
    }

    fn copy_inputs(&mut self, first: bool) {
        if first {
            self.copy_inputs_where(false);
        }
        self.copy_inputs_where(true);
    }

    /// Only what the forward pass alone reads.
    fn copy_forward_inputs(&mut self) {
        let read = self.lowering.task.forward.inputs();
        self.copy_inputs_that(|input| read.iter().any(|known| known.name == input.tensor.name));
    }

    fn copy_inputs_where(&mut self, per_micro_batch: bool) {
        self.copy_inputs_that(|input| input.per_micro_batch == per_micro_batch);
    }

    fn copy_inputs_that(&mut self, is_wanted: impl Fn(&InputPlaces) -> bool) {
        let mut number = 0;
        for index in 0..self.layout.inputs.len() {
            let input = self.layout.inputs[index].clone();
            for m in 0..input.count {
                if is_wanted(&input) && m < self.group_size() {
                    let value = self.values.inputs[index][m];
                    let values = smallvec![Operand { value, offset: 0 }];
                    let (bytes, mark) = (input.tensor.size_bytes(), Mark::Input(number));
                    let (device, host) = (input.device.of(m), input.host.of(m));
                    let ends = Ends { kind: TensorKind::Inputs, device, host };
                    self.copy(0, Link::HOST_TO_DEVICE, ends, bytes, values, mark);
                }
                number += 1;
            }
        }
    }

    /// Copies the results of a block to the host.
    fn send_results(&mut self, block: usize, m: usize) {
        for index in 0..self.lowering.shared.results.len() {
            if self.lowering.shared.results[index].block == block {
                let (device, _) = self.layout.results[index];
                self.send_result(index * self.decisions.group_max() + m, device.of(m));
            }
        }
    }

    fn send_result(&mut self, index: usize, device: usize) {
        let PlanResult { value, place, ref tensor, .. } = self.plan.results[index];
        let bytes = tensor.size_bytes();
        let values = smallvec![Operand { value, offset: 0 }];
        let ends = Ends { kind: TensorKind::Inputs, device, host: place.offset };
        let after = self.position();
        self.copy(after, Link::DEVICE_TO_HOST, ends, bytes, values, Mark::Result(index));
    }

    // ---- forward ----------------------------------------------------------------------------------

    fn forward(&mut self, group: Group) {
        let updates = group.pass == Pass::Training
            && group.is_first
            && self.decisions.update == UpdateTime::NextStep;
        let last = self.lowering.blocks.last();
        let mut places = vec![self.places().input_ring.start; self.group_size()];
        for block in 0..=last {
            if updates && !self.updates_beside(block) {
                for update in self.updates(block) {
                    self.update(update);
                }
            }
            self.fetch_weights(block);
            if block == last && group.pass == Pass::Training {
                self.last_block(group, &places);
                return;
            }
            let due = match updates && block < last && self.updates_beside(block + 1) {
                true => self.updates(block + 1),
                false => Vec::new(),
            };
            let variant = self.forward_of(block, group);
            let total = variant.forward.seconds * self.group_size() as f64;
            let mut pace = Pace::over(due, total);
            for (m, place) in places.iter_mut().enumerate() {
                *place = self.block_forward(block, m, *place, group, &mut pace);
            }
            for update in pace.rest() {
                self.update(update);
            }
            self.touch_weights(block);
        }
    }

    /// Whether a block's updates can run while the block before it does, which then needs memory for
    /// the weights of both.
    fn updates_beside(&self, block: usize) -> bool {
        let Some(before) = block.checked_sub(1) else { return false };
        let at = |block: usize| {
            let Block { stage, index } = self.lowering.blocks.get(block);
            (stage, index)
        };
        let (stage, index) = at(block);
        self.weight_blocks(before).into_iter().all(|owner| {
            let read = (Class::Weights, at(owner).0, at(owner).1);
            Class::ALL
                .iter()
                .all(|&class| !self.residency.meet(&self.layout, read, (class, stage, index)))
        })
    }

    /// A block as its forward pass runs.
    fn forward_of(&self, block: usize, group: Group) -> Arc<Variant> {
        let Block { stage, index } = self.lowering.blocks.get(block);
        match group.pass == Pass::Training && self.lowering.blocks.is_reached(block) {
            true => {
                let saved = &self.decided().stages[stage].saved[index];
                self.lowering.training_variants(stage, saved)[1].clone()
            }
            false if group.pass == Pass::Training => self.lowering.unreached_variant(stage),
            false => self.lowering.forward_variant(stage),
        }
    }

    /// Runs a block forward and returns where its result is.
    fn block_forward(
        &mut self,
        block: usize,
        m: usize,
        input: usize,
        group: Group,
        pace: &mut Pace,
    ) -> usize {
        let variant = self.forward_of(block, group);
        let saves = group.pass == Pass::Training && self.lowering.blocks.is_reached(block);
        let mut bound = self.bind_block(&variant, block, m);
        let section = &variant.section;
        self.bind_taken(&mut bound, section, block, m, input);
        let mut output = self.places().input_ring.start;
        if block < self.lowering.blocks.last() {
            output = match group.pass {
                Pass::Training => self.next_input(block + 1, m),
                Pass::ForwardOnly => self.next_ring_input(block + 1),
            };
            self.bind_handed_on(&mut bound, section, block, m, output);
        }
        let mut slot = None;
        if saves {
            self.bind_kept(&mut bound, block, m);
            slot = self.bind_offloaded(&mut bound, block, m);
        }
        let slab = self.places().offloaded_slabs[block].clone();
        let start = slot.map(|slot| self.places().activation_ring.slot(slot));
        let number = self.number(block);
        self.run_pass(&variant, &variant.forward, number, &bound, |emit, node| {
            if let Some(start) = start {
                emit.send_offloaded(block, m, start, &slab, node);
            }
            for update in pace.advance(node.seconds) {
                emit.update(update);
            }
        });
        let now = self.position();
        if let Some(slot) = slot {
            self.activation_turns.touch(slot, now);
        }
        self.touch_input(input);
        self.touch_input(output);
        if group.pass == Pass::Training && block < self.lowering.blocks.last() {
            self.made_input(block + 1, m, output);
        }
        self.send_results(block, m);
        output
    }

    /// The last block of each micro-batch, forward and backward.
    fn last_block(&mut self, group: Group, inputs: &[usize]) {
        let block = self.lowering.blocks.last();
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.begin_gradients(group, block);
        let pair =
            self.lowering.training_variants(stage, &self.decided().stages[stage].saved[index]);
        for (m, &input) in inputs.iter().enumerate() {
            let variant = pair[usize::from(!(group.begins_lane && m == 0))].clone();
            let mut bound = self.bind_block(&variant, block, m);
            let section = &variant.section;
            self.bind_taken(&mut bound, section, block, m, input);
            self.bind_carried_gradients(&mut bound, section, block, m);
            self.run_pass(&variant, &variant.backward, self.number(block), &bound, |_, _| {});
            self.touch_input(input);
            self.send_results(block, m);
        }
        self.touch_weights(block);
        self.end_gradients(group, block);
    }

    // ---- backward ---------------------------------------------------------------------------------

    /// Ranges of blocks, from the last to the first that learns; in each, only the first block has its
    /// input stored.
    fn stretches(&self) -> Vec<Range<usize>> {
        let mut stretches = Vec::new();
        let first = (0..self.count()).find(|&block| self.lowering.blocks.is_reached(block));
        let mut end = self.lowering.blocks.last();
        while end > first.unwrap_or(end) {
            let stored = |&block: &usize| self.input_storage(block) != Some(Storage::Recompute);
            let start = (0..end).rev().find(stored).unwrap_or(0);
            stretches.push(start..end);
            end = start;
        }
        stretches
    }

    fn backward(&mut self, group: Group) {
        let taken = self.places().input_slots_taken;
        self.input_turns.leave_out(taken);
        for stretch in self.stretches() {
            self.replay(stretch.clone());
            let start = stretch.start;
            for block in stretch.rev().filter(|&block| self.lowering.blocks.is_reached(block)) {
                self.block_backward(group, block, start);
            }
        }
        self.settle_sums();
    }

    /// The number of a block in its series, for random streams.
    fn number(&self, block: usize) -> usize {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.lowering.task.forward.stages()[stage].number(index)
    }

    /// Reruns blocks forward, for the inputs of those after the first.
    fn replay(&mut self, stretch: Range<usize>) {
        let group = self.group_size();
        for block in stretch.start..stretch.end - 1 {
            self.fetch_weights(block);
            let Block { stage, .. } = self.lowering.blocks.get(block);
            let variant = self.lowering.forward_variant(stage);
            for m in 0..group {
                let input = self.backward_input(block, m, stretch.start);
                let output = self.places().replayed.slot((block - stretch.start) * group + m);
                let mut bound = self.bind_block(&variant, block, m);
                let section = &variant.section;
                self.bind_taken(&mut bound, section, block, m, input);
                self.bind_handed_on(&mut bound, section, block, m, output);
                self.run_pass(&variant, &variant.forward, self.number(block), &bound, |_, _| {});
                self.touch_input(input);
            }
            self.touch_weights(block);
        }
    }

    fn block_backward(&mut self, group: Group, block: usize, stretch: usize) {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.fetch_weights(block);
        self.begin_gradients(group, block);
        let pair =
            self.lowering.training_variants(stage, &self.decided().stages[stage].saved[index]);
        for m in 0..self.group_size() {
            let variant = pair[usize::from(!(group.begins_lane && m == 0))].clone();
            let input = self.backward_input(block, m, stretch);
            let mut bound = self.bind_block(&variant, block, m);
            let section = &variant.section;
            self.bind_taken(&mut bound, section, block, m, input);
            self.bind_carried_gradients(&mut bound, section, block, m);
            self.bind_kept(&mut bound, block, m);
            let slot = self.bind_offloaded(&mut bound, block, m);
            if let Some(slot) = slot {
                self.fetch_offloaded(block, m, slot, &variant);
            }
            self.run_pass(&variant, &variant.backward, self.number(block), &bound, |_, _| {});
            let now = self.position();
            if let Some(slot) = slot {
                self.activation_turns.touch(slot, now);
            }
            self.touch_input(input);
        }
        self.touch_weights(block);
        self.end_gradients(group, block);
    }

    /// Gives a block's gradients their slot: empty at the start of a lane, with the sums so far later
    /// on.
    fn begin_gradients(&mut self, group: Group, block: usize) {
        match group.begins_lane {
            true => drop(self.enter(Class::Gradients, block)),
            false => self.fetch_gradients(block, Gradients::All),
        }
    }

    /// Copies a block's gradients out if they cannot stay. At the end of a lane they are complete, and at the end of a step
    /// final.
    fn end_gradients(&mut self, group: Group, block: usize) {
        self.advance_sums();
        let Some(lane) = group.ends_lane else { return self.leave_gradients(group, block) };
        self.fold_tied(block);
        match self.exchange_gradients(block) {
            // The next block is computed meanwhile.
            true => self.exchanged = Some(Exchanged { block, group }),
            false => self.end_lane(group, block, lane),
        }
    }

    /// Adds up what was sent of blocks' gradients. If machines add up their lanes first, their sums are then sent on: another block is
    /// computed meanwhile, and the block whose sums were sent before is complete.
    fn advance_sums(&mut self) {
        if let Some(Exchanged { block, group }) = self.exchanged_sums.take()
            && let Some(lane) = group.ends_lane
        {
            self.end_lane(group, block, lane);
        }
        let Some(exchanged) = self.exchanged.take() else { return };
        let Exchanged { block, group } = exchanged;
        if self.lowering.task.rank.has_levels() {
            self.sum_machine(block);
            self.exchange_sums(block);
            self.exchanged_sums = Some(exchanged);
        } else if let Some(lane) = group.ends_lane {
            self.end_lane(group, block, lane);
        }
    }

    /// Adds up all that was sent.
    fn settle_sums(&mut self) {
        while self.exchanged.is_some() || self.exchanged_sums.is_some() {
            self.advance_sums();
        }
    }

    /// Adds up what was sent of blocks whose gradients have memory that another block is about to take.
    pub(super) fn settle_sums_in(&mut self, class: Class, block: usize) {
        while self.sums_wait_in(class, block) {
            self.advance_sums();
        }
    }

    fn sums_wait_in(&self, class: Class, block: usize) -> bool {
        let at = |class: Class, block: usize| {
            let Block { stage, index } = self.lowering.blocks.get(block);
            (class, stage, index)
        };
        let mut waiting = [self.exchanged_sums, self.exchanged].into_iter().flatten();
        waiting.any(|Exchanged { block: waiting, .. }| {
            let is_same = class == Class::Gradients && block == waiting;
            let (one, other) = (at(class, block), at(Class::Gradients, waiting));
            !is_same && self.residency.meet(&self.layout, one, other)
        })
    }

    /// The gradients of a block are those of a lane.
    fn end_lane(&mut self, group: Group, block: usize, lane: Lane) {
        self.sum_lane(block, lane);
        self.leave_gradients(group, block);
    }

    fn leave_gradients(&mut self, group: Group, block: usize) {
        if group.is_last() {
            self.sum_squares(block);
        }
        if self.decisions.update == UpdateTime::InBackward {
            // Everything is there, and what else reads these weights in this step has read them: blocks before this one in
            // the program own what they share with it.
            for update in self.updates(block) {
                self.update(update);
            }
        }
        self.touch(Class::Gradients, block);
        // What the sum of lanes has is not needed again.
        let stage = self.lowering.blocks.get(block).stage;
        let is_summed = group.ends_lane.is_some_and(|lane| !lane.ends_step())
            && !self.lowering.sets[stage].makes_parts();
        if !is_summed && self.gradients_leave(block, group.is_last()) {
            let which = match group.ends_lane {
                Some(_) => Gradients::Complete,
                None => Gradients::All,
            };
            self.write_back_gradients(block, which);
        }
    }

    /// Whether other blocks use the slot of a block's gradients before they are needed again.
    pub(super) fn gradients_leave(&self, block: usize, is_last_group: bool) -> bool {
        let Block { stage, index } = self.lowering.blocks.get(block);
        let streaming = self.decisions.stages[stage].gradients;
        let repeat = self.lowering.task.program().stages()[stage].repeat;
        let is_applied = self.decisions.update == UpdateTime::InBackward
            && !self.lowering.sets[stage].makes_parts();
        if streaming.is_pinned(index) || is_applied {
            return false;
        }
        if self.residency.is_shared(&self.layout, Class::Gradients, stage, index) {
            return true;
        }
        let ring_holds_all = streaming.slots() >= repeat;
        let stays_for_update = is_last_group && index < streaming.slots();
        !ring_holds_all && !stays_for_update
    }

    /// After the last backward pass: norm, clip scale, and the update unless it is deferred.
    fn finish(&mut self) {
        self.finish_norm();
        let (norm, _) = norm_names(&self.lowering.training().norm);
        let place = self.layout.scalar(self.lowering, &norm).expect("the norm graph makes it");
        self.send_result(self.plan.results.len() - 1, place);
        if self.decisions.update == UpdateTime::EndOfStep {
            for block in 0..self.count() {
                for update in self.updates(block) {
                    self.update(update);
                }
            }
        }
    }
}
