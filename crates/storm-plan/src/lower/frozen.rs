//! Frozen weights on disk, which are only ever read. Whenever a block's weights are fetched, its frozen ones are read
//! into slots of pinned memory and copied from there. The block's trainable weights are in host memory.

use super::Lowering;
use super::emit::{Emit, Ends, copy_values};
use super::homes::DISK_BLOCK_BYTES;
use super::parameters::{Set, SetSlabs};
use super::residency::Class;
use super::slab::CopyRun;
use crate::plan::Place;
use crate::tier::Tier;
use crate::{Decisions, TensorKind};
use std::collections::BTreeMap;
use storm_graph::Block;

/// Places of a stage's weights if the frozen ones are on disk.
#[derive(Debug)]
pub(crate) struct FrozenHomes {
    /// Bytes of a block's trainable weights.
    pub(crate) host_bytes: usize,
    pub(crate) disk_bytes: usize,
    /// Size of the largest copy from the disk.
    pub(crate) slot_bytes: usize,
    /// By slab entry of the weights: the offset in the block's host memory; `None` if it is on disk.
    on_host: Vec<Option<usize>>,
    /// Copies of the weights on disk.
    pub(crate) on_disk: Vec<FrozenRun>,
    /// Copies of the others.
    pub(crate) learning: Vec<CopyRun>,
}

/// A copy of frozen weights from the disk.
#[derive(Clone, Debug)]
pub(crate) struct FrozenRun {
    pub(crate) copy: CopyRun,
    /// Offset in the block's disk space.
    disk: usize,
    /// Size, in whole disk blocks.
    bytes: usize,
}

impl FrozenHomes {
    pub(super) fn new(set: &Set, slabs: &SetSlabs) -> FrozenHomes {
        let weights = &slabs.weights;
        let is_frozen = |entry: &usize| set.parameters[*entry].rule.is_none();
        let pieces =
            |entry: usize| (0..weights.entries[entry].pieces.len()).map(move |p| (entry, p));
        let entries = || 0..weights.entries.len();
        let (mut on_host, mut host_bytes) = (Vec::new(), 0);
        for entry in entries() {
            let place = (!is_frozen(&entry)).then_some(host_bytes);
            on_host.push(place);
            if place.is_some() {
                host_bytes += crate::pack::aligned(weights.entries[entry].size_bytes);
            }
        }
        let (mut on_disk, mut disk_bytes, mut slot_bytes) = (Vec::new(), 0, 0);
        for copy in weights.runs_of(entries().filter(is_frozen).flat_map(pieces)) {
            let bytes = copy.size_bytes.next_multiple_of(DISK_BLOCK_BYTES);
            on_disk.push(FrozenRun { copy, disk: disk_bytes, bytes });
            disk_bytes += bytes;
            slot_bytes = slot_bytes.max(bytes);
        }
        let learning = entries().filter(|entry| !is_frozen(entry)).flat_map(pieces);
        let learning = weights.runs_of(learning);
        FrozenHomes { host_bytes, disk_bytes, slot_bytes, on_host, on_disk, learning }
    }

    /// The offset of an entry in the block's host memory; `None` if it is on disk.
    pub(super) fn on_host(&self, entry: usize) -> Option<usize> {
        self.on_host[entry]
    }
}

/// Whether a block has frozen weights on disk.
pub(super) fn is_frozen_on_disk(
    lowering: &Lowering<'_>,
    decisions: &Decisions,
    stage: usize,
    index: usize,
) -> bool {
    let decided = &decisions.stages[stage];
    let is_wanted = decided.frozen_on_disk.get(index).copied().unwrap_or(false);
    is_wanted && !decided.weights.is_pinned(index) && lowering.sets[stage].has_frozen()
}

impl Emit<'_> {
    /// The disk space of a block's frozen weights; `None` if they are not on disk.
    fn frozen_space(&self, block: usize) -> Option<usize> {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.layout.weight_homes[stage][index].disk
    }

    pub(super) fn frozen_homes(&self, block: usize) -> Option<&FrozenHomes> {
        self.frozen_space(block)?;
        Some(&self.layout.cut.frozen[self.lowering.blocks.get(block).stage])
    }

    /// The place of a block's weights in host memory.
    pub(super) fn weights_on_host(&self, block: usize, run: &CopyRun) -> usize {
        let Block { stage, index } = self.lowering.blocks.get(block);
        let home = self.layout.weight_homes[stage][index].host;
        let Some(homes) = self.frozen_homes(block) else { return home + run.offset };
        // Neighbors in the slab are neighbors here, too.
        let &(entry, _, _) = run.pieces.first().expect("a copy has pieces");
        let start = homes.on_host(entry).expect("what is on disk does not come from here");
        home + start + run.offset - self.slab(Class::Weights, stage).entries[entry].offset
    }

    /// Fetches a block's frozen weights from the disk, each through the next slot.
    pub(super) fn bring_frozen(&mut self, block: usize, after: usize) {
        let Some(space) = self.frozen_space(block) else { return };
        let stage = self.lowering.blocks.get(block).stage;
        let device = self.place(Class::Weights, block);
        for position in 0..self.layout.cut.frozen[stage].on_disk.len() {
            let FrozenRun { copy, disk, bytes } =
                self.layout.cut.frozen[stage].on_disk[position].clone();
            let pieces = &self.values.weights[block];
            let values = copy_values(&copy, |entry, piece| pieces[entry].piece(piece));
            let slot = self.frozen_turns.next();
            let (free, host) =
                (self.frozen_turns.free_after(slot), self.layout.frozen_ring.slot(slot));
            let kind = TensorKind::Weights;
            self.read_disk(free, kind, space + disk, host, bytes, values.clone());
            let ends = Ends { kind, device: device + copy.offset, host };
            let issued = self.copy_in(after, ends, &copy, values);
            self.frozen_turns.touch(slot, issued);
        }
    }

    /// The places of a block's frozen weights on disk, by slab entry.
    pub(super) fn frozen_parts(&self, block: usize) -> BTreeMap<usize, Vec<(u32, Place)>> {
        let mut parts: BTreeMap<usize, Vec<(u32, Place)>> = BTreeMap::new();
        let (Some(space), Some(homes)) = (self.frozen_space(block), self.frozen_homes(block))
        else {
            return parts;
        };
        for FrozenRun { copy, disk, .. } in &homes.on_disk {
            for &(entry, piece, relative) in &copy.pieces {
                let place = Place { tier: Tier::DISK, offset: space + disk + relative };
                parts.entry(entry).or_default().push((piece as u32, place));
            }
        }
        parts
    }
}
