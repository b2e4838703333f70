//! A subset of a card's multiprocessors, so that work takes as long as on a smaller card.

use super::CudaError;
use super::context::Context;
use cudarc::driver::sys;
use std::sync::Arc;

/// Some of the multiprocessors, reserved by a green context.
#[derive(Debug)]
pub(super) struct Part {
    handle: sys::CUgreenCtx,
    // Keeps the primary context alive: the handle was created from it.
    context: Arc<Context>,
}

// SAFETY: after creation the handle is only used to create streams.
unsafe impl Send for Part {}
// SAFETY: as above; the driver synchronizes access.
unsafe impl Sync for Part {}

impl Part {
    /// Reserves at least this many multiprocessors, rounded up to the card's granularity.
    pub(super) fn new(context: &Arc<Context>, multiprocessors: usize) -> Result<Part, CudaError> {
        let failed = CudaError::driver("setting multiprocessors apart");
        let wanted = u32::try_from(multiprocessors).unwrap_or(u32::MAX);
        // SAFETY: plain integers, for which zero is valid.
        let mut all: sys::CUdevResource = unsafe { std::mem::zeroed() };
        let mut part = all;
        let mut rest = all;
        let mut groups = 1;
        let mut description: sys::CUdevResourceDesc = std::ptr::null_mut();
        let mut handle: sys::CUgreenCtx = std::ptr::null_mut();
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        let device = context.device();
        // SAFETY: every pointer is to a local of the type the driver expects, and the group count of 1
        // matches the one group pointed to. `context` keeps the primary context alive.
        unsafe {
            sys::cuDeviceGetDevResource(device, &mut all, kind)
                .result()
                .and_then(|()| {
                    sys::cuDevSmResourceSplitByCount(
                        &mut part,
                        &mut groups,
                        &all,
                        &mut rest,
                        0,
                        wanted,
                    )
                    .result()
                })
                .and_then(|()| {
                    sys::cuDevResourceGenerateDesc(&mut description, &mut part, 1).result()
                })
                .and_then(|()| {
                    sys::cuGreenCtxCreate(&mut handle, description, device, flags).result()
                })
                .map_err(failed)?;
        }
        Ok(Part { handle, context: Arc::clone(context) })
    }

    /// A stream whose work runs on this part alone.
    pub(super) fn stream(&self) -> Result<sys::CUstream, CudaError> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the handle is alive; the driver writes the stream to a local.
        unsafe { sys::cuGreenCtxStreamCreate(&mut stream, self.handle, flags, 0) }
            .result()
            .map_err(CudaError::driver("making a stream"))?;
        Ok(stream)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: created in `new`, destroyed once, after the streams that hold it.
        let _ = unsafe { sys::cuGreenCtxDestroy(self.handle) };
    }
}
