//! Slabs of host memory for saved tensors: exact in size, allocated rarely and reused.

use super::{Copies, Mark};
use crate::cuda::CudaSlab;
use crate::{DeviceError, MemoryRefused};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use storm_host::{HostLimit, HostMemoryRefused, HostPages, host_memory, show_bytes};
use storm_plan::Tier;

/// Alignment of slots in host memory.
pub const HOST_ALIGNMENT: usize = 512;

/// The least to allocate when more is needed than planned: each pinning call has a fixed cost.
const GROWTH_BYTES: usize = 64 << 20;

/// What growth leaves for the rest of the machine.
const SPARED_BYTES: u64 = 512 << 20;

/// Host memory for copies, in as few blocks as possible.
#[derive(Debug)]
pub struct SlabPool {
    copies: Arc<Copies>,
    slabs: Vec<Arc<Slab>>,
    limit_bytes: u64,
}

impl SlabPool {
    /// An empty pool that never takes more than this.
    pub fn new(copies: &Arc<Copies>, limit_bytes: u64) -> SlabPool {
        SlabPool { copies: Arc::clone(copies), slabs: Vec::new(), limit_bytes }
    }

    /// How much it holds.
    pub fn held_bytes(&self) -> usize {
        self.slabs.iter().map(|slab| slab.bytes).sum()
    }

    /// Frees what is not in use. If nothing is in use, allocates one block of exactly `bytes` instead.
    ///
    /// # Errors
    /// The machine or a limit does not allow it.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), DeviceError> {
        if self.held_bytes() == bytes && self.slabs.len() <= 1 {
            return Ok(());
        }
        self.slabs.retain(|slab| !slab.is_unused());
        if self.slabs.is_empty() && bytes > 0 {
            self.check_limit(bytes)?;
            self.slabs.push(self.copies.slab(bytes)?);
        }
        Ok(())
    }

    fn check_limit(&self, wanted_bytes: usize) -> Result<(), HostMemoryRefused> {
        let limit_bytes = self.limit_bytes;
        let available_bytes = limit_bytes.saturating_sub(self.held_bytes() as u64);
        if wanted_bytes as u64 <= available_bytes {
            return Ok(());
        }
        let limit = HostLimit::Given { available_bytes, limit_bytes };
        Err(HostMemoryRefused { wanted_bytes, limit })
    }

    /// A slot at a fixed offset of the first block, if that range is free.
    pub fn take_at(&self, offset: usize, bytes: usize) -> Option<Slot> {
        Slab::take_at(self.slabs.first()?, offset, bytes)
    }

    /// A slot anywhere; allocates more memory if needed.
    ///
    /// # Errors
    /// The machine or a limit does not allow it.
    pub fn take(&mut self, bytes: usize) -> Result<Slot, DeviceError> {
        if let Some(slot) = self.slabs.iter().find_map(|slab| Slab::take(slab, bytes)) {
            return Ok(slot);
        }
        let left_bytes = self.limit_bytes.saturating_sub(self.held_bytes() as u64);
        let growth_bytes = left_bytes.min(GROWTH_BYTES as u64) as usize;
        let wanted_bytes = bytes.next_multiple_of(HOST_ALIGNMENT).max(growth_bytes);
        self.check_limit(wanted_bytes)?;
        check_growth(wanted_bytes as u64, host_memory())?;
        let slab = self.copies.slab(wanted_bytes)?;
        let slot = Slab::take(&slab, bytes).expect("it is large enough and empty");
        self.slabs.push(slab);
        Ok(slot)
    }
}

/// Refuses growth that would leave too little for the rest of the machine.
fn check_growth(wanted_bytes: u64, limit: Option<HostLimit>) -> Result<(), MemoryRefused> {
    let Some(limit) = limit else { return Ok(()) };
    let available_bytes = limit.available_bytes().map(|free| free.saturating_sub(SPARED_BYTES));
    if available_bytes.is_none_or(|available| wanted_bytes <= available) {
        return Ok(());
    }
    let reason = format!("{limit}, and {} are left to other programs", show_bytes(SPARED_BYTES));
    Err(MemoryRefused { tier: Tier::HOST, wanted_bytes, available_bytes, reason })
}

/// A block of host memory.
#[derive(Debug)]
pub(super) struct Slab {
    memory: SlabMemory,
    bytes: usize,
    free: Mutex<BTreeMap<usize, Free>>,
}

#[derive(Debug)]
pub(crate) enum SlabMemory {
    Pages(HostPages),
    Pinned(CudaSlab),
}

/// An unused range.
#[derive(Debug)]
struct Free {
    bytes: usize,
    /// Copies that may still read it.
    reads: Vec<Mark>,
}

impl Slab {
    pub(super) fn new(memory: SlabMemory, bytes: usize) -> Slab {
        let free = BTreeMap::from([(0, Free { bytes, reads: Vec::new() })]);
        Slab { memory, bytes, free: Mutex::new(free) }
    }

    fn start(&self) -> usize {
        match &self.memory {
            SlabMemory::Pages(pages) => pages.start() as usize,
            SlabMemory::Pinned(slab) => slab.start(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Free>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn is_unused(&self) -> bool {
        self.lock().values().map(|free| free.bytes).sum::<usize>() == self.bytes
    }

    fn take(slab: &Arc<Slab>, bytes: usize) -> Option<Slot> {
        let place = slab.lock().iter().find(|(_, free)| free.bytes >= bytes).map(|(&at, _)| at)?;
        Slab::take_at(slab, place, bytes)
    }

    fn take_at(slab: &Arc<Slab>, offset: usize, bytes: usize) -> Option<Slot> {
        let mut all = slab.lock();
        let (&start, free) = all.range(..=offset).next_back()?;
        let room = bytes.next_multiple_of(HOST_ALIGNMENT).min(slab.bytes.checked_sub(offset)?);
        if bytes > room || offset + room > start + free.bytes {
            return None;
        }
        let Free { bytes: free_bytes, reads } = all.remove(&start).expect("just found");
        if start < offset {
            all.insert(start, Free { bytes: offset - start, reads: reads.clone() });
        }
        let end = offset + room;
        if end < start + free_bytes {
            all.insert(end, Free { bytes: start + free_bytes - end, reads: reads.clone() });
        }
        drop(all);
        let slab = Arc::clone(slab);
        Some(Slot { slab, offset, bytes, room, waits: reads, stored: None, reads: Vec::new() })
    }

    fn give_back(&self, offset: usize, room: usize, mut reads: Vec<Mark>) {
        let mut all = self.lock();
        let is_pending = |mark: &Mark| !mark.is_done().unwrap_or(true);
        reads.retain(is_pending);
        let (mut start, mut bytes) = (offset, room);
        // Merge neighbors only once nothing reads them. Until then separate ranges are more useful,
        // since the next step takes the same places.
        let mergeable = |free: &Free| !free.reads.iter().any(is_pending);
        if reads.is_empty() {
            if let Some((&before, free)) = all.range(..offset).next_back()
                && before + free.bytes == offset
                && mergeable(free)
            {
                start = before;
                bytes += free.bytes;
                all.remove(&before);
            }
            let end = start + bytes;
            if all.get(&end).is_some_and(mergeable) {
                bytes += all.remove(&end).expect("just found").bytes;
            }
        }
        all.insert(start, Free { bytes, reads });
    }
}

/// A range of host memory, reserved until dropped.
#[derive(Debug)]
pub struct Slot {
    slab: Arc<Slab>,
    offset: usize,
    bytes: usize,
    /// Bytes reserved in the slab, rounded up so the next slot is aligned.
    room: usize,
    /// Copies that may still read the previous contents.
    waits: Vec<Mark>,
    stored: Option<Mark>,
    /// Copies that may still read the current contents.
    reads: Vec<Mark>,
}

impl Slot {
    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn address(&self) -> usize {
        self.slab.start() + self.offset
    }

    pub(super) fn slab(&self) -> Arc<Slab> {
        Arc::clone(&self.slab)
    }

    /// What must be done before it can be written.
    pub(crate) fn waits_to_store(&self) -> &[Mark] {
        &self.waits
    }

    /// What must be done before it can be read.
    pub(crate) fn stored(&self) -> Option<&Mark> {
        self.stored.as_ref()
    }

    /// Whether a copy was queued that reads it.
    pub(super) fn was_fetched(&self) -> bool {
        !self.reads.is_empty()
    }

    pub(super) fn was_stored(&mut self, mark: Mark) {
        self.stored = Some(mark);
    }

    pub(super) fn was_read(&mut self, mark: Mark) {
        self.reads.retain(|read| !read.is_done().unwrap_or(true));
        self.reads.push(mark);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A copy into this slot needs no mark: the next copy into this range comes later in the same
        // queue.
        let mut reads = std::mem::take(&mut self.reads);
        reads.append(&mut self.waits);
        self.slab.give_back(self.offset, self.room, reads);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_leaves_some_to_others() {
        let machine = |available_bytes| Some(HostLimit::Machine { available_bytes });
        let free_bytes = SPARED_BYTES + 1000;
        check_growth(1000, machine(free_bytes)).expect("just enough");
        check_growth(u64::MAX, None).expect("no limit is known");
        let refused = check_growth(1001, machine(free_bytes)).expect_err("one too many");
        assert_eq!((refused.available_bytes, refused.missing_bytes()), (Some(1000), 1));
    }
}
