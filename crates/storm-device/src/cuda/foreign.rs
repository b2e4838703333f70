//! Copies in two of STORM's own streams, concurrent with another framework's streams, in the
//! primary context that both share.

use super::CudaError;
use super::context::{Context, Purpose, Stream};
use super::delay::Delay;
use super::event::Event;
use super::modules::Kernels;
use super::pinned::PinnedMemory;
use crate::DeviceError;
use crate::chaos::Chaos;
use crate::foreign::{ComputeStream, CopyOptions, Mark, RawCopy, SlabMemory};
use cudarc::driver::sys;
use std::sync::{Arc, Mutex, MutexGuard};
use storm_plan::Queue;

/// A stream for each direction.
#[derive(Debug)]
pub(crate) struct CudaCopies {
    out: Lane,
    back: Lane,
    events: Arc<Events>,
    context: Arc<Context>,
}

/// A queue of copies.
#[derive(Debug)]
struct Lane {
    stream: Stream,
    chaos: Option<Mutex<(Delay, Chaos)>>,
}

impl Lane {
    fn new(
        context: &Arc<Context>,
        queue: Queue,
        options: CopyOptions,
    ) -> Result<Lane, DeviceError> {
        let chaos = match options.chaos_seed {
            Some(seed) => {
                let delay = Delay::new(&Kernels::new(context.card.clone())?)?;
                Some(Mutex::new((delay, Chaos::new(seed, queue))))
            }
            None => None,
        };
        Ok(Lane { stream: Stream::new(context)?, chaos })
    }

    fn disturb(&self) -> Result<(), DeviceError> {
        let Some(chaos) = &self.chaos else { return Ok(()) };
        let (delay, chaos) = &mut *chaos.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Copies take longer than the kernels these delays are sized for.
        delay.queue(&self.stream, chaos.delay_ns().saturating_mul(30))
    }
}

impl CudaCopies {
    pub(crate) fn new(ordinal: usize, options: CopyOptions) -> Result<CudaCopies, DeviceError> {
        let context = Context::open_for(ordinal, Purpose::Copies)?;
        let _entered = context.enter()?;
        Ok(CudaCopies {
            out: Lane::new(&context, Queue::DEVICE_TO_HOST, options)?,
            back: Lane::new(&context, Queue::HOST_TO_DEVICE, options)?,
            events: Arc::new(Events { context: Arc::clone(&context), unused: Mutex::default() }),
            context,
        })
    }

    pub(crate) fn slab(&self, bytes: usize) -> Result<SlabMemory, DeviceError> {
        let _entered = self.context.enter()?;
        Ok(SlabMemory::Pinned(CudaSlab(PinnedMemory::new(&self.context, bytes, |_| {})?)))
    }

    /// # Safety
    /// The device bytes stay valid until the event is done. If the framework writes them meanwhile, the copy
    /// holds old or new bytes, and nothing relies on those. Nothing else uses the slot's bytes, except the
    /// copies that the slot waits for.
    pub(crate) unsafe fn store(
        &self,
        copy: &RawCopy<'_>,
        compute: ComputeStream,
    ) -> Result<Arc<CudaMark>, DeviceError> {
        let queue = |stream| {
            // SAFETY: as the caller guarantees.
            unsafe {
                sys::cuMemcpyDtoHAsync_v2(
                    copy.slot.address() as *mut _,
                    copy.device as u64,
                    copy.bytes,
                    stream,
                )
            }
        };
        self.copy(&self.out, compute, copy.slot.waits_to_store(), queue)
    }

    /// # Safety
    /// The device bytes stay valid until the event is done, and nothing else uses them meanwhile.
    pub(crate) unsafe fn fetch(
        &self,
        copy: &RawCopy<'_>,
        compute: ComputeStream,
    ) -> Result<Arc<CudaMark>, DeviceError> {
        let queue = |stream| {
            // SAFETY: as the caller guarantees.
            unsafe {
                sys::cuMemcpyHtoDAsync_v2(
                    copy.device as u64,
                    copy.slot.address() as *const _,
                    copy.bytes,
                    stream,
                )
            }
        };
        self.copy(&self.back, compute, copy.slot.stored().map_or(&[], std::slice::from_ref), queue)
    }

    fn copy(
        &self,
        lane: &Lane,
        compute: ComputeStream,
        after: &[Mark],
        queue: impl FnOnce(sys::CUstream) -> sys::CUresult,
    ) -> Result<Arc<CudaMark>, DeviceError> {
        let _entered = self.context.enter()?;
        let ready = self.events.take()?;
        // SAFETY: the compute stream is alive, as the creator of its `ComputeStream` guaranteed.
        unsafe { ready.record_in(raw(compute))? };
        ready.hold(&lane.stream)?;
        for mark in after {
            if let Mark::Cuda(mark) = mark {
                mark.end.hold(&lane.stream)?;
            }
        }
        lane.disturb()?;
        let start = self.events.take()?;
        start.record(&lane.stream)?;
        queue(lane.stream.handle()).result().map_err(CudaError::driver("queueing a copy"))?;
        let end = self.events.take()?;
        end.record(&lane.stream)?;
        Ok(Arc::new(CudaMark { start, end }))
    }
}

fn raw(stream: ComputeStream) -> sys::CUstream {
    stream.handle() as sys::CUstream
}

/// A pool of events: creating one costs more than recording it.
#[derive(Debug)]
struct Events {
    context: Arc<Context>,
    unused: Mutex<Vec<Event>>,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.unused.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn take(self: &Arc<Self>) -> Result<Pooled, CudaError> {
        let unused = self.lock().pop();
        let event = unused.map_or_else(|| Event::new(&self.context), Ok)?;
        Ok(Pooled { event: Some(event), events: Arc::clone(self) })
    }
}

/// An event that returns to the pool. Streams already told to wait for it are not affected when it is recorded
/// again.
#[derive(Debug)]
struct Pooled {
    /// Present until it is dropped.
    event: Option<Event>,
    events: Arc<Events>,
}

impl std::ops::Deref for Pooled {
    type Target = Event;

    fn deref(&self) -> &Event {
        self.event.as_ref().expect("there until dropped")
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        self.events.lock().extend(self.event.take());
    }
}

/// Start and end of a copy.
#[derive(Debug)]
pub(crate) struct CudaMark {
    start: Pooled,
    end: Pooled,
}

impl CudaMark {
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        self.end.is_done()
    }

    /// Makes the compute stream wait for the copy. `None` if the copy is done already.
    pub(crate) fn hold(&self, compute: ComputeStream) -> Result<Option<CudaStall>, CudaError> {
        if self.end.is_done()? {
            return Ok(None);
        }
        let _entered = self.end.events.context.enter()?;
        let (before, after) = (self.end.events.take()?, self.end.events.take()?);
        // SAFETY: the compute stream is alive, as the creator of its `ComputeStream` guaranteed.
        unsafe {
            before.record_in(raw(compute))?;
            self.end.hold_in(raw(compute))?;
            after.record_in(raw(compute))?;
        }
        Ok(Some(CudaStall { before, after }))
    }

    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.end.synchronize()
    }

    pub(crate) fn seconds(&self) -> Result<Option<f64>, CudaError> {
        if !self.end.is_done()? {
            return Ok(None);
        }
        self.end.seconds_since(&self.start).map(Some)
    }
}

/// A wait of the compute stream.
#[derive(Debug)]
pub(crate) struct CudaStall {
    before: Pooled,
    after: Pooled,
}

impl CudaStall {
    pub(crate) fn seconds(&self) -> Result<Option<f64>, CudaError> {
        if !self.after.is_done()? {
            return Ok(None);
        }
        self.after.seconds_since(&self.before).map(Some)
    }
}

/// Pinned host memory for copies.
#[derive(Debug)]
pub(crate) struct CudaSlab(PinnedMemory);

impl CudaSlab {
    pub(crate) fn start(&self) -> usize {
        self.0.address(0) as usize
    }
}
