//! Walks over a step: which items go to which queue, and which cells they touch.

mod collectives;
mod rings;

use super::parts::{BlockParts, Part, Streams};
use super::queues::{Moments, Segment, Touch, Use, step_seconds as simulated};
use super::tables::SlabCells;
use super::{Estimate, Sketch};
use crate::decisions::UpdateTime;
use crate::lower::lanes::Lane;
use crate::lower::layout::Layout;
use crate::lower::residency::{Class, Residency, Turns};
use crate::lower::update::Pace;
use crate::queue::Link;
use crate::{Decisions, GroupDecisions, Storage};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use storm_graph::Block;

pub(super) fn step_seconds(
    sketch: &Sketch<'_>,
    decisions: &Decisions,
    layout: &Layout,
) -> Estimate {
    let mut walk = Walk::new(sketch, decisions, layout);
    walk.settle();
    for (lane, times) in Lane::kinds_of_step(sketch.lowering.task) {
        for kind in 0..decisions.groups.len() {
            walk.groups(kind, lane, times);
        }
    }
    let Walk { segments, segment, cells, mut buffers, .. } = walk;
    let profile = sketch.lowering.profile;
    let (seconds, followed) = simulated(&segments, cells.count, profile, &mut buffers.moments);
    let items = followed + segments.iter().map(Segment::items).sum::<usize>();
    buffers.segments.extend(segments.into_iter().chain([segment]));
    sketch.give_back(buffers);
    Estimate { seconds, items }
}

/// Memory that sketches use in turn, so that allocating it takes no time.
#[derive(Default)]
pub(super) struct Buffers {
    segments: Vec<Segment>,
    moments: Moments,
    written_at: Vec<(u32, u32)>,
}

impl Buffers {
    fn empty_segment(&mut self) -> Segment {
        let mut segment = self.segments.pop().unwrap_or_default();
        segment.clear();
        segment
    }
}

/// Where the cells of each thing start.
struct Cells {
    count: u32,
    /// By slot of the rings of weights and gradients; empty for slots of pinned blocks.
    slots: Vec<Range<u32>>,
    /// Slots by class and stage, in the order of the slots.
    stages: Vec<(Class, usize)>,
    state_ring: u32,
    disk_ring: u32,
    frozen_ring: u32,
    /// Inputs and results of a step, by micro-batch of a group.
    inputs: u32,
    results: u32,
    /// Rings of the groups being walked.
    activation_ring: u32,
    input_ring: u32,
    /// In host memory: weights and gradients by block, saved tensors and inputs by block and micro-batch.
    host: [Vec<u32>; 2],
    host_saved: u32,
    host_inputs: u32,
    /// What other ranks of the machine sent of a block's gradients, the sums of the machine, and what other machines sent of theirs.
    received: u32,
    machine: u32,
    sums: u32,
    /// Partial sums of squares, and those of all ranks.
    squares: u32,
    all_squares: u32,
}

impl Cells {
    fn take(&mut self, count: usize) -> u32 {
        let first = self.count;
        self.count += count as u32;
        first
    }
}

#[derive(Clone, Copy)]
struct Group {
    begins_lane: bool,
    ends_lane: Option<Lane>,
    is_first: bool,
}

/// A block whose gradients were sent to their owners, and not yet added up.
#[derive(Clone, Copy)]
struct Exchanged {
    block: usize,
    group: Group,
    lane: Lane,
}

impl Group {
    fn is_last(self) -> bool {
        self.ends_lane.is_some_and(Lane::ends_step)
    }
}

struct Walk<'s> {
    sketch: &'s Sketch<'s>,
    decisions: &'s Decisions,
    layout: &'s Layout,
    kind: usize,
    residency: Residency,
    state_turns: Turns,
    disk_turns: Turns,
    frozen_turns: Turns,
    /// How many updates of the segment have had a slot on their way from the disk.
    disk_count: usize,
    /// Sizes of the state on disk of all updates.
    on_disk: Vec<usize>,
    activation_turns: Turns,
    input_turns: Turns,
    arriving: [Option<usize>; 2],
    exchanged: Option<Exchanged>,
    exchanged_sums: Option<Exchanged>,
    cells: Cells,
    /// Memory of other slots that the next kernels overwrite.
    taken_over: Vec<Touch>,
    buffers: Buffers,
    segment: Segment,
    segments: Vec<Segment>,
    /// The parts of the previous block, which the next one usually shares.
    last_parts: Option<(Streams, Arc<BlockParts>)>,
    bandwidth: [f64; 2],
    disk_bandwidth: [f64; 2],
}

impl<'s> Walk<'s> {
    fn new(sketch: &'s Sketch<'s>, decisions: &'s Decisions, layout: &'s Layout) -> Walk<'s> {
        let lowering = sketch.lowering;
        let mut cells = Cells {
            count: 0,
            slots: Vec::new(),
            stages: Vec::new(),
            state_ring: 0,
            disk_ring: 0,
            frozen_ring: 0,
            inputs: 0,
            results: 0,
            activation_ring: 0,
            input_ring: 0,
            host: [Vec::new(), Vec::new()],
            host_saved: 0,
            host_inputs: 0,
            received: 0,
            machine: 0,
            sums: 0,
            squares: 0,
            all_squares: 0,
        };
        // Kernels wait for collectives even if everything stays on the device.
        let shares = lowering.shares_step();
        for class in Class::ALL {
            for (stage, places) in class.places(layout).iter().enumerate() {
                let count = slab_cells(sketch, class, stage).count;
                for slot in 0..places.streaming.slots() {
                    let has_none = places.streaming.is_pinned(slot) && !shares;
                    let count = if has_none { 0 } else { count };
                    let first = cells.take(count as usize);
                    cells.slots.push(first..first + count);
                    cells.stages.push((class, stage));
                }
            }
            let blocks = 0..lowering.blocks.count();
            let count = |block| slab_cells(sketch, class, lowering.blocks.get(block).stage).count;
            let host = blocks.map(|block| cells.take(count(block) as usize)).collect();
            cells.host[class as usize] = host;
        }
        cells.state_ring = cells.take(layout.state_ring.slots.max(1) * sketch.tables.state_runs);
        cells.disk_ring = cells.take(layout.disk_ring.slots);
        cells.frozen_ring = cells.take(layout.frozen_ring.slots);
        [cells.received, cells.machine, cells.sums] = [0; 3].map(|_| cells.take(1));
        [cells.squares, cells.all_squares] = [0; 2].map(|_| cells.take(1));
        let on_disk = rings::on_disk(lowering, layout);
        let most = decisions.group_max();
        cells.inputs = cells.take(lowering.shared.inputs.len() * most);
        cells.results = cells.take(most);
        let links = [Link::HOST_TO_DEVICE, Link::DEVICE_TO_HOST];
        let mut buffers = sketch.buffers();
        buffers.written_at.clear();
        let segment = buffers.empty_segment();
        Walk {
            sketch,
            decisions,
            layout,
            kind: 0,
            residency: Residency::new(layout),
            state_turns: Turns::new(layout.state_ring.slots),
            disk_turns: Turns::new(layout.disk_ring.slots),
            frozen_turns: Turns::new(layout.frozen_ring.slots),
            disk_count: 0,
            on_disk,
            activation_turns: Turns::new(0),
            input_turns: Turns::new(0),
            arriving: [None, None],
            exchanged: None,
            exchanged_sums: None,
            cells,
            taken_over: Vec::new(),
            buffers,
            segment,
            segments: Vec::new(),
            last_parts: None,
            bandwidth: links.map(|link| lowering.profile.link(link).bandwidth),
            disk_bandwidth: [Link::DISK_TO_HOST, Link::HOST_TO_DISK].map(|link| {
                lowering.profile.find_link(link).map_or(f64::INFINITY, |rates| rates.bandwidth)
            }),
        }
    }

    // ---- groups and segments ------------------------------------------------------------------

    fn begin_group(&mut self, kind: usize) {
        self.kind = kind;
        let places = &self.layout.groups[kind];
        self.activation_turns = Turns::new(places.activation_ring.slots);
        self.input_turns = Turns::new(places.input_ring.slots);
        let units = self.sketch.lowering.units.iter().map(Vec::len).max().unwrap_or(0);
        let (blocks, group) = (self.count(), self.group_size());
        let cells = &mut self.cells;
        cells.activation_ring = cells.take(places.activation_ring.slots * units);
        cells.input_ring = cells.take(places.input_ring.slots.max(1));
        cells.host_saved = cells.take(blocks * group);
        cells.host_inputs = cells.take(blocks * group);
        self.buffers.written_at.resize(self.cells.count as usize, (u32::MAX, 0));
    }

    fn decided(&self) -> &'s GroupDecisions {
        &self.decisions.groups[self.kind]
    }

    fn group_size(&self) -> usize {
        self.decided().micro_batches
    }

    fn count(&self) -> usize {
        self.sketch.lowering.blocks.count()
    }

    fn trains(&self) -> bool {
        self.sketch.lowering.task.training.is_some()
    }

    fn defers(&self) -> bool {
        self.decisions.update == UpdateTime::NextStep
    }

    fn position(&self) -> usize {
        self.segment.position()
    }

    /// All groups of a kind in a lane that runs so many times in a row. The first and the last group are separate segments;
    /// each is followed for all these lanes at once.
    fn groups(&mut self, kind: usize, lane: Lane, lanes: usize) {
        self.begin_group(kind);
        let mut left = self.decided().times;
        let begins_lane = kind == 0;
        let is_first = begins_lane && lane.begins_step();
        let ends_lane = (kind + 1 == self.decisions.groups.len()).then_some(lane);
        if !self.trains() {
            let ends_lane = Some(Lane::ONLY);
            return self.group(Group { begins_lane: true, ends_lane, is_first: true }, left);
        }
        if begins_lane && ends_lane.is_some() && left == 1 {
            return self.group(Group { begins_lane, ends_lane, is_first }, lanes);
        }
        if begins_lane {
            self.group(Group { begins_lane, ends_lane: None, is_first }, lanes);
            left -= 1;
        }
        let middle = Group { begins_lane: false, ends_lane: None, is_first: false };
        let before_last = left - usize::from(ends_lane.is_some());
        if before_last > 0 {
            self.group(middle, before_last * lanes);
        }
        if ends_lane.is_some() {
            self.group(Group { ends_lane, ..middle }, lanes);
        }
    }

    fn group(&mut self, group: Group, times: usize) {
        self.copy_inputs(group);
        self.forward(group);
        if self.trains() {
            self.backward(group);
            if group.is_last() {
                self.finish();
            }
        }
        let next = self.buffers.empty_segment();
        let mut segment = std::mem::replace(&mut self.segment, next);
        segment.close(times);
        self.segments.push(segment);
        self.residency.begin_segment();
        self.disk_count = 0;
        for turns in [
            &mut self.state_turns,
            &mut self.disk_turns,
            &mut self.frozen_turns,
            &mut self.activation_turns,
            &mut self.input_turns,
        ] {
            turns.begin_segment();
        }
    }

    fn program_input(&self, input: usize, m: usize, used: Use) -> Touch {
        let m = if self.layout.inputs[input].per_micro_batch { m } else { 0 };
        let first = self.cells.inputs + (input * self.decisions.group_max() + m) as u32;
        Touch { first, count: 1, used }
    }

    fn copy_inputs(&mut self, group: Group) {
        for (input, places) in self.layout.inputs.iter().enumerate() {
            let count = if places.per_micro_batch { self.group_size() } else { 1 };
            for m in (0..count).filter(|_| places.per_micro_batch || group.is_first) {
                self.segment.touch([self.program_input(input, m, Use::Write)]);
                self.copy_in(0, places.tensor.size_bytes(), None);
                if places.per_micro_batch && !places.is_fetched {
                    self.segment.await_copy();
                }
            }
        }
    }

    /// Sets the rings to what a step leaves there.
    fn settle(&mut self) {
        self.kind = self.decisions.groups.len() - 1;
        let last = self.count() - 1;
        let lowering = self.sketch.lowering;
        let is_only_group = lowering.task.micro_batches == self.group_size();
        let updates = self.trains() && is_only_group && self.defers();
        for block in 0..=last {
            if updates && !self.updates_beside(block) {
                self.enter_for_update(block);
            }
            self.enter_weights(block);
            if updates && block < last && self.updates_beside(block + 1) {
                self.enter_for_update(block + 1);
            }
        }
        if !self.trains() {
            return;
        }
        self.enter(Class::Gradients, last);
        for stretch in self.stretches() {
            (stretch.start..stretch.end - 1).for_each(|block| self.enter_weights(block));
            for block in stretch.rev().filter(|&block| lowering.blocks.is_reached(block)) {
                self.enter_weights(block);
                self.enter(Class::Gradients, block);
            }
        }
        if self.decisions.update == UpdateTime::EndOfStep {
            (0..=last).for_each(|block| self.enter_for_update(block));
        }
    }

    fn enter_weights(&mut self, block: usize) {
        for position in 0..self.owners(block).len() {
            self.enter(Class::Weights, self.owner(block, position));
        }
    }

    fn enter_for_update(&mut self, block: usize) {
        if !self.sketch.tables.stages[self.at(block).stage].updates.is_empty() {
            for class in Class::ALL {
                self.enter(class, block);
            }
        }
    }

    // ---- passes -------------------------------------------------------------------------------

    fn parts(&mut self, block: usize) -> Arc<BlockParts> {
        let Block { stage, index } = self.at(block);
        let saved = &self.decided().stages[stage].saved[index];
        let mut owners = (0..self.owners(block).len()).map(|position| self.owner(block, position));
        let shares = self.sketch.lowering.shares_step();
        let weights = shares || owners.any(|owner| !self.is_pinned(Class::Weights, owner));
        let gradients = shares || !self.is_pinned(Class::Gradients, block);
        if let Some((known, parts)) = &self.last_parts
            && (known.stage, known.weights, known.gradients) == (stage, weights, gradients)
            && known.saved == *saved
        {
            return Arc::clone(parts);
        }
        let streams = Streams { stage, saved: saved.clone(), weights, gradients };
        let parts = self.sketch.block_parts(streams.clone());
        self.last_parts = Some((streams, Arc::clone(&parts)));
        parts
    }

    /// The kernels of a part, for a micro-batch.
    fn run_part(
        &mut self,
        block: usize,
        m: usize,
        part: &Part,
        others: impl Iterator<Item = Touch>,
    ) {
        self.segment.touch(self.taken_over.drain(..));
        for (position, cells) in &part.weights {
            let owner = self.owner(block, *position);
            self.segment.touch(self.in_slot(Class::Weights, owner, cells, Use::Read));
        }
        for cells in &part.gradients {
            self.segment.touch(self.in_slot(Class::Gradients, block, cells, Use::Write));
        }
        for &input in &part.inputs {
            self.segment.touch([self.program_input(input, m, Use::Read)]);
        }
        self.segment.touch(others);
        self.segment.compute(part.kernels.seconds, part.kernels.count);
    }

    fn input_cell(&self, slot: Option<usize>, used: Use) -> Option<Touch> {
        slot.map(|slot| Touch { first: self.cells.input_ring + slot as u32, count: 1, used })
    }

    /// The slot of inputs that the gradient of a block's input takes, if it does.
    fn shared_gradient_cell(&self, block: usize) -> Option<Touch> {
        let places = &self.layout.groups[self.kind];
        let from_the_end = self.sketch.lowering.blocks.last() - block;
        let place = places.carry_ring.slot(from_the_end);
        self.input_cell(places.input_ring.slot_of(place), Use::Write)
    }

    /// The cell of a unit in a slot of the ring of offloaded tensors. Blocks that offload other units use the same
    /// memory for those.
    fn unit_cell(&self, block: usize, slot: usize, unit: usize, used: Use) -> Touch {
        let units = self.sketch.lowering.units.iter().map(Vec::len).max().unwrap_or(0);
        let Block { stage, index } = self.at(block);
        let before = self.decided().stages[stage].saved[index][..unit].iter();
        let position = before.filter(|&&storage| storage == Storage::Offload).count();
        let first = self.cells.activation_ring + (slot * units + position) as u32;
        Touch { first, count: 1, used }
    }

    fn host_of(&self, first: u32, block: usize, m: usize, used: Use) -> Touch {
        Touch { first: first + (block * self.group_size() + m) as u32, count: 1, used }
    }

    fn offloads(&self, block: usize) -> bool {
        let Block { stage, index } = self.at(block);
        self.decided().stages[stage].saved[index].contains(&Storage::Offload)
    }

    fn unit_bytes(&self, block: usize, unit: usize) -> usize {
        self.sketch.lowering.units[self.at(block).stage][unit].size_bytes
    }

    fn input_storage(&self, block: usize) -> Option<Storage> {
        self.sketch.lowering.input_storage(self.decided(), block)
    }

    fn touch_input(&mut self, slot: Option<usize>) {
        if let Some(slot) = slot {
            let now = self.position();
            self.input_turns.touch(slot, now);
        }
    }

    // ---- forward ------------------------------------------------------------------------------

    fn forward(&mut self, group: Group) {
        let sketch = self.sketch;
        let updates = self.trains() && group.is_first && self.defers();
        let last = self.count() - 1;
        let mut inputs: Vec<Option<usize>> = vec![None; self.group_size()];
        for block in 0..=last {
            if updates && !self.updates_beside(block) {
                (0..self.updates_of(block)).for_each(|number| self.update(block, number));
            }
            self.fetch_weights(block);
            if block == last && self.trains() {
                return self.last_block(group, &inputs);
            }
            let is_reached = self.trains() && sketch.lowering.blocks.is_reached(block);
            let beside = updates && block < last && self.updates_beside(block + 1);
            let due = if beside { self.updates_of(block + 1) } else { 0 };
            let parts = is_reached.then(|| self.parts(block));
            let parts: &[Part] = match &parts {
                Some(parts) if due > 0 => &parts.forward_kernels,
                Some(parts) => &parts.forward,
                None => sketch.forward_parts(self.at(block).stage),
            };
            let total: f64 = parts.iter().map(|part| part.kernels.seconds).sum();
            let mut pace = Pace::over((0..due).collect(), total * self.group_size() as f64);
            for (m, input) in inputs.iter_mut().enumerate() {
                *input = self.block_forward(block, m, *input, parts, is_reached, &mut pace);
            }
            pace.rest().into_iter().for_each(|number| self.update(block + 1, number));
            self.touch_weights(block);
        }
    }

    fn block_forward(
        &mut self,
        block: usize,
        m: usize,
        input: Option<usize>,
        parts: &[Part],
        saves: bool,
        pace: &mut Pace<usize>,
    ) -> Option<usize> {
        let lowering = self.sketch.lowering;
        let mut output = None;
        let next = block + 1;
        if next < self.count() && lowering.blocks.seams[next].slab.size_bytes > 0 {
            let is_kept = self.trains() && self.input_storage(next) == Some(Storage::Keep);
            output = (!is_kept).then(|| self.input_turns.next());
        }
        let slot = (saves && self.offloads(block)).then(|| self.activation_turns.next());
        for (number, part) in parts.iter().enumerate() {
            let is_last = number + 1 == parts.len();
            let taken = self.input_cell(input, Use::Read).filter(|_| number == 0 || is_last);
            let made = self.input_cell(output, Use::Write).filter(|_| is_last);
            let units = slot.iter().flat_map(|&slot| part.units.iter().map(move |&u| (slot, u)));
            let units: SmallVec<[Touch; 4]> =
                units.map(|(slot, unit)| self.unit_cell(block, slot, unit, Use::Write)).collect();
            self.run_part(
                block,
                m,
                part,
                taken.into_iter().chain(made).chain(units.iter().copied()),
            );
            for (&unit, touch) in part.units.iter().zip(&units) {
                let touch = Touch { used: Use::Read, ..*touch };
                let host = self.host_of(self.cells.host_saved, block, m, Use::Write);
                for bytes in Self::copy_sizes(self.unit_bytes(block, unit)) {
                    self.segment.touch([touch]);
                    self.copy_out(bytes, Some(host));
                }
            }
            for update in pace.advance(part.kernels.seconds) {
                self.update(next, update);
            }
        }
        if let Some(slot) = slot {
            let now = self.position();
            self.activation_turns.touch(slot, now);
        }
        self.touch_input(input);
        self.touch_input(output);
        if self.trains() && next < self.count() {
            self.made_input(next, m, output);
        }
        output
    }

    fn made_input(&mut self, block: usize, m: usize, slot: Option<usize>) {
        if self.input_storage(block) == Some(Storage::Offload) {
            let host = self.host_of(self.cells.host_inputs, block, m, Use::Write);
            let bytes = self.sketch.lowering.blocks.seams[block].slab.size_bytes;
            for bytes in Self::copy_sizes(bytes) {
                self.segment.touch(self.input_cell(slot, Use::Read));
                self.copy_out(bytes, Some(host));
            }
        }
    }

    fn last_block(&mut self, group: Group, inputs: &[Option<usize>]) {
        let block = self.count() - 1;
        self.begin_gradients(group, block);
        let parts = self.parts(block);
        for (m, &input) in inputs.iter().enumerate() {
            let parts = &parts.backward[usize::from(!(group.begins_lane && m == 0))];
            for part in parts {
                self.run_part(block, m, part, self.input_cell(input, Use::Read).into_iter());
            }
            self.touch_input(input);
            let first = self.cells.results + m as u32;
            self.segment.touch([Touch { first, count: 1, used: Use::Write }]);
            self.segment.compute(0.0, 0);
            self.segment.touch([Touch { first, count: 1, used: Use::Read }]);
            self.copy_out(4, None);
            self.segment.await_copy();
        }
        self.touch_weights(block);
        self.end_gradients(group, block);
    }

    // ---- backward -----------------------------------------------------------------------------

    fn stretches(&self) -> Vec<Range<usize>> {
        let mut stretches = Vec::new();
        let blocks = &self.sketch.lowering.blocks;
        let first = (0..self.count()).find(|&block| blocks.is_reached(block));
        let mut end = blocks.last();
        while end > first.unwrap_or(end) {
            let stored = |&block: &usize| self.input_storage(block) != Some(Storage::Recompute);
            let start = (0..end).rev().find(stored).unwrap_or(0);
            stretches.push(start..end);
            end = start;
        }
        stretches
    }

    fn backward(&mut self, group: Group) {
        self.input_turns.leave_out(self.layout.groups[self.kind].input_slots_taken);
        for stretch in self.stretches() {
            self.replay(stretch.clone());
            let start = stretch.start;
            let blocks = &self.sketch.lowering.blocks;
            for block in stretch.rev().filter(|&block| blocks.is_reached(block)) {
                self.block_backward(group, block, start);
            }
        }
        self.settle_sums();
    }

    fn replay(&mut self, stretch: Range<usize>) {
        let sketch = self.sketch;
        for block in stretch.start..stretch.end - 1 {
            self.fetch_weights(block);
            let parts = sketch.forward_parts(self.at(block).stage);
            for m in 0..self.group_size() {
                let input = self.backward_input(block, m, stretch.start);
                for part in parts {
                    self.run_part(block, m, part, self.input_cell(input, Use::Read).into_iter());
                }
                self.touch_input(input);
            }
            self.touch_weights(block);
        }
    }

    /// The slot of a block's input in the backward pass, if it comes from host memory.
    fn backward_input(&mut self, block: usize, m: usize, stretch: usize) -> Option<usize> {
        let bytes = self.sketch.lowering.blocks.seams[block].slab.size_bytes;
        let is_offloaded = self.input_storage(block) == Some(Storage::Offload);
        if block > stretch || !is_offloaded || bytes == 0 {
            return None;
        }
        let slot = self.input_turns.next();
        let after = self.input_turns.free_after(slot);
        let host = self.host_of(self.cells.host_inputs, block, m, Use::Read);
        for bytes in Self::copy_sizes(bytes) {
            self.segment.touch(self.input_cell(Some(slot), Use::Write));
            self.copy_in(after, bytes, Some(host));
        }
        Some(slot)
    }

    fn block_backward(&mut self, group: Group, block: usize, stretch: usize) {
        self.fetch_weights(block);
        self.begin_gradients(group, block);
        let parts = self.parts(block);
        for m in 0..self.group_size() {
            let parts = &parts.backward[usize::from(!(group.begins_lane && m == 0))];
            let input = self.backward_input(block, m, stretch);
            let slot = self.offloads(block).then(|| self.activation_turns.next());
            if let Some(slot) = slot {
                self.fetch_units(block, m, slot, parts);
            }
            for (number, part) in parts.iter().enumerate() {
                let is_edge = number == 0 || number + 1 == parts.len();
                let taken = self.input_cell(input, Use::Read).filter(|_| is_edge);
                let gradient = self.shared_gradient_cell(block).filter(|_| is_edge);
                let units =
                    slot.iter().flat_map(|&slot| part.units.iter().map(move |&u| (slot, u)));
                let units: SmallVec<[Touch; 4]> = units
                    .map(|(slot, unit)| self.unit_cell(block, slot, unit, Use::Read))
                    .collect();
                let seams = taken.into_iter().chain(gradient);
                self.run_part(block, m, part, seams.chain(units));
            }
            if let Some(slot) = slot {
                let now = self.position();
                self.activation_turns.touch(slot, now);
            }
            self.touch_input(input);
        }
        self.touch_weights(block);
        self.end_gradients(group, block);
    }

    /// Fetches the offloaded units of a block, in the order of their first use.
    fn fetch_units(&mut self, block: usize, m: usize, slot: usize, parts: &[Part]) {
        let after = self.activation_turns.free_after(slot);
        let host = self.host_of(self.cells.host_saved, block, m, Use::Read);
        let mut seen: SmallVec<[usize; 8]> = SmallVec::new();
        for &unit in parts.iter().flat_map(|part| &part.units) {
            if !seen.contains(&unit) {
                seen.push(unit);
                let touch = self.unit_cell(block, slot, unit, Use::Write);
                for bytes in Self::copy_sizes(self.unit_bytes(block, unit)) {
                    self.segment.touch([touch]);
                    self.copy_in(after, bytes, Some(host));
                }
            }
        }
    }

    fn begin_gradients(&mut self, group: Group, block: usize) {
        let sketch = self.sketch;
        let Some(after) = self.enter(Class::Gradients, block) else { return };
        if group.begins_lane {
            let mut taken_over = std::mem::take(&mut self.taken_over);
            taken_over.extend(self.overlapping(Class::Gradients, block, 0..usize::MAX / 2));
            self.taken_over = taken_over;
        } else {
            let runs = &sketch.tables.stages[self.at(block).stage].gradients.runs;
            self.bring(Class::Gradients, block, runs, after);
        }
    }

    fn end_gradients(&mut self, group: Group, block: usize) {
        self.advance_sums();
        let Some(lane) = group.ends_lane else { return self.leave_gradients(group, block) };
        self.fold_tied(block);
        match self.exchange_gradients(block) {
            true => self.exchanged = Some(Exchanged { block, group, lane }),
            false => self.end_lane(group, block, lane),
        }
    }

    fn end_lane(&mut self, group: Group, block: usize, lane: Lane) {
        self.sum_lane(block, lane);
        self.leave_gradients(group, block);
    }

    fn leave_gradients(&mut self, group: Group, block: usize) {
        let sketch = self.sketch;
        let table = &sketch.tables.stages[self.at(block).stage];
        if group.is_last() && table.squares.count > 0 {
            let all = 0..table.gradients.count;
            self.segment.touch(self.in_slot(Class::Gradients, block, &all, Use::Read));
            self.segment.touch([one_cell(self.cells.squares, Use::Write)]);
            self.segment.compute(table.squares.seconds, table.squares.count);
        }
        if self.decisions.update == UpdateTime::InBackward {
            (0..self.updates_of(block)).for_each(|number| self.update(block, number));
        }
        self.touch(Class::Gradients, block);
        let is_summed = group.ends_lane.is_some_and(|lane| !lane.ends_step())
            && !sketch.lowering.sets[self.at(block).stage].makes_parts();
        if !is_summed && self.gradients_leave(block, group.is_last()) {
            let runs = match group.ends_lane {
                Some(_) => &table.complete,
                None => &table.gradients.runs,
            };
            self.send(Class::Gradients, block, runs);
        }
    }

    /// Adds a block's gradients to the sum of lanes.
    fn sum_lane(&mut self, block: usize, lane: Lane) {
        let sketch = self.sketch;
        if lane.is_only() && !sketch.lowering.shares_step() {
            return;
        }
        let Block { stage, index } = self.at(block);
        // The only lane of a rank needs no sum that lasts.
        let streams = !lane.is_only() && !self.layout.sums[stage].streaming.is_pinned(index);
        for update in &sketch.tables.stages[stage].updates {
            let slot = streams.then(|| self.state_turns.next());
            let after = slot.map_or(0, |slot| self.state_turns.free_after(slot));
            let touch = |emit: &Self, used| {
                let count = sketch.tables.state_runs as u32;
                slot.map(|slot| Touch { first: emit.state_cell(slot), count, used })
            };
            // Sums of groups, and of the group.
            let reads = [lane.reads_sum(), lane.reads_group()];
            for _ in reads.into_iter().filter(|&reads| streams && reads) {
                for &bytes in &update.sums {
                    self.segment.touch(touch(self, Use::Write));
                    self.copy_in(after, bytes, None);
                }
            }
            for run in &update.gradients {
                self.segment.touch(self.in_slot(Class::Gradients, block, &run.cells, Use::Write));
            }
            let read = match sketch.lowering.task.rank.has_levels() {
                true => [self.cells.machine, self.cells.sums],
                false => [self.cells.received; 2],
            };
            self.segment.touch(read.map(|cell| one_cell(cell, Use::Read)));
            self.segment.touch(touch(self, Use::Write));
            let kernels = update.sum_kernels.of(lane);
            self.segment.compute(kernels.seconds, kernels.count);
            let leaves = [lane.leaves_sum(), lane.leaves_group()];
            for _ in leaves.into_iter().filter(|&leaves| streams && leaves) {
                for &bytes in &update.sums {
                    self.segment.touch(touch(self, Use::Read));
                    self.copy_out(bytes, None);
                }
            }
            if let Some(slot) = slot {
                let now = self.position();
                self.state_turns.touch(slot, now);
            }
        }
    }

    /// Adds the parts of tied gradients that other stages computed.
    fn fold_tied(&mut self, block: usize) {
        let sketch = self.sketch;
        for fold in &sketch.tables.stages[self.at(block).stage].folds {
            let user = sketch.lowering.blocks.number(fold.user, 0);
            let Block { stage, index } = self.at(user);
            let is_there = self.residency.is_there(self.layout, Class::Gradients, stage, index);
            for &(part, whole, bytes, seconds) in &fold.pieces {
                let whole = whole..whole + 1;
                let mut slot = None;
                let cells = part..part + 1;
                if is_there {
                    self.segment.touch(self.in_slot(Class::Gradients, user, &cells, Use::Read));
                } else {
                    let next = self.state_turns.next();
                    let after = self.state_turns.free_after(next);
                    let (first, count) = (self.state_cell(next), sketch.tables.state_runs as u32);
                    let touch = Touch { first, count, used: Use::Write };
                    let host = self.on_host(Class::Gradients, user, &cells, Use::Read);
                    self.segment.touch([touch]);
                    self.copy_in(after, bytes, Some(host));
                    self.segment.touch([Touch { used: Use::Read, ..touch }]);
                    slot = Some(next);
                }
                self.segment.touch(self.in_slot(Class::Gradients, block, &whole, Use::Write));
                self.segment.compute(seconds, 1);
                if let Some(slot) = slot {
                    let now = self.position();
                    self.state_turns.touch(slot, now);
                }
            }
        }
    }

    fn gradients_leave(&self, block: usize, is_last_group: bool) -> bool {
        let Block { stage, index } = self.at(block);
        let streaming = self.decisions.stages[stage].gradients;
        let is_applied = self.decisions.update == UpdateTime::InBackward
            && !self.sketch.lowering.sets[stage].makes_parts();
        if streaming.is_pinned(index) || is_applied {
            return false;
        }
        if self.residency.is_shared(self.layout, Class::Gradients, stage, index) {
            return true;
        }
        let repeat = self.sketch.lowering.task.program().stages()[stage].repeat;
        let stays_for_update = is_last_group && index < streaming.slots();
        streaming.slots() < repeat && !stays_for_update
    }

    fn finish(&mut self) {
        self.gather_squares();
        let norm = self.sketch.tables.norm;
        self.segment.compute(norm.seconds, norm.count);
        if self.decisions.update == UpdateTime::EndOfStep {
            for block in 0..self.count() {
                (0..self.updates_of(block)).for_each(|number| self.update(block, number));
            }
        }
    }
}

fn one_cell(first: u32, used: Use) -> Touch {
    Touch { first, count: 1, used }
}

fn slab_cells<'s>(sketch: &'s Sketch<'_>, class: Class, stage: usize) -> &'s SlabCells {
    let table = &sketch.tables.stages[stage];
    match class {
        Class::Weights => &table.weights,
        Class::Gradients => &table.gradients,
    }
}
