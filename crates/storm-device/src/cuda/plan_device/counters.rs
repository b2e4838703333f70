//! Counters in pinned memory that streams and threads of the host wait for and write.
//!
//! A thread that waits for a stream reads its counter and never calls the driver. The issuing
//! thread may be inside the driver, waiting for room in a queue that makes progress only if the
//! waiting thread does.

use super::super::CudaError;
use super::super::context::{Context, Stream};
use cudarc::driver::sys;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use storm_plan::Queue;

/// Distance between counters: each has its own cache line.
const STRIDE_BYTES: usize = 64;

/// One counter for each queue: how many of its instructions are done. It wraps around.
#[derive(Debug)]
pub(super) struct Counters {
    context: Arc<Context>,
    start: *mut u8,
    on_device: sys::CUdeviceptr,
}

// SAFETY: the counters are atomic, and the pointers stay valid until this is dropped.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl Counters {
    pub(super) fn new(context: &Arc<Context>) -> Result<Counters, CudaError> {
        context.make_current()?;
        let bytes = Queue::COUNT_MAX * STRIDE_BYTES;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut start = std::ptr::null_mut();
        // SAFETY: the driver sets the pointer to memory that `drop` frees.
        unsafe { sys::cuMemHostAlloc(&mut start, bytes, flags) }
            .result()
            .map_err(CudaError::driver("allocating counters"))?;
        let mut counters =
            Counters { context: Arc::clone(context), start: start.cast(), on_device: 0 };
        // SAFETY: the memory has this many bytes, and nothing uses it yet.
        unsafe { counters.start.write_bytes(0, bytes) };
        // SAFETY: the memory was allocated to be mapped.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut counters.on_device, start, 0) }
            .result()
            .map_err(CudaError::driver("mapping counters"))?;
        Ok(counters)
    }

    fn number(&self, queue: Queue) -> &AtomicU32 {
        let at = queue.index() * STRIDE_BYTES;
        // SAFETY: inside the memory, aligned and initialized. The card and other threads access it
        // only as a whole.
        unsafe { AtomicU32::from_ptr(self.start.add(at).cast()) }
    }

    fn address(&self, queue: Queue) -> sys::CUdeviceptr {
        self.on_device + (queue.index() * STRIDE_BYTES) as u64
    }

    /// Whether a queue has done this many instructions.
    pub(super) fn is_done(&self, queue: Queue, count: u64) -> bool {
        let done = self.number(queue).load(Ordering::Acquire);
        done.wrapping_sub(count as u32) as i32 >= 0
    }

    /// Registers that a queue of the host has done this many.
    pub(super) fn set(&self, queue: Queue, count: u64) {
        self.number(queue).store(count as u32, Ordering::Release);
    }

    /// Makes a stream wait until a queue of the host has done this many.
    pub(super) fn hold(&self, stream: &Stream, queue: Queue, count: u64) -> Result<(), CudaError> {
        let flags = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        let address = self.address(queue);
        // SAFETY: the stream is alive, and the memory outlives it: the device drops its streams first.
        unsafe { sys::cuStreamWaitValue32_v2(stream.handle(), address, count as u32, flags) }
            .result()
            .map_err(CudaError::driver("waiting for the disk"))
    }

    /// Makes a stream register that it has done this many, once it has.
    pub(super) fn signal(
        &self,
        stream: &Stream,
        queue: Queue,
        count: u64,
    ) -> Result<(), CudaError> {
        let flags = sys::CUstreamWriteValue_flags_enum::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        let address = self.address(queue);
        // SAFETY: as in `hold`.
        unsafe { sys::cuStreamWriteValue32_v2(stream.handle(), address, count as u32, flags) }
            .result()
            .map_err(CudaError::driver("signaling the disk"))
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: allocated in `new`, freed once. Nothing that uses it runs on the card any more.
        let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
    }
}
