//! Marks in a queue of work.

use super::CudaError;
use super::context::{Context, Stream};
use cudarc::driver::{result, sys};
use std::sync::Arc;

/// A mark in a stream: done when all that was given to the stream before it is. Marks of different
/// streams order them, and two marks tell the time between them.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: an event may be used from any thread; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that counts as done until it is recorded.
    pub(super) fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// An event that does not tell the time, and is cheaper for it.
    pub(super) fn without_time(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Event, CudaError> {
        context.make_current()?;
        let handle = result::event::create(flags).map_err(CudaError::driver("making an event"))?;
        Ok(Event { context: Arc::clone(context), handle })
    }

    /// Marks what `stream` has been given so far; an earlier mark is forgotten.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { self.record_in(stream.handle()) }
    }

    /// As `record`, in a stream of another library.
    ///
    /// # Safety
    /// The stream is alive and of the event's context.
    pub(super) unsafe fn record_in(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: the event is alive, and the stream by the caller's promise.
        unsafe { result::event::record(self.handle, stream) }
            .map_err(CudaError::driver("recording an event"))
    }

    /// What `stream` is given from now on starts after the mark.
    pub(super) fn hold(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { self.hold_in(stream.handle()) }
    }

    /// As `hold`, for a stream of another library.
    ///
    /// # Safety
    /// The stream is alive and of the event's context.
    pub(super) unsafe fn hold_in(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is alive, the stream by the caller's promise; the driver keeps what it
        // needs of the event.
        unsafe { result::stream::wait_event(stream, self.handle, flags) }
            .map_err(CudaError::driver("waiting for an event"))
    }

    /// Whether all before the mark is done. An error may be of anything that was given to the card.
    pub(super) fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.handle) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(CudaError::driver("asking for an event")(error)),
        }
    }

    /// Waits, on the host, until all before the mark is done.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.handle) }
            .map_err(CudaError::driver("waiting for an event"))
    }

    /// Seconds from one mark to this; both must be done.
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
        // SAFETY: created in `new`, destroyed once; the driver waits with that for its completion.
        let _ = unsafe { result::event::destroy(self.handle) };
    }
}
