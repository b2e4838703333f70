//! State on disk passes through slots of pinned memory. A slot is read into, copied to the device, filled from
//! there after the update, and written to the disk; then the next piece of state may use it.
//!
//! Updates that are deferred run in the first forward pass of a step and are over long before its end. So the
//! slots are filled for the next step as soon as they are free, and steps begin with full slots: the disk reads
//! and writes beside the whole step. Other updates run at the end of a step, so there the slots are filled at the
//! beginning of their segment.

use super::Lowering;
use super::emit::Emit;
use super::homes::Home;
use super::layout::{Layout, StateHome};
use super::residency::Turns;
use crate::plan::Place;
use crate::tier::Tier;
use crate::{Decisions, TensorKind, UpdateTime};
use std::collections::BTreeMap;
use storm_graph::Block;

/// Slots that the state of updates uses in turn.
#[derive(Debug)]
pub(super) struct DiskSlots {
    turns: Turns,
    /// How many updates of the segment have had a slot.
    count: usize,
    /// Block and group of all updates with state on disk, in order, if the slots are full at the beginning of a
    /// step: then the first ones are in them. Empty otherwise.
    resting: Vec<(usize, usize)>,
}

/// The slot of an update.
#[derive(Clone, Copy, Debug)]
pub(super) struct Staged {
    slot: usize,
    /// First byte in host memory.
    pub(super) start: usize,
}

impl DiskSlots {
    pub(super) fn new(
        lowering: &Lowering<'_>,
        decisions: &Decisions,
        layout: &Layout,
    ) -> DiskSlots {
        let mut resting = Vec::new();
        if decisions.update == UpdateTime::NextStep && layout.disk.size_bytes > 0 {
            for block in 0..lowering.blocks.count() {
                let Block { stage, index } = lowering.blocks.get(block);
                let homes = layout.homes(stage, index);
                let groups = (0..homes.groups.len()).filter(|&group| homes.reads_disk(group));
                resting.extend(groups.map(|group| (block, group)));
            }
        }
        DiskSlots { turns: Turns::new(layout.disk_ring.slots), count: 0, resting }
    }

    pub(super) fn begin_segment(&mut self) {
        self.turns.begin_segment();
        self.count = 0;
    }
}

impl Emit<'_> {
    /// Where the streamed state of a block is.
    pub(super) fn state_home(&self, block: usize) -> StateHome {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.layout.state_homes[stage][index]
    }

    /// Where the copies of an update's state come from.
    pub(super) fn state_homes(&self, block: usize, group: usize) -> Vec<Home> {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.layout.homes(stage, index).groups[group].clone()
    }

    /// Gives an update the next slot, and reads its state into it unless it is there.
    pub(super) fn stage_state(&mut self, block: usize, group: usize) -> Staged {
        let slot = self.disk_slots.turns.next();
        let is_there = !self.disk_slots.resting.is_empty()
            && self.disk_slots.count < self.layout.disk_ring.slots;
        debug_assert!(
            !is_there || self.disk_slots.resting[self.disk_slots.count] == (block, group)
        );
        self.disk_slots.count += 1;
        if !is_there {
            self.read_state(block, group, slot);
        }
        Staged { slot, start: self.layout.disk_ring.slot(slot) }
    }

    /// Writes the state of an update to the disk. After the last one of a step, the slots are filled for the next.
    pub(super) fn store_state(&mut self, block: usize, group: usize, staged: Staged) {
        for (run, home) in self.state_runs(block, group) {
            if let Home::Disk { offset, slot, bytes } = home {
                let values = self.state_values(block, &run);
                let disk = self.state_home(block).disk + offset;
                self.write_disk(disk, staged.start + slot, bytes, values);
            }
        }
        let now = self.position();
        self.disk_slots.turns.touch(staged.slot, now);
        let (count, slots) = (self.disk_slots.resting.len(), self.layout.disk_ring.slots);
        if self.disk_slots.count == count {
            // In the order in which they become free.
            for slot in (count - slots..count).map(|turn| turn % slots).filter(|_| count > slots) {
                let (block, group) = self.disk_slots.resting[slot];
                self.read_state(block, group, slot);
            }
        }
    }

    /// Reads the state of an update into a slot, as soon as what is there is written.
    fn read_state(&mut self, block: usize, group: usize, slot: usize) {
        let after = self.disk_slots.turns.free_after(slot);
        let start = self.layout.disk_ring.slot(slot);
        for (run, home) in self.state_runs(block, group) {
            if let Home::Disk { offset, slot, bytes } = home {
                let values = self.state_values(block, &run);
                let disk = self.state_home(block).disk + offset;
                let kind = TensorKind::OptimizerState;
                self.read_disk(after, kind, disk, start + slot, bytes, values);
            }
        }
    }

    fn state_runs(&self, block: usize, group: usize) -> Vec<(super::slab::CopyRun, Home)> {
        let stage = self.lowering.blocks.get(block).stage;
        let runs = self.layout.cut.updates[stage][group].runs.iter().map(|run| run.copy.clone());
        runs.zip(self.state_homes(block, group)).collect()
    }

    /// Where the pieces of a block's state are that are on disk, by entry of its slab: on the disk, and in a slot
    /// if a step begins with it there.
    pub(super) fn state_parts(&self, block: usize) -> BTreeMap<usize, Vec<(u32, Place)>> {
        let Block { stage, index } = self.lowering.blocks.get(block);
        let mut parts: BTreeMap<usize, Vec<(u32, Place)>> = BTreeMap::new();
        if self.layout.states[stage].streaming.is_pinned(index) {
            return parts;
        }
        for group in 0..self.layout.cut.updates[stage].len() {
            let slots = self.layout.disk_ring.slots.min(self.disk_slots.resting.len());
            let resting = &self.disk_slots.resting[..slots];
            let staged = resting.iter().position(|&resting| resting == (block, group));
            for (run, home) in self.state_runs(block, group) {
                let Home::Disk { offset, slot, .. } = home else { continue };
                for &(entry, piece, relative) in &run.pieces {
                    let on_disk = self.state_home(block).disk + offset + relative;
                    let pieces = parts.entry(entry).or_default();
                    pieces.push((piece as u32, Place { tier: Tier::DISK, offset: on_disk }));
                    if let Some(staged) = staged {
                        let offset = self.layout.disk_ring.slot(staged) + slot + relative;
                        pieces.push((piece as u32, Place { tier: Tier::HOST, offset }));
                    }
                }
            }
        }
        for pieces in parts.values_mut() {
            pieces.sort_unstable();
        }
        parts
    }
}
