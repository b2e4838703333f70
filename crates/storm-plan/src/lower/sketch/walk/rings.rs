//! Rings: which cells a block uses, what is fetched and evicted, and updates.

use super::{Walk, slab_cells};
use crate::lower::Lowering;
use crate::lower::homes::Home;
use crate::lower::layout::Layout;
use crate::lower::residency::Class;
use crate::lower::sketch::queues::{Lane, Touch, Use};
use crate::lower::sketch::tables::Run;
use crate::lower::slab::COPY_BYTES_MAX;
use std::ops::Range;
use storm_graph::Block;

impl<'s> Walk<'s> {
    // ---- blocks, slots and cells --------------------------------------------------------------

    pub(super) fn at(&self, block: usize) -> Block {
        self.sketch.lowering.blocks.get(block)
    }

    /// Stages whose weights a block reads.
    pub(super) fn owners(&self, block: usize) -> &'s [usize] {
        &self.sketch.lowering.blocks.weight_owners[self.at(block).stage]
    }

    /// The block that owns weights that a block reads.
    pub(super) fn owner(&self, block: usize, position: usize) -> usize {
        let owner = self.owners(block)[position];
        match owner == self.at(block).stage {
            true => block,
            false => self.sketch.lowering.blocks.number(owner, 0),
        }
    }

    pub(super) fn enter(&mut self, class: Class, block: usize) -> Option<usize> {
        let Block { stage, index } = self.at(block);
        self.settle_sums_in(class, block);
        self.residency.enter(self.layout, class, stage, index)
    }

    pub(super) fn touch(&mut self, class: Class, block: usize) {
        let (Block { stage, index }, now) = (self.at(block), self.position());
        self.residency.touch(self.layout, class, stage, index, now);
    }

    pub(super) fn is_pinned(&self, class: Class, block: usize) -> bool {
        let Block { stage, index } = self.at(block);
        class.places(self.layout)[stage].streaming.is_pinned(index)
    }

    pub(super) fn slot(&self, class: Class, block: usize) -> usize {
        let Block { stage, index } = self.at(block);
        let slot = class.places(self.layout)[stage].streaming.slot(index);
        self.residency.first_slot(class, stage) + slot
    }

    /// Some cells of a block's slot; none if it is pinned, and no other rank sends what is there.
    pub(super) fn in_slot(
        &self,
        class: Class,
        block: usize,
        cells: &Range<u32>,
        used: Use,
    ) -> Option<Touch> {
        let slot = &self.cells.slots[self.slot(class, block)];
        let (first, count) = (slot.start + cells.start, cells.end - cells.start);
        (!slot.is_empty()).then_some(Touch { first, count, used })
    }

    pub(super) fn on_host(
        &self,
        class: Class,
        block: usize,
        cells: &Range<u32>,
        used: Use,
    ) -> Touch {
        let first = self.cells.host[class as usize][block] + cells.start;
        Touch { first, count: cells.end - cells.start, used }
    }

    /// Memory of other slots that a block overwrites with a part of its slot.
    pub(super) fn overlapping(
        &self,
        class: Class,
        block: usize,
        part: Range<usize>,
    ) -> impl Iterator<Item = Touch> {
        let slot = self.slot(class, block);
        let start = self.residency.bytes(slot).start;
        let (start, end) = (start + part.start, start + part.end);
        let touch = move |&other: &usize| {
            let bytes = self.residency.bytes(other);
            let (first, end) = (start.max(bytes.start), end.min(bytes.end));
            if first >= end {
                return None;
            }
            let (class, stage) = self.cells.stages[other];
            let slab = slab_cells(self.sketch, class, stage);
            let cells = slab.within(first - bytes.start..end - bytes.start);
            let (first, count) = (cells.start, cells.end - cells.start);
            Some(Touch { first: self.cells.slots[other].start + first, count, used: Use::TakeOver })
        };
        self.residency.overlapping(slot).iter().filter_map(touch)
    }

    // ---- copies -------------------------------------------------------------------------------

    pub(super) fn seconds(&self, lane: Lane, bytes: usize) -> f64 {
        bytes as f64 / self.bandwidth[usize::from(lane == Lane::Out)]
    }

    /// A copy to the device, which also touches what the segment was told before.
    pub(super) fn copy_in(&mut self, after: usize, bytes: usize, host: Option<Touch>) {
        let mut after = after;
        if let Some(host) = host {
            for cell in host.first..host.first + host.count {
                let (segment, at) = self.buffers.written_at[cell as usize];
                if segment == self.segments.len() as u32 {
                    after = after.max(at as usize);
                }
            }
        }
        self.segment.touch(host);
        self.segment.copy(after, Lane::In, self.seconds(Lane::In, bytes));
    }

    /// A copy to host memory, which also touches what the segment was told before.
    pub(super) fn copy_out(&mut self, bytes: usize, host: Option<Touch>) {
        let position = self.position();
        if let Some(host) = host {
            let now = (self.segments.len() as u32, position as u32);
            let cells = host.first as usize..(host.first + host.count) as usize;
            self.buffers.written_at[cells].fill(now);
        }
        self.segment.touch(host);
        self.segment.copy(position, Lane::Out, self.seconds(Lane::Out, bytes));
    }

    pub(super) fn bring(&mut self, class: Class, block: usize, runs: &[Run], after: usize) {
        for run in runs {
            let bytes = run.offset..run.offset + run.bytes;
            let mut segment = std::mem::take(&mut self.segment);
            segment.touch(self.overlapping(class, block, bytes));
            segment.touch(self.in_slot(class, block, &run.cells, Use::Write));
            self.segment = segment;
            let host = self.on_host(class, block, &run.cells, Use::Read);
            self.copy_in(after, run.bytes, Some(host));
        }
    }

    pub(super) fn send(&mut self, class: Class, block: usize, runs: &[Run]) {
        for run in runs {
            self.segment.touch(self.in_slot(class, block, &run.cells, Use::Read));
            let host = self.on_host(class, block, &run.cells, Use::Write);
            self.copy_out(run.bytes, Some(host));
        }
    }

    pub(super) fn fetch_weights(&mut self, block: usize) {
        let sketch = self.sketch;
        for position in 0..self.owners(block).len() {
            let owner = self.owner(block, position);
            if let Some(after) = self.enter(Class::Weights, owner) {
                let table = &sketch.tables.stages[self.at(owner).stage];
                match self.is_frozen_on_disk(owner) {
                    true => {
                        self.bring(Class::Weights, owner, &table.learning, after);
                        self.bring_frozen(owner, after);
                    }
                    false => self.bring(Class::Weights, owner, &table.weights.runs, after),
                }
            }
        }
    }

    pub(super) fn touch_weights(&mut self, block: usize) {
        for position in 0..self.owners(block).len() {
            self.touch(Class::Weights, self.owner(block, position));
        }
    }

    /// A tensor that is not divided into pieces, in copies of the usual size.
    pub(super) fn copy_sizes(bytes: usize) -> impl Iterator<Item = usize> {
        let whole = bytes / COPY_BYTES_MAX;
        let rest = bytes - whole * COPY_BYTES_MAX;
        std::iter::repeat_n(COPY_BYTES_MAX, whole).chain((rest > 0).then_some(rest))
    }

    // ---- updates ------------------------------------------------------------------------------

    pub(super) fn updates_beside(&self, block: usize) -> bool {
        let Some(before) = block.checked_sub(1) else { return false };
        let Block { stage, index } = self.at(block);
        (0..self.owners(before).len()).all(|position| {
            let owner = self.at(self.owner(before, position));
            let read = (Class::Weights, owner.stage, owner.index);
            let meets =
                |&class: &Class| self.residency.meet(self.layout, read, (class, stage, index));
            !Class::ALL.iter().any(meets)
        })
    }

    /// The first cell of a slot of the ring of optimizer state.
    pub(super) fn state_cell(&self, slot: usize) -> u32 {
        self.cells.state_ring + (slot * self.sketch.tables.state_runs) as u32
    }

    pub(super) fn updates_of(&self, block: usize) -> usize {
        self.sketch.tables.stages[self.at(block).stage].updates.len()
    }

    pub(super) fn update(&mut self, block: usize, number: usize) {
        let sketch = self.sketch;
        let Block { stage, index } = self.at(block);
        let update = &sketch.tables.stages[stage].updates[number];
        let streams_state = !self.layout.states[stage].streaming.is_pinned(index);
        let slot = streams_state.then(|| self.state_turns.next());
        let after = slot.map_or(0, |slot| self.state_turns.free_after(slot));
        if number == 0 {
            self.arriving = Class::ALL.map(|class| self.enter(class, block));
        }
        let [weights, gradients] = self.arriving;
        if let Some(from) = weights {
            let from = from.max(after);
            match self.is_frozen_on_disk(block) {
                true => {
                    self.bring(Class::Weights, block, &update.weights_out, from);
                    if number == 0 {
                        self.bring_frozen(block, from);
                    }
                }
                false => self.bring(Class::Weights, block, &update.weights_in, from),
            }
        }
        if let Some(from) = gradients {
            self.bring(Class::Gradients, block, &update.gradients, from.max(after));
        }
        let runs = slot.map_or(0, |_| update.states.len());
        let state = slot.map_or(0, |slot| self.state_cell(slot));
        let run_cell = |run: usize, used| Touch { first: state + run as u32, count: 1, used };
        let homes = &self.layout.homes(stage, index).groups[number];
        let staged = self.stage_state(disk_bytes(homes));
        let in_slot = |run: usize, used| match (staged, homes[run]) {
            (Some(slot), Home::Disk { .. }) => Some(Touch { used, ..slot }),
            _ => None,
        };
        for (run, &bytes) in update.states[..runs].iter().enumerate() {
            self.segment.touch([run_cell(run, Use::Write)]);
            self.segment.touch(in_slot(run, Use::Read));
            self.copy_in(after, bytes, None);
        }
        self.segment.touch((0..runs).map(|run| run_cell(run, Use::Write)));
        for run in &update.own_weights {
            self.segment.touch(self.in_slot(Class::Weights, block, &run.cells, Use::Write));
        }
        for run in &update.gradients {
            self.segment.touch(self.in_slot(Class::Gradients, block, &run.cells, Use::Read));
        }
        self.segment.compute(update.kernels.seconds, update.kernels.count);
        self.gather_weights(block, update);
        if let Some(slot) = slot {
            for (run, &bytes) in update.states.iter().enumerate() {
                self.segment.touch([run_cell(run, Use::Read)]);
                self.segment.touch(in_slot(run, Use::Write));
                self.copy_out(bytes, None);
            }
            let now = self.position();
            self.state_turns.touch(slot, now);
        }
        if let Some(slot) = staged {
            self.store_state(disk_bytes(homes), slot);
        }
        for class in Class::ALL {
            self.touch(class, block);
        }
        if !self.is_pinned(Class::Weights, block) {
            self.send(Class::Weights, block, &update.weights_out);
        }
    }

    // ---- frozen weights on disk -----------------------------------------------------------------

    fn is_frozen_on_disk(&self, block: usize) -> bool {
        let Block { stage, index } = self.at(block);
        self.layout.weight_homes[stage][index].disk.is_some()
    }

    /// Reads a block's frozen weights from the disk, and copies them in, each through the next slot.
    fn bring_frozen(&mut self, block: usize, after: usize) {
        let sketch = self.sketch;
        for run in &sketch.tables.stages[self.at(block).stage].frozen {
            let slot = self.frozen_turns.next();
            let free = self.frozen_turns.free_after(slot);
            let cell = self.cells.frozen_ring + slot as u32;
            self.segment.touch([Touch { first: cell, count: 1, used: Use::Write }]);
            let seconds = run.bytes as f64 / self.disk_bandwidth[0];
            self.segment.copy(free, Lane::ReadDisk, seconds);
            let bytes = run.offset..run.offset + run.bytes;
            let mut segment = std::mem::take(&mut self.segment);
            segment.touch(self.overlapping(Class::Weights, block, bytes));
            segment.touch(self.in_slot(Class::Weights, block, &run.cells, Use::Write));
            segment.touch([Touch { first: cell, count: 1, used: Use::Read }]);
            self.segment = segment;
            let after = after.max(free);
            self.copy_in(after, run.bytes, None);
            self.frozen_turns.touch(slot, after);
        }
    }

    // ---- state on disk ------------------------------------------------------------------------

    fn disk_slot(&self, slot: usize, used: Use) -> Touch {
        Touch { first: self.cells.disk_ring + slot as u32, count: 1, used }
    }

    /// Gives an update with state on disk its slot, and reads into it unless the state is there.
    fn stage_state(&mut self, bytes: usize) -> Option<Touch> {
        if bytes == 0 {
            return None;
        }
        let slot = self.disk_turns.next();
        let is_there = self.defers() && self.disk_count < self.layout.disk_ring.slots;
        self.disk_count += 1;
        if !is_there {
            self.read_disk(slot, bytes);
        }
        Some(self.disk_slot(slot, Use::Read))
    }

    /// Writes the state of an update. After the last one of a step whose updates are deferred, the slots are filled for the
    /// next step.
    fn store_state(&mut self, bytes: usize, touch: Touch) {
        let slot = (touch.first - self.cells.disk_ring) as usize;
        let now = self.position();
        let seconds = bytes as f64 / self.disk_bandwidth[1];
        self.segment.touch([Touch { used: Use::Read, ..touch }]);
        self.segment.copy(now, Lane::WriteDisk, seconds);
        self.disk_turns.touch(slot, now);
        let (count, slots) = (self.on_disk.len(), self.layout.disk_ring.slots);
        if self.defers() && self.disk_count == count && count > slots {
            for slot in (count - slots..count).map(|turn| turn % slots) {
                self.read_disk(slot, self.on_disk[slot]);
            }
        }
    }

    fn read_disk(&mut self, slot: usize, bytes: usize) {
        let after = self.disk_turns.free_after(slot);
        let seconds = bytes as f64 / self.disk_bandwidth[0];
        let touch = self.disk_slot(slot, Use::Write);
        self.segment.touch([touch]);
        self.segment.copy(after, Lane::ReadDisk, seconds);
    }
}

/// What an update reads from disk.
fn disk_bytes(homes: &[Home]) -> usize {
    let bytes = |home: &Home| match home {
        Home::Disk { bytes, .. } => *bytes,
        Home::Host { .. } => 0,
    };
    homes.iter().map(bytes).sum()
}

/// What each update with state on disk reads from it, in order.
pub(super) fn on_disk(lowering: &Lowering<'_>, layout: &Layout) -> Vec<usize> {
    if layout.disk.size_bytes == 0 {
        return Vec::new();
    }
    let blocks = (0..lowering.blocks.count()).map(|block| lowering.blocks.get(block));
    let updates = blocks.flat_map(|Block { stage, index }| &layout.homes(stage, index).groups);
    updates.map(|homes| disk_bytes(homes)).filter(|&bytes| bytes > 0).collect()
}
