use crate::{DeviceError, HostBuffer, Trace};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use storm_graph::{Graph, Node, TensorId};
use storm_plan::{CheckedPlan, PerTier, Place, SegmentId, Tier};

/// What runs a checked plan: memory in every tier of exactly the plan's size, and queues that run
/// beside each other and beside the host.
///
/// The host issues segments; each queue works off its instructions in the order given, and an
/// instruction starts when what it waits for is done. Everything is taken and resolved by
/// [`PlanDevice::commit`]; after that nothing is allocated or looked up.
///
/// # Why this is safe
/// The checker has proved, for the order of the plan's step and for one step after another, that
/// no two instructions which are not ordered by queues and waits touch the same bytes in conflict.
/// A device keeps its side: it refuses a segment out of turn, starts a step or a flush on empty
/// queues, resolves a wait to the last giving-out of the awaited instruction before the waiter,
/// issues a segment only when earlier copies of the inputs and results that it copies are done,
/// lets the host write an input only when the copies that read it are done, and lets it read or
/// write any other memory on empty queues only.
///
/// # Errors
/// When an instruction fails, every queue stops before its next instruction, and the call in
/// which the host learns of it and all later ones return the same error. Work runs while the host
/// goes on: a call may report the failure of something that was issued earlier.
pub trait PlanDevice: Sized {
    /// What a device is opened with.
    type Options;

    /// Offsets of tensors in device memory are multiples of this.
    const ALIGNMENT: usize;

    /// Takes the plan's memory, zeroed, resolves every instruction, and starts the queues.
    ///
    /// # Errors
    /// The memory cannot be had, or the device has no kernel for an instruction.
    fn commit(plan: Arc<CheckedPlan>, options: Self::Options) -> Result<Self, DeviceError>;

    /// What it runs.
    fn plan(&self) -> &Arc<CheckedPlan>;

    /// Gives the instructions of a segment to the queues, in order. Waits where a queue has no room
    /// for more; for empty queues before the first segment of a step and before a flush; and for
    /// earlier copies of inputs and results that the segment copies too, as the host has done if it
    /// has written and read them.
    ///
    /// # Errors
    /// The plan has another segment next, or anything that was issued has failed.
    fn issue(&mut self, segment: SegmentId) -> Result<(), DeviceError>;

    /// Sets an input, a position in the plan's inputs, once the copies that read it are done.
    ///
    /// # Errors
    /// The wrong number of bytes, or anything that was issued has failed.
    fn write_input(&mut self, input: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Fetches a result, a position in the plan's results, once the last copy that brings it is
    /// done.
    ///
    /// # Errors
    /// The wrong number of bytes, or anything that was issued has failed.
    fn read_result(&mut self, result: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Waits until all queues are empty.
    ///
    /// # Errors
    /// Of anything that was issued.
    fn synchronize(&mut self) -> Result<(), DeviceError>;

    /// Sets memory, on empty queues.
    ///
    /// # Errors
    /// Outside of the tier, or anything that was issued has failed.
    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Fetches memory, on empty queues.
    ///
    /// # Errors
    /// Outside of the tier, or anything that was issued has failed.
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Fetches memory of many places, on empty queues, as fast as it can be had.
    ///
    /// # Errors
    /// As [`PlanDevice::read`]; what was fetched of the rest is not said.
    fn read_all(&mut self, reads: Vec<(Place, &mut [u8])>) -> Result<(), DeviceError> {
        reads.into_iter().try_for_each(|(place, bytes)| self.read(place, bytes))
    }

    /// Host memory that this device can fill the fastest. It is not among
    /// [`PlanDevice::memory_taken`].
    ///
    /// # Errors
    /// The machine or a limit does not allow it.
    fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, DeviceError> {
        HostBuffer::new(bytes)
    }

    /// Runs one node that is not part of the plan, on empty queues, and waits for it. `place` gives
    /// the offset of each tensor in device memory. For what precedes the first step; it may
    /// allocate.
    ///
    /// # Errors
    /// As [`PlanDevice::commit`] of the node, or it failed.
    fn run_alone(
        &mut self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<(), DeviceError>;

    /// Bytes that are held for the plan; that does not change after [`PlanDevice::commit`].
    fn memory_taken(&self) -> PerTier<usize>;

    /// Device memory that the process holds now, as the driver counts it where there is one.
    ///
    /// # Errors
    /// From the driver.
    fn memory_in_use_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.memory_taken()[Tier::DEVICE] as u64)
    }

    /// Device memory that is free; none if the device's memory is its own.
    ///
    /// # Errors
    /// From the driver.
    fn memory_free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        Ok(None)
    }

    /// What computes: the card and the library that chooses its matrix products. On what has the same
    /// identity a plan gives the same bits.
    fn identity(&self) -> String;

    /// The clock that steps are timed by: that of the host, except on a device whose time is virtual. Only
    /// differences mean anything.
    fn now(&self) -> Duration {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        START.elapsed()
    }

    /// Whether steps from now on are recorded, for a device that was asked to record and does so until
    /// told otherwise. One on which recording costs nothing worth mentioning goes on with it.
    fn set_recording(&mut self, _recording: bool) {}

    /// What the queues did in the step or flush recorded last, once it is done; none if the
    /// device was not asked to record any.
    ///
    /// # Errors
    /// Of anything that was issued.
    fn trace(&mut self) -> Result<Option<Trace>, DeviceError>;
}
