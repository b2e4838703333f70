use crate::placed::View;
use crate::{DeviceError, MemoryRefused, Scalar};
use std::alloc::{Layout, alloc, dealloc};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use storm_host::{absent_bytes, prefer_huge_pages, release_pages, restore_pages};
use storm_plan::Tier;

/// One zeroed block, aligned to 2 MiB for huge pages if it is that large.
#[derive(Debug)]
pub(super) struct Memory {
    start: NonNull<u8>,
    layout: Layout,
    capacity_bytes: usize,
}

// SAFETY: this value owns the block, and all access goes through `&self` or `&mut self`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

impl Memory {
    /// Allocates the block that represents this tier.
    pub(super) fn new(tier: Tier, capacity_bytes: usize) -> Result<Memory, DeviceError> {
        let out_of_memory = MemoryRefused {
            tier,
            wanted_bytes: capacity_bytes as u64,
            available_bytes: None,
            reason: "the machine does not have it free; choose a smaller model, batch or budget"
                .to_owned(),
        };
        let alignment = if capacity_bytes >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        let layout = Layout::from_size_align(capacity_bytes.max(1), alignment)
            .map_err(|_| out_of_memory.clone())?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or(out_of_memory)?;
        if alignment == HUGE_PAGE {
            prefer_huge_pages(start.as_ptr(), capacity_bytes);
        }
        // SAFETY: the block has this many bytes.
        unsafe { start.write_bytes(0, layout.size()) };
        Ok(Memory { start, layout, capacity_bytes })
    }

    pub(super) fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    fn check<T: Scalar>(&self, offset: usize, elements: usize) -> Result<(), DeviceError> {
        let alignment = align_of::<T>();
        let tensor = || "host data".to_owned();
        let capacity = self.capacity_bytes();
        let end = elements.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        match end {
            Some(end) if end <= capacity => {}
            end => {
                let end = end.unwrap_or(usize::MAX);
                return Err(DeviceError::OutOfBounds { tensor: tensor(), offset, end, capacity });
            }
        }
        if !offset.is_multiple_of(alignment) {
            return Err(DeviceError::Misaligned { tensor: tensor(), offset, alignment });
        }
        Ok(())
    }

    pub(super) fn host_slice<T: Scalar>(
        &self,
        offset: usize,
        elements: usize,
    ) -> Result<&[T], DeviceError> {
        self.check::<T>(offset, elements)?;
        // SAFETY: in bounds and aligned. Every bit pattern is a `Scalar`. `&self` excludes writers.
        Ok(unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(offset).cast(), elements) })
    }

    pub(super) fn host_slice_mut<T: Scalar>(
        &mut self,
        offset: usize,
        elements: usize,
    ) -> Result<&mut [T], DeviceError> {
        self.check::<T>(offset, elements)?;
        // SAFETY: as above, and `&mut self` is exclusive.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().add(offset).cast(), elements)
        })
    }

    /// Returns the pages of some bytes to the system.
    ///
    /// # Safety
    /// Nothing uses these bytes until they are restored, and they are in bounds.
    pub(super) unsafe fn release(&self, idle: &[Range<usize>]) -> Result<(), DeviceError> {
        for range in idle {
            let start = self.address("idle memory", range.start, range.len())?;
            // SAFETY: a part of this block that nothing uses. If the system refuses, pages stay.
            let _ = unsafe { release_pages(start, range.len()) };
        }
        Ok(())
    }

    /// The number of these bytes that are not in physical memory now.
    pub(super) fn absent(&self, idle: &[Range<usize>]) -> usize {
        let absent = |range: &Range<usize>| {
            let start = self.address("idle memory", range.start, range.len()).ok()?;
            absent_bytes(start, range.len()).ok()
        };
        idle.iter().filter_map(absent).sum()
    }

    /// Makes released bytes present again, as zeros.
    ///
    /// # Safety
    /// As [`Memory::release`].
    pub(super) unsafe fn restore(
        &self,
        tier: Tier,
        idle: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        for range in idle {
            let start = self.address("idle memory", range.start, range.len())?;
            // SAFETY: a part of this block that was released.
            unsafe { restore_pages(start, range.len()) }.map_err(|refused| MemoryRefused {
                tier,
                wanted_bytes: refused.wanted_bytes as u64,
                available_bytes: refused.limit.available_bytes(),
                reason: format!(
                    "it was released between steps and is taken by others now ({}); resume from the last checkpoint when there is \
                     enough",
                    refused.limit
                ),
            })?;
        }
        Ok(())
    }

    /// Access for the kernels of one instruction.
    pub(super) fn frame(&mut self) -> Frame<'_> {
        Frame { start: self.start, memory: PhantomData }
    }

    /// Access for the kernels of one instruction while other instructions use other bytes.
    ///
    /// # Safety
    /// While the frame is in use, nothing else writes what the instruction reads, and nothing else
    /// reads or writes what it writes.
    pub(super) unsafe fn shared_frame(&self) -> Frame<'_> {
        Frame { start: self.start, memory: PhantomData }
    }

    /// The address of a range of bytes. The caller must make sure that using it does not race.
    pub(super) fn address(
        &self,
        tensor: &str,
        offset: usize,
        bytes: usize,
    ) -> Result<*mut u8, DeviceError> {
        let (end, capacity) = (offset.saturating_add(bytes), self.capacity_bytes());
        if end > capacity {
            let tensor = tensor.to_owned();
            return Err(DeviceError::OutOfBounds { tensor, offset, end, capacity });
        }
        // SAFETY: in bounds of the one block that `start` points to.
        Ok(unsafe { self.start.as_ptr().add(offset) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// The block while one instruction runs. Views were checked when the instruction was prepared:
/// they are in bounds and aligned, and an output overlaps nothing but the operand it overwrites.
pub(super) struct Frame<'a> {
    start: NonNull<u8>,
    memory: PhantomData<&'a mut Memory>,
}

impl<'a> Frame<'a> {
    /// The data of an operand.
    ///
    /// # Safety
    /// `view` is an operand of the running instruction that no output overwrites.
    pub(super) unsafe fn operand<T: Scalar>(&self, view: &View) -> &'a [T] {
        assert_eq!(view.dtype, T::DTYPE);
        // SAFETY: `PlacedNode::new` checked bounds and alignment. No output overlaps it, so no
        // `&mut` to these bytes exists.
        unsafe {
            std::slice::from_raw_parts(
                self.start.as_ptr().add(view.offset).cast(),
                view.shape.elements(),
            )
        }
    }

    /// The data of an output, with its previous contents.
    ///
    /// # Safety
    /// `view` is an output of the running instruction and is requested only once.
    pub(super) unsafe fn output<T: Scalar>(&self, view: &View) -> &'a mut [T] {
        assert_eq!(view.dtype, T::DTYPE);
        // SAFETY: `PlacedNode::new` checked bounds and alignment. It overlaps no other requested
        // view, and nothing else uses its bytes while the frame exists: `frame` borrows the memory
        // exclusively, and the caller of `shared_frame` guarantees it.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.start.as_ptr().add(view.offset).cast(),
                view.shape.elements(),
            )
        }
    }
}
