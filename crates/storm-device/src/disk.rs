//! The disk tier of a plan: a scratch file, with the plan's copies as its extents.

use crate::error::Failed;
use crate::{DeviceError, MemoryRefused};
use std::ops::Range;
use std::sync::Arc;
use storm_host::{ScratchError, ScratchFolder, ScratchOptions, ScratchPath, ScratchStore};
use storm_plan::{Copy, DISK_BLOCK_BYTES, Link, Plan, Tier, Work, merged_ranges};

/// Options for the disk tier of a plan.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The folder of the scratch file.
    pub folder: Arc<ScratchFolder>,
    /// How the file is accessed.
    pub scratch: ScratchOptions,
}

impl PartialEq for DiskOptions {
    fn eq(&self, other: &DiskOptions) -> bool {
        Arc::ptr_eq(&self.folder, &other.folder) && self.scratch == other.scratch
    }
}

/// The kind of disk failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskProblem {
    /// The disk was unusable from the start.
    Unusable,
    /// The disk is full, although the space was allocated.
    Full,
    /// The disk fails to read or write, or returns other bytes than were written.
    Faulty,
}

/// The disk tier of a committed plan.
#[derive(Debug)]
pub(crate) struct DiskTier {
    store: ScratchStore,
    /// The ranges of pinned memory that copies use, merged and in order.
    slots: Vec<Range<usize>>,
}

/// A copy between the disk and pinned memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskCopy {
    reads: bool,
    disk: usize,
    pub(crate) host: usize,
    pub(crate) bytes: usize,
}

impl DiskCopy {
    /// `None` if the copy is between other tiers.
    pub(crate) fn new(copy: &Copy) -> Option<DiskCopy> {
        let (reads, disk, host) = match copy.link() {
            Link::DISK_TO_HOST => (true, copy.from.offset, copy.to.offset),
            Link::HOST_TO_DISK => (false, copy.to.offset, copy.from.offset),
            _ => return None,
        };
        Some(DiskCopy { reads, disk, host, bytes: copy.bytes })
    }
}

impl DiskTier {
    /// Allocates the space; `None` if the plan needs none.
    pub(crate) fn new(
        plan: &Plan,
        options: Option<&DiskOptions>,
    ) -> Result<Option<DiskTier>, DeviceError> {
        let bytes = plan.bytes[Tier::DISK];
        let Some(options) = options.filter(|_| bytes > 0) else { return Ok(None) };
        let copies = || {
            plan.instructions.iter().filter_map(|instruction| match &instruction.work {
                Work::Copy(copy) => DiskCopy::new(copy),
                _ => None,
            })
        };
        let extent = |copy: DiskCopy| -> Range<u64> {
            copy.disk as u64..copy.disk as u64 + copy.bytes as u64
        };
        let mut extents: Vec<Range<u64>> = copies().map(extent).collect();
        extents.sort_by_key(|extent| (extent.start, extent.end));
        extents.dedup();
        if let Some(pair) = extents.windows(2).find(|pair| pair[0].end > pair[1].start) {
            let reason = format!(
                "copies of bytes {:?} and {:?} overlap without being the same",
                pair[0], pair[1]
            );
            return Err(DeviceError::Disk { problem: DiskProblem::Unusable, reason });
        }
        let is_block = |at: u64| at.is_multiple_of(DISK_BLOCK_BYTES as u64);
        if let Some(extent) = extents.iter().find(|e| !is_block(e.start) || !is_block(e.end)) {
            let reason = format!("bytes {extent:?} are not whole blocks of {DISK_BLOCK_BYTES}");
            return Err(DeviceError::Disk { problem: DiskProblem::Unusable, reason });
        }
        let store = ScratchStore::new(&options.folder, bytes as u64, extents, options.scratch);
        let slots = merged_ranges(copies().map(|copy| copy.host..copy.host + copy.bytes).collect());
        Ok(Some(DiskTier { store: store.map_err(refused)?, slots }))
    }

    /// Registers the slots with the kernel, once the plan's pinned memory is known.
    ///
    /// # Safety
    /// `host` is the first byte of memory as large as the plan says, which stays as long as copies run.
    pub(crate) unsafe fn register(&mut self, host: *mut u8) {
        let slot = |slot: &Range<usize>| (host as usize + slot.start, slot.len());
        let memory: Vec<(usize, usize)> = self.slots.iter().map(slot).collect();
        // SAFETY: the caller's promise.
        unsafe { self.store.register(&memory) };
    }

    pub(crate) fn bytes(&self) -> usize {
        self.store.bytes() as usize
    }

    pub(crate) fn path(&self) -> ScratchPath {
        self.store.path()
    }

    /// Runs a copy of the plan, and waits for it.
    ///
    /// # Safety
    /// `host` is the address of the copy's bytes in pinned memory, which nothing else uses in conflict until this
    /// returns. One thread runs the copies of each direction.
    pub(crate) unsafe fn run(&self, copy: DiskCopy, host: *mut u8) -> Result<(), Failed> {
        let DiskCopy { reads, disk, bytes, .. } = copy;
        let done = match reads {
            // SAFETY: the extents are those of the plan's copies; the rest is the caller's promise.
            true => unsafe { self.store.read(disk as u64, host, bytes) },
            // SAFETY: as above.
            false => unsafe { self.store.write(disk as u64, host, bytes) },
        };
        done.map_err(|error| Failed::Disk(problem(&error), error.to_string()))
    }

    /// Reads any bytes. The queues must be empty.
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, bytes.len())?;
        self.store.read_bytes(offset as u64, bytes).map_err(refused)
    }

    /// Writes any bytes. The queues must be empty.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, bytes.len())?;
        self.store.write_bytes(offset as u64, bytes).map_err(refused)
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        let (end, capacity) = (offset.saturating_add(bytes), self.bytes());
        match end <= capacity {
            true => Ok(()),
            false => {
                let tensor = "host data".to_owned();
                Err(DeviceError::OutOfBounds { tensor, offset, end, capacity })
            }
        }
    }
}

fn refused(error: ScratchError) -> DeviceError {
    let reason = error.to_string();
    match error {
        ScratchError::Full { wanted_bytes, available_bytes, .. } => {
            let available_bytes = Some(available_bytes);
            MemoryRefused { tier: Tier::DISK, wanted_bytes, available_bytes, reason }.into()
        }
        _ => DeviceError::Disk { problem: problem(&error), reason },
    }
}

fn problem(error: &ScratchError) -> DiskProblem {
    match error {
        ScratchError::Filled { .. } => DiskProblem::Full,
        ScratchError::Io { .. } | ScratchError::Damaged { .. } => DiskProblem::Faulty,
        _ => DiskProblem::Unusable,
    }
}
