//! Storage of a block's input and saved tensors between its forward and its backward pass.

use super::emit::{Bound, Emit, Ends};
use super::layout::ActivationSlab;
use super::streams::all_runs;
use super::variant::{PassNode, Variant};
use crate::{Storage, TensorKind};
use std::ops::Range;
use std::sync::Arc;

impl Emit<'_> {
    /// How a block's input is stored; `None` if it is not.
    pub(super) fn input_storage(&self, block: usize) -> Option<Storage> {
        self.lowering.input_storage(self.decided(), block)
    }

    /// Where the forward pass writes the input of a block.
    pub(super) fn next_input(&mut self, block: usize, m: usize) -> usize {
        if self.lowering.blocks.seams[block].slab.size_bytes == 0 {
            return self.places().input_ring.start;
        }
        match self.input_storage(block) {
            Some(Storage::Keep) => self.places().inputs_kept[block].of(m),
            _ => {
                let slot = self.input_turns.next();
                self.places().input_ring.slot(slot)
            }
        }
    }

    /// The same for a pass that stores nothing.
    pub(super) fn next_ring_input(&mut self, block: usize) -> usize {
        if self.lowering.blocks.seams[block].slab.size_bytes == 0 {
            return self.places().input_ring.start;
        }
        let slot = self.input_turns.next();
        self.places().input_ring.slot(slot)
    }

    fn input_ends(&self, block: usize, m: usize, device: usize) -> Ends {
        let host = self.places().inputs_host[block].of(m);
        Ends { kind: TensorKind::LayerInputs, device, host }
    }

    fn offloaded_ends(&self, block: usize, m: usize, device: usize) -> Ends {
        let host = self.places().offloaded_host[block].of(m);
        Ends { kind: TensorKind::Activations, device, host }
    }

    /// Records that a block's input has been computed, and offloads it if it is stored in host memory.
    pub(super) fn made_input(&mut self, block: usize, m: usize, place: usize) {
        if self.input_storage(block) == Some(Storage::Offload) {
            let runs = all_runs(&self.lowering.blocks.seams[block].slab);
            let ends = self.input_ends(block, m, place);
            let pieces = self.values.seams[block][m].clone();
            self.send_runs(&runs, &pieces, ends);
        }
    }

    /// The place of a block's input in the backward pass. `stretch` is the first of the blocks whose inputs were
    /// recomputed together.
    pub(super) fn backward_input(&mut self, block: usize, m: usize, stretch: usize) -> usize {
        if block > stretch {
            let slot = (block - stretch - 1) * self.group_size() + m;
            return self.places().replayed.slot(slot);
        }
        match self.input_storage(block) {
            Some(Storage::Offload) if self.lowering.blocks.seams[block].slab.size_bytes > 0 => {
                let slot = self.input_turns.next();
                let place = self.places().input_ring.slot(slot);
                let after = self.input_turns.free_after(slot);
                let runs = all_runs(&self.lowering.blocks.seams[block].slab);
                let ends = self.input_ends(block, m, place);
                let pieces = self.values.seams[block][m].clone();
                self.bring_runs(after, &runs, &pieces, ends);
                place
            }
            _ => self.places().inputs_kept[block].of(m),
        }
    }

    /// If the place is a slot of the input ring, records that it was in use until now.
    pub(super) fn touch_input(&mut self, place: usize) {
        if let Some(slot) = self.places().input_ring.slot_of(place) {
            let now = self.position();
            self.input_turns.touch(slot, now);
        }
    }

    pub(super) fn bind_kept(&self, bound: &mut [Option<Bound>], block: usize, m: usize) {
        let slab = &self.places().kept_slabs[block];
        let start = self.places().kept[block].of(m);
        for (entry, &(_, id)) in slab.tensors.iter().enumerate() {
            let place = start + slab.slab.entries[entry].offset;
            bound[id.index()] = Some(self.saved_values().kept[block][m][entry].at(place));
        }
    }

    /// Takes the next slot of the ring for a block's offloaded units, if it has any.
    pub(super) fn bind_offloaded(
        &mut self,
        bound: &mut [Option<Bound>],
        block: usize,
        m: usize,
    ) -> Option<usize> {
        let slab = Arc::clone(&self.places().offloaded_slabs[block]);
        if slab.tensors.is_empty() {
            return None;
        }
        let slot = self.activation_turns.next();
        let start = self.places().activation_ring.slot(slot);
        for (entry, &(_, id)) in slab.tensors.iter().enumerate() {
            let place = start + slab.slab.entries[entry].offset;
            bound[id.index()] = Some(self.saved_values().offloaded[block][m][entry].at(place));
        }
        Some(slot)
    }

    /// Offloads the units that a node has just completed, one copy per unit.
    pub(super) fn send_offloaded(
        &mut self,
        block: usize,
        m: usize,
        start: usize,
        slab: &ActivationSlab,
        node: &PassNode,
    ) {
        for entries in units(slab) {
            if node.outputs.contains(&slab.tensors[entries.start].1) {
                let runs = slab.slab.runs(entries);
                let ends = self.offloaded_ends(block, m, start);
                let pieces = self.saved_values().offloaded[block][m].clone();
                self.send_runs(&runs, &pieces, ends);
            }
        }
    }

    /// Fetches the offloaded units of a block, in the order of their first use.
    pub(super) fn fetch_offloaded(
        &mut self,
        block: usize,
        m: usize,
        slot: usize,
        variant: &Arc<Variant>,
    ) {
        let slab = self.places().offloaded_slabs[block].clone();
        let device = self.places().activation_ring.slot(slot);
        let after = self.activation_turns.free_after(slot);
        let ends = self.offloaded_ends(block, m, device);
        let pieces = self.saved_values().offloaded[block][m].clone();
        let nodes = &variant.backward.nodes;
        let first_use = |entries: &Range<usize>| {
            let uses = entries.clone().map(|entry| {
                let id = slab.tensors[entry].1;
                nodes.iter().position(|node| node.operands.contains(&id)).unwrap_or(usize::MAX)
            });
            uses.min().unwrap_or(usize::MAX)
        };
        let mut wanted = units(&slab);
        wanted.sort_by_key(first_use);
        for entries in wanted {
            let runs = slab.slab.runs(entries);
            self.bring_runs(after, &runs, &pieces, ends);
        }
    }
}

/// The entries of each unit of a slab.
fn units(slab: &ActivationSlab) -> Vec<Range<usize>> {
    let mut units: Vec<Range<usize>> = Vec::new();
    for (entry, &(unit, _)) in slab.tensors.iter().enumerate() {
        match units.last_mut() {
            Some(range) if slab.tensors[range.start].0 == unit => range.end = entry + 1,
            _ => units.push(entry..entry + 1),
        }
    }
    units
}
