//! Copies between another framework's memory and host slabs, concurrent with that framework's work.
//!
//! The framework allocates, computes and frees; we only move bytes. [`Copies`] has two queues, out and
//! in. A guard, [`Leaving`] or [`Coming`], owns memory while it is copied, so the memory cannot be freed
//! while a copy touches it. Taking the memory out of its guard names a stream, which then waits for the
//! copy. The host never waits, unless a guard is dropped without that.

mod cpu;
mod guard;
mod host_memory;
mod slab;

use crate::DeviceError;
use crate::cuda::{CudaCopies, CudaMark, CudaStall};
use cpu::{CpuCopies, Ticket};
pub use guard::{Coming, Leaving};
pub use host_memory::HostMemory;
use slab::Slab;
pub(crate) use slab::SlabMemory;
pub use slab::{HOST_ALIGNMENT, SlabPool, Slot};
use std::sync::Arc;

/// Memory of another allocator.
///
/// # Safety
/// While the value lives, `bytes` from `address` on are valid, readable and writable for the device of
/// the [`Copies`] it is used with. After it is dropped, the memory is reused in order with the stream
/// that was named when it was taken out of its guard, or after all work of the device.
pub unsafe trait Foreign {
    /// Its first byte.
    fn address(&self) -> usize;
    /// Its size.
    fn bytes(&self) -> usize;
}

/// The stream in which the other framework computes. On the CPU this is the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeStream(usize);

impl ComputeStream {
    /// For the CPU.
    pub const CALLING_THREAD: ComputeStream = ComputeStream(0);

    /// A CUDA stream by its handle; 0 is the default stream.
    ///
    /// # Safety
    /// It is a stream of the device's primary context and outlives the last call that uses it.
    pub unsafe fn from_handle(handle: usize) -> ComputeStream {
        ComputeStream(handle)
    }

    pub(crate) fn handle(self) -> usize {
        self.0
    }
}

/// Deliberate disturbances of copies, for tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyOptions {
    /// Delays copies at random, from this seed. Results must not change.
    pub chaos_seed: Option<u64>,
}

/// Two queues of copies.
#[derive(Debug)]
pub struct Copies {
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu(CpuCopies),
    Cuda(Box<CudaCopies>),
}

impl Copies {
    /// For host memory: one thread per queue.
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn cpu(options: CopyOptions) -> Result<Arc<Copies>, DeviceError> {
        let backend = Backend::Cpu(CpuCopies::new(options)?);
        Ok(Arc::new(Copies { backend }))
    }

    /// For memory of GPU number `ordinal`: one stream per queue, in the primary context that other
    /// frameworks also use.
    ///
    /// # Errors
    /// No driver, or no such card.
    pub fn cuda(ordinal: usize, options: CopyOptions) -> Result<Arc<Copies>, DeviceError> {
        let backend = Backend::Cuda(Box::new(CudaCopies::new(ordinal, options)?));
        Ok(Arc::new(Copies { backend }))
    }

    /// Queues a copy of `bytes` from `offset` on into the slot, after everything issued to `stream` so
    /// far.
    ///
    /// # Errors
    /// From the driver.
    ///
    /// # Panics
    /// The range is outside the memory, or the slot was fetched from.
    pub fn store<F: Foreign>(
        &self,
        memory: F,
        offset: usize,
        slot: &mut Slot,
        stream: ComputeStream,
    ) -> Result<Leaving<F>, DeviceError> {
        let mark = self.queue_store(&memory, offset, slot, stream)?;
        Ok(Leaving::new(memory, mark))
    }

    /// Queues the copy of memory on its way out once more. The slot then holds the contents after
    /// everything issued to `stream` by now.
    ///
    /// # Errors
    /// From the driver.
    ///
    /// # Panics
    /// As [`Copies::store`].
    pub fn store_again<F: Foreign>(
        &self,
        leaving: Leaving<F>,
        offset: usize,
        slot: &mut Slot,
        stream: ComputeStream,
    ) -> Result<Leaving<F>, DeviceError> {
        let mark = self.queue_store(leaving.memory(), offset, slot, stream)?;
        Ok(leaving.until(mark))
    }

    /// Queues a copy of memory that its owner keeps alive until the mark is done.
    fn queue_store<F: Foreign>(
        &self,
        memory: &F,
        offset: usize,
        slot: &mut Slot,
        stream: ComputeStream,
    ) -> Result<Mark, DeviceError> {
        let bytes = slot.bytes();
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= memory.bytes());
        assert!(inside, "a copy from outside of its memory");
        assert!(!slot.was_fetched(), "a copy into a slot that others may read");
        let copy = RawCopy { device: memory.address() + offset, slot, bytes };
        let mark = match &self.backend {
            // SAFETY: in bounds; a guard keeps the memory alive until the copy is done, and the slot owns
            // its bytes.
            Backend::Cpu(copies) => Mark::Cpu(unsafe { copies.store(&copy) }),
            // SAFETY: as above.
            Backend::Cuda(copies) => Mark::Cuda(unsafe { copies.store(&copy, stream)? }),
        };
        slot.was_stored(mark.clone());
        Ok(mark)
    }

    /// Queues a copy of the slot to the start of the memory, after everything issued to `stream` so far.
    ///
    /// # Errors
    /// From the driver.
    ///
    /// # Panics
    /// The memory is smaller than the slot, or nothing was stored there.
    pub fn fetch<F: Foreign>(
        &self,
        slot: &mut Slot,
        memory: F,
        stream: ComputeStream,
    ) -> Result<Coming<F>, DeviceError> {
        let bytes = slot.bytes();
        assert!(bytes <= memory.bytes(), "a copy to outside of its memory");
        assert!(slot.stored().is_some(), "nothing was stored in this slot");
        let copy = RawCopy { device: memory.address(), slot, bytes };
        let mark = match &self.backend {
            // SAFETY: in bounds; the guard keeps the memory alive until the copy is done, and the slot
            // owns its bytes.
            Backend::Cpu(copies) => Mark::Cpu(unsafe { copies.fetch(&copy) }),
            // SAFETY: as above.
            Backend::Cuda(copies) => Mark::Cuda(unsafe { copies.fetch(&copy, stream)? }),
        };
        slot.was_read(mark.clone());
        Ok(Coming::new(memory, mark))
    }

    fn slab(&self, bytes: usize) -> Result<Arc<Slab>, DeviceError> {
        let memory = match &self.backend {
            Backend::Cpu(_) => CpuCopies::slab(bytes)?,
            Backend::Cuda(copies) => copies.slab(bytes)?,
        };
        Ok(Arc::new(Slab::new(memory, bytes)))
    }
}

/// A copy between a device address and a slot.
pub(crate) struct RawCopy<'a> {
    pub(crate) device: usize,
    pub(crate) slot: &'a Slot,
    pub(crate) bytes: usize,
}

/// The end of a copy.
#[derive(Clone, Debug)]
pub(crate) enum Mark {
    Cpu(Arc<Ticket>),
    Cuda(Arc<CudaMark>),
}

impl Mark {
    fn is_done(&self) -> Result<bool, DeviceError> {
        match self {
            Mark::Cpu(ticket) => Ok(ticket.is_done()),
            Mark::Cuda(mark) => Ok(mark.is_done()?),
        }
    }

    /// Makes everything issued to `stream` from now on wait for the copy. The result tells how long that
    /// wait was.
    fn hold(&self, stream: ComputeStream) -> Result<Stall, DeviceError> {
        match self {
            Mark::Cpu(ticket) => Ok(Stall(StallKind::Known(ticket.wait()))),
            Mark::Cuda(mark) => match mark.hold(stream)? {
                Some(stall) => Ok(Stall(StallKind::Cuda(stall))),
                None => Ok(Stall(StallKind::Known(0.0))),
            },
        }
    }

    /// Waits on the host.
    fn wait(&self) -> Result<(), DeviceError> {
        match self {
            Mark::Cpu(ticket) => {
                ticket.wait();
                Ok(())
            }
            Mark::Cuda(mark) => Ok(mark.wait()?),
        }
    }

    fn seconds(&self) -> Result<Option<f64>, DeviceError> {
        match self {
            Mark::Cpu(ticket) => Ok(ticket.seconds()),
            Mark::Cuda(mark) => Ok(mark.seconds()?),
        }
    }
}

/// How long a copy took.
#[derive(Clone, Debug)]
pub struct CopyTime(Mark);

impl CopyTime {
    /// None while it is not done.
    ///
    /// # Errors
    /// From the driver.
    pub fn seconds(&self) -> Result<Option<f64>, DeviceError> {
        self.0.seconds()
    }
}

/// How long a stream waited for a copy.
#[derive(Debug)]
pub struct Stall(StallKind);

#[derive(Debug)]
enum StallKind {
    Known(f64),
    Cuda(CudaStall),
}

impl Stall {
    /// None while it is not over.
    ///
    /// # Errors
    /// From the driver.
    pub fn seconds(&self) -> Result<Option<f64>, DeviceError> {
        match &self.0 {
            StallKind::Known(seconds) => Ok(Some(*seconds)),
            StallKind::Cuda(stall) => Ok(stall.seconds()?),
        }
    }
}
