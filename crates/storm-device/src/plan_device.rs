use crate::{DeviceError, HostBuffer, Supply, Trace};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use storm_graph::{Graph, Node, TensorId};
use storm_host::ScratchPath;
use storm_plan::{CheckedPlan, Idle, PerTier, Place, SegmentId, Tier};

/// A device that runs a checked plan. It has memory in every tier, of exactly the plan's size, and queues
/// that run concurrently with each other and with the host.
///
/// The host issues segments. Each queue runs its instructions in the order issued, and an instruction
/// starts when everything it waits for is done. [`PlanDevice::commit`] allocates and resolves everything;
/// after that nothing is allocated or looked up.
///
/// # Why this is safe
/// The checker has proved, for the plan's step order and for consecutive steps, that two instructions not
/// ordered by queues and waits never access the same bytes in conflict. A device must do its part. It
/// refuses a segment out of order. It starts a step or a flush on empty queues. It resolves a wait to the
/// latest issue of the awaited instruction before the waiting one. It issues a segment only after earlier
/// copies of the inputs that the host writes and of the results that the segment copies are done. It lets the
/// host write an input only after the copies that read it and the fetches that write it are done, and read or
/// write any other memory only on empty queues.
///
/// # Errors
/// When an instruction fails, every queue stops before its next instruction. The call in which the host
/// learns of it, and every later call, returns the same error. Since work runs asynchronously, a call may
/// report the failure of something issued earlier.
pub trait PlanDevice: Sized {
    /// Options for opening the device.
    type Options;

    /// Offsets of tensors in device memory are multiples of this.
    const ALIGNMENT: usize;

    /// Allocates the plan's memory, zeroed, resolves every instruction, and starts the queues.
    ///
    /// # Errors
    /// The memory cannot be allocated, or the device has no kernel for an instruction.
    fn commit(plan: Arc<CheckedPlan>, options: Self::Options) -> Result<Self, DeviceError>;

    /// The plan it runs.
    fn plan(&self) -> &Arc<CheckedPlan>;

    /// Sets the data source of later steps. A plan that fetches nothing does not need one.
    ///
    /// # Errors
    /// Something issued has failed.
    fn set_supply(&mut self, supply: Arc<dyn Supply>) -> Result<(), DeviceError>;

    /// Waits until the data of the next step has been read.
    ///
    /// # Errors
    /// Something issued has failed.
    fn wait_for_data(&mut self) -> Result<(), DeviceError>;

    /// Issues the instructions of a segment to their queues, in order. Waits while a queue is full, for empty
    /// queues before the first segment of a step and before a flush, and for earlier copies of the inputs and
    /// results that this segment also copies, unless the host has already waited for those by writing and
    /// reading them.
    ///
    /// # Errors
    /// The plan has a different segment next, or something issued has failed.
    fn issue(&mut self, segment: SegmentId) -> Result<(), DeviceError>;

    /// Writes an input, given by its index in the plan's inputs, once the copies that read it and the fetches
    /// that write it are done.
    ///
    /// # Errors
    /// The number of bytes is wrong, or something issued has failed.
    fn write_input(&mut self, input: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Reads a result, given by its index in the plan's results, once the last copy that writes it
    /// is done.
    ///
    /// # Errors
    /// The number of bytes is wrong, or something issued has failed.
    fn read_result(&mut self, result: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Waits until all queues are empty.
    ///
    /// # Errors
    /// Something issued has failed.
    fn synchronize(&mut self) -> Result<(), DeviceError>;

    /// Writes memory. The queues must be empty.
    ///
    /// # Errors
    /// The place is outside the tier, or something issued has failed.
    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Reads memory. The queues must be empty.
    ///
    /// # Errors
    /// The place is outside the tier, or something issued has failed.
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Reads many places as fast as possible. The queues must be empty.
    ///
    /// # Errors
    /// Like [`PlanDevice::read`]; the contents of the other buffers are then unspecified.
    fn read_all(&mut self, reads: Vec<(Place, &mut [u8])>) -> Result<(), DeviceError> {
        reads.into_iter().try_for_each(|(place, bytes)| self.read(place, bytes))
    }

    /// Begins to read places in device memory as they will be once everything issued so far is done, and does not wait for
    /// it. Returns `false` if nothing was begun, because this device or one of the places does not allow it. An
    /// unfinished read is replaced.
    ///
    /// # Errors
    /// Like [`PlanDevice::read`].
    fn begin_read(&mut self, places: &[(Place, usize)]) -> Result<bool, DeviceError> {
        let _ = places;
        Ok(false)
    }

    /// Waits for the read that was begun, and fills `bytes` with its places one after another. Returns `false` if none was
    /// begun.
    ///
    /// # Errors
    /// Something issued has failed.
    fn finish_read(&mut self, bytes: &mut [u8]) -> Result<bool, DeviceError> {
        let _ = bytes;
        Ok(false)
    }

    /// Host memory that this device can fill fastest. It does not count in [`PlanDevice::memory_taken`].
    ///
    /// # Errors
    /// The machine or a limit refuses the memory.
    fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, DeviceError> {
        HostBuffer::new(bytes)
    }

    /// Runs one node that is not part of the plan, on empty queues, and waits for it. `place` gives the
    /// offset of each tensor in device memory. For work before the first step; it may allocate.
    ///
    /// # Errors
    /// Like [`PlanDevice::commit`] for the node, or the node failed.
    fn run_alone(
        &mut self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<(), DeviceError>;

    /// Memory held for the plan, without what [`PlanDevice::release_idle`] released. Otherwise constant after
    /// [`PlanDevice::commit`].
    fn memory_taken(&self) -> PerTier<usize>;

    /// Releases device memory that is idle between steps. The queues must be empty. Until it is reclaimed, only
    /// evaluations may be issued, and with [`Idle::WithParameters`] not even these; only persistent tensors that were
    /// not released may be read and written. Returns its size, which is 0 on a device that cannot do this.
    ///
    /// # Errors
    /// Something issued has failed, or from the system or the driver.
    fn release_idle(&mut self, idle: Idle) -> Result<u64, DeviceError> {
        let _ = idle;
        Ok(0)
    }

    /// Reclaims the released memory, whose contents are undefined.
    ///
    /// # Errors
    /// The memory is no longer available. Persistent tensors that were not released are intact.
    fn reclaim_idle(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The I/O path of the disk tier; `None` if the plan or the device has none.
    fn disk_path(&self) -> Option<ScratchPath> {
        None
    }

    /// Device memory the process holds now, as reported by the driver where there is one.
    ///
    /// # Errors
    /// From the driver.
    fn memory_in_use_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.memory_taken()[Tier::DEVICE] as u64)
    }

    /// [`PlanDevice::memory_in_use_bytes`] of this device and of another one that the process has at the same time.
    ///
    /// # Errors
    /// From the driver.
    fn memory_in_use_with(&self, other: &Self) -> Result<u64, DeviceError> {
        Ok(self.memory_in_use_bytes()? + other.memory_in_use_bytes()?)
    }

    /// Free device memory; `None` if no other process shares the device's memory.
    ///
    /// # Errors
    /// From the driver.
    fn memory_free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        Ok(None)
    }

    /// Device time of the collectives that ended since the last call; `None` if the host moves their bytes and times
    /// them itself.
    ///
    /// # Errors
    /// Something issued has failed.
    fn collective_seconds(&self) -> Result<Option<f64>, DeviceError> {
        Ok(None)
    }

    /// Identifies the device and the library that chooses its matrix products. A plan gives the same bits on every
    /// device with the same identity.
    fn identity(&self) -> String;

    /// The clock for timing steps: the host's, except on a device with virtual time. Only differences are
    /// meaningful.
    fn now(&self) -> Duration {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        START.elapsed()
    }

    /// Turns the recording of later steps on or off, on a device that was opened with recording, which
    /// starts out on. A device on which recording costs next to nothing may ignore this.
    fn set_recording(&mut self, _recording: bool) {}

    /// The trace of the last recorded step or flush, once it is done; `None` if the device was not opened with
    /// recording.
    ///
    /// # Errors
    /// Something issued has failed.
    fn trace(&mut self) -> Result<Option<Trace>, DeviceError>;
}
