//! CUDA events, which order and time streams.

use super::CudaError;
use super::context::{Context, Stream};
use cudarc::driver::{result, sys};
use std::sync::Arc;

/// A CUDA event: done when everything issued to its stream before it is done. Events order streams,
/// and two events measure the time between them.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: an event may be used from any thread; the driver synchronizes access.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that counts as done until it is first recorded.
    pub(super) fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// An event without timing, which is cheaper.
    pub(super) fn without_time(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Event, CudaError> {
        context.make_current()?;
        let handle = result::event::create(flags).map_err(CudaError::driver("making an event"))?;
        Ok(Event { context: Arc::clone(context), handle })
    }

    /// Marks the work issued to `stream` so far. Replaces the previous record.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { self.record_in(stream.handle()) }
    }

    /// As `record`, in another library's stream.
    ///
    /// # Safety
    /// The stream is alive and belongs to the event's context.
    pub(super) unsafe fn record_in(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: the event is alive, and the caller guarantees that the stream is.
        unsafe { result::event::record(self.handle, stream) }
            .map_err(CudaError::driver("recording an event"))
    }

    /// Makes everything issued to `stream` from now on wait for the event.
    pub(super) fn hold(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { self.hold_in(stream.handle()) }
    }

    /// As `hold`, for another library's stream.
    ///
    /// # Safety
    /// The stream is alive and belongs to the event's context.
    pub(super) unsafe fn hold_in(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is alive, and the caller guarantees that the stream is. The driver
        // keeps what it needs of the event.
        unsafe { result::stream::wait_event(stream, self.handle, flags) }
            .map_err(CudaError::driver("waiting for an event"))
    }

    /// Whether everything before the event is done. An error may come from anything issued to the
    /// card.
    pub(super) fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.handle) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(CudaError::driver("asking for an event")(error)),
        }
    }

    /// Blocks the host until everything before the event is done.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.handle) }
            .map_err(CudaError::driver("waiting for an event"))
    }

    /// Seconds from `start` to this event. Both must be done.
    pub(super) fn seconds_since(&self, start: &Event) -> Result<f64, CudaError> {
        // SAFETY: both events are alive.
        let milliseconds = unsafe { result::event::elapsed(start.handle, self.handle) }
            .map_err(CudaError::driver("asking for the time between events"))?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: created in `new`, destroyed once; the driver defers the destruction until the
        // event completes.
        let _ = unsafe { result::event::destroy(self.handle) };
    }
}
