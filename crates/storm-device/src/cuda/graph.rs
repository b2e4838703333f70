//! CUDA graphs: work of a stream that was recorded once and is issued with one call.

use super::CudaError;
use super::context::{Context, Stream};
use crate::DeviceError;
use cudarc::driver::sys;
use std::sync::Arc;

/// A recorded piece of a stream's work, ready to be issued any number of times.
#[derive(Debug)]
pub(super) struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
}

// SAFETY: a graph may be used from any thread. `&self` is enough to launch it, because its owner
// issues from one thread at a time.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// Records what `queue` issues to the stream instead of running it. It must issue kernels only, to that stream
    /// only.
    pub(super) fn record(
        stream: &Stream,
        queue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        let context = Arc::clone(stream.context());
        // Relaxed, so that libraries may call any function of the driver during the capture. This
        // is safe because only this thread captures, and only one stream.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive and not being captured yet.
        unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), mode) }
            .result()
            .map_err(CudaError::driver("beginning to record a graph"))?;
        let queued = queue();
        let mut recorded = std::ptr::null_mut();
        // SAFETY: the stream has been captured since the call above, even if `queue` failed.
        let ended = unsafe { sys::cuStreamEndCapture(stream.handle(), &mut recorded) }
            .result()
            .map_err(CudaError::driver("ending the recording of a graph"));
        let recorded = Recorded(recorded);
        queued?;
        ended?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the recorded graph is complete and alive.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, recorded.0, 0) }
            .result()
            .map_err(CudaError::driver("preparing a graph"))?;
        Ok(Graph { context, handle })
    }

    /// Queues everything that was recorded.
    ///
    /// # Safety
    /// The same as for issuing what was recorded, at this point of the stream.
    pub(super) unsafe fn queue(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive. The caller guarantees the rest.
        unsafe { sys::cuGraphLaunch(self.handle, stream.handle()) }
            .result()
            .map_err(CudaError::driver("launching a graph"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: created in `record`, destroyed once. The driver defers this until the graph no
        // longer runs.
        let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
    }
}

/// A graph as it was captured. Null if the capture failed.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: created by the driver, destroyed once. The executable graph created from it
            // stays valid.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}
