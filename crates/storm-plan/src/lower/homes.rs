//! Places of streamed optimizer state between updates: host memory or disk. State on disk passes through slots of
//! pinned host memory on its way to the device and back.

use super::parameters::{Set, SetSlabs};
use super::update::UpdateGroup;

/// Alignment of offsets and sizes of disk copies, in both tiers: disks transfer whole blocks.
pub const DISK_BLOCK_BYTES: usize = 4096;

/// Places of a stage's state, for a given number of kinds on disk.
#[derive(Debug)]
pub(crate) struct Homes {
    /// Host memory of a block.
    pub(crate) host_bytes: usize,
    pub(crate) disk_bytes: usize,
    /// Most bytes of an update in a slot of pinned memory.
    pub(crate) slot_bytes: usize,
    /// By kind: the bytes before it in the slab that are on disk; `None` if the kind itself is on disk.
    shifts: Vec<Option<usize>>,
    /// By update group, then by copy of state.
    pub(crate) groups: Vec<Vec<Home>>,
}

/// Where one copy of state is read from and written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// In host memory, at an offset in the block's memory.
    Host { offset: usize },
    /// On disk.
    Disk {
        /// Offset in the block's disk space.
        offset: usize,
        /// Offset in a slot.
        slot: usize,
        /// Size, in whole disk blocks.
        bytes: usize,
    },
}

impl Homes {
    /// For a stage with this many kinds of state on disk.
    pub(super) fn new(
        set: &Set,
        slabs: &SetSlabs,
        groups: &[UpdateGroup],
        kinds_on_disk: usize,
    ) -> Homes {
        let kinds = set.kinds();
        let on_disk: Vec<usize> = disk_order(&kinds).into_iter().take(kinds_on_disk).collect();
        let per_kind = set.trainable().count();
        let kind_start = |kind: usize| {
            let entry = slabs.states.entries.get(kind * per_kind);
            entry.map_or(slabs.states.size_bytes, |entry| entry.offset)
        };
        let (mut shifts, mut away) = (Vec::new(), 0);
        for kind in 0..kinds.len() {
            let is_away = on_disk.contains(&kind);
            shifts.push((!is_away).then_some(away));
            if is_away {
                away += kind_start(kind + 1) - kind_start(kind);
            }
        }
        let (mut disk_bytes, mut slot_bytes) = (0, 0);
        let mut homes = Vec::new();
        for group in groups {
            let mut slot = 0;
            let home = |run: &super::update::StateRun| match shifts[run.kind] {
                Some(shift) => Home::Host { offset: run.copy.offset - shift },
                None => {
                    let bytes = run.copy.size_bytes.next_multiple_of(DISK_BLOCK_BYTES);
                    let home = Home::Disk { offset: disk_bytes, slot, bytes };
                    disk_bytes += bytes;
                    slot += bytes;
                    home
                }
            };
            homes.push(group.runs.iter().map(home).collect());
            slot_bytes = slot_bytes.max(slot);
        }
        let host_bytes = slabs.states.size_bytes - away;
        Homes { host_bytes, disk_bytes, slot_bytes, shifts, groups: homes }
    }

    /// The offset of a slab entry in the block's host memory; `None` if it is on disk.
    pub(super) fn on_host(&self, kind: usize, slab_offset: usize) -> Option<usize> {
        self.shifts[kind].map(|shift| slab_offset - shift)
    }

    /// Whether an update of the group reads anything from disk.
    pub(super) fn reads_disk(&self, group: usize) -> bool {
        self.groups[group].iter().any(|home| matches!(home, Home::Disk { .. }))
    }
}

/// Kinds of state in the order in which they move to disk.
fn disk_order(kinds: &[String]) -> Vec<usize> {
    let rank = |kind: &usize| match kinds[*kind].as_str() {
        "second_moment" => 0,
        "first_moment" => 1,
        _ => 2,
    };
    let mut order: Vec<usize> = (0..kinds.len()).collect();
    order.sort_by_key(rank);
    order
}
