//! Host memory that the card can copy from and to by DMA.

use super::CudaError;
use super::context::Context;
use crate::MemoryRefused;
use cudarc::driver::sys;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use storm_host::{HostMemoryRefused, HostPages};

/// Pinned host memory of exactly the requested size, zeroed at first. The driver's allocator would
/// round up and use only one thread.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    context: Arc<Context>,
    pages: HostPages,
    /// Copies not known to be done. While there are any, the host must not access the memory.
    in_flight: AtomicUsize,
}

impl PinnedMemory {
    /// Allocates `bytes`. `progress` gets the number of bytes present so far, because a large
    /// allocation takes long.
    ///
    /// # Errors
    /// The machine, the container or a user limit does not allow it; the error says which.
    pub(super) fn new(
        context: &Arc<Context>,
        bytes: usize,
        progress: impl FnMut(usize),
    ) -> Result<PinnedMemory, CudaError> {
        let pages = HostPages::new(bytes, progress).map_err(MemoryRefused::from)?;
        context.make_current()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the pages are mapped and stay mapped until `drop` unregisters them.
        unsafe { sys::cuMemHostRegister_v2(pages.start().cast(), pages.bytes(), flags) }
            .result()
            .map_err(|error| {
            let reason = format!("the driver cannot lock it: {:?}", error.0);
            MemoryRefused::from(HostMemoryRefused::to_lock(bytes, reason))
        })?;
        let context = Arc::clone(context);
        Ok(PinnedMemory { context, pages, in_flight: AtomicUsize::new(0) })
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    /// The address of a byte, for copies.
    pub(super) fn address(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes(), "checked by the caller");
        // SAFETY: inside the pages, or one past their end.
        unsafe { self.pages.start().add(offset) }
    }

    /// The memory, for the host to read.
    ///
    /// # Panics
    /// A copy is in flight whose guard was leaked.
    pub(crate) fn as_slice(&self) -> &[u8] {
        assert_eq!(self.in_flight.load(Ordering::Relaxed), 0, "a copy to this memory is in flight");
        self.pages.as_slice()
    }

    /// The memory, for the host to fill.
    ///
    /// # Panics
    /// A copy is in flight whose guard was leaked.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        assert_eq!(*self.in_flight.get_mut(), 0, "a copy from or to this memory is in flight");
        self.pages.as_mut_slice()
    }

    pub(super) fn copy_begins(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn copy_is_done(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // Copies still in flight must end first.
        let _ = self.context.make_current();
        let _ = cudarc::driver::result::ctx::synchronize();
        // SAFETY: registered in `new`, unregistered once.
        let _ = unsafe { sys::cuMemHostUnregister(self.pages.start().cast()) };
    }
}
