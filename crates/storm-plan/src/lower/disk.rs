//! Streams optimizer state from and to the disk through slots of pinned memory. State is read into a slot, copied to
//! the device, copied back after the update, and written to the disk. Then the slot is free for the next piece.
//!
//! Deferred updates run in the first forward pass of a step and finish long before its end. Their slots are refilled
//! for the next step as soon as they are free, and steps begin with full slots, so that disk I/O overlaps with the
//! whole step. Other updates run at the end of a step, so their slots are filled at the beginning of their segment.

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

/// The slots that updates use in turn.
#[derive(Debug)]
pub(super) struct DiskSlots {
    turns: Turns,
    /// Updates of the segment that have had a slot.
    count: usize,
    /// Block and group of all updates with state on disk, in order, if a step begins with full slots: the first of them
    /// are in the slots. Empty otherwise.
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
    /// The place of a block's streamed state.
    pub(super) fn state_home(&self, block: usize) -> StateHome {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.layout.state_homes[stage][index]
    }

    /// The sources of the copies of an update's state.
    pub(super) fn state_homes(&self, block: usize, group: usize) -> Vec<Home> {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.layout.homes(stage, index).groups[group].clone()
    }

    /// Assigns the next slot to an update, and reads its state into it unless it is already there.
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

    /// Writes an update's state to the disk. After the last update of a step, refills the slots for the next step.
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

    /// Reads an update's state into a slot, once the slot's earlier contents are written.
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

    /// The places of a block's state pieces that are on disk, by slab entry: on the disk, and in a slot if a step
    /// begins with the piece there.
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
