//! Copies between pinned host memory and the card, concurrent with other work.

use super::CudaError;
use super::context::{Allocation, Stream};
use super::event::Event;
use super::pinned::PinnedMemory;
use crate::DeviceError;
use cudarc::driver::sys;

/// Which bytes to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyRange {
    /// First byte in host memory.
    pub(super) host_offset: usize,
    /// First byte in device memory.
    pub(super) device_offset: usize,
    /// Number of bytes.
    pub(super) bytes: usize,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// Into device memory.
    ToDevice,
    /// Into host memory.
    ToHost,
}

/// Queues a copy in `stream`.
///
/// # Errors
/// A range is outside its memory, or the driver failed.
///
/// # Safety
/// Until the stream has executed the copy, both memories stay alive, and nothing writes the source
/// bytes or accesses the destination bytes.
pub(super) unsafe fn queue_copy(
    stream: &Stream,
    direction: Direction,
    host: &PinnedMemory,
    device: &Allocation,
    range: CopyRange,
) -> Result<(), DeviceError> {
    let CopyRange { host_offset, device_offset, bytes } = range;
    check("host memory", host_offset, bytes, host.bytes())?;
    check("device memory", device_offset, bytes, device.bytes())?;
    let (host, device) = (host.address(host_offset).cast(), device.start() + device_offset as u64);
    // SAFETY: in bounds by the checks above. The caller guarantees the rest.
    let status = unsafe {
        match direction {
            Direction::ToDevice => sys::cuMemcpyHtoDAsync_v2(device, host, bytes, stream.handle()),
            Direction::ToHost => sys::cuMemcpyDtoHAsync_v2(host, device, bytes, stream.handle()),
        }
    };
    Ok(status.result().map_err(CudaError::driver("queueing a copy"))?)
}

/// Refuses a range outside its memory; `what` names it.
pub(super) fn check(
    what: &str,
    offset: usize,
    bytes: usize,
    capacity: usize,
) -> Result<(), DeviceError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= capacity => Ok(()),
        end => Err(DeviceError::OutOfBounds {
            tensor: what.to_owned(),
            offset,
            end: end.unwrap_or(usize::MAX),
            capacity,
        }),
    }
}

/// Copies in flight. While it exists, neither memory can be freed or moved out, and dropping it waits.
/// If it is leaked, the host can no longer access the host memory.
#[derive(Debug)]
pub(super) struct Transfer<'a> {
    stream: &'a Stream,
    direction: Direction,
    host: &'a PinnedMemory,
    device: &'a Allocation,
    done: Event,
}

impl<'a> Transfer<'a> {
    /// A transfer with no copies yet. It borrows both memories, so neither can be freed while
    /// copies are in flight.
    pub(super) fn begin(
        stream: &'a Stream,
        direction: Direction,
        host: &'a PinnedMemory,
        device: &'a Allocation,
    ) -> Result<Transfer<'a>, CudaError> {
        let done = Event::new(stream.context())?;
        host.copy_begins();
        Ok(Transfer { stream, direction, host, device, done })
    }

    /// Queues one more copy, after the previous ones.
    ///
    /// # Errors
    /// A range is outside its memory, or the driver failed.
    pub(super) fn copy(&mut self, range: CopyRange) -> Result<(), DeviceError> {
        // SAFETY: the borrows keep both memories alive, and while `in_flight` counts this transfer, the
        // host does not access the host memory. A kernel that reads the destination meanwhile sees
        // arbitrary bytes, which is harmless.
        unsafe { queue_copy(self.stream, self.direction, self.host, self.device, range) }
    }

    /// Waits for all copies.
    ///
    /// # Errors
    /// From the copies, or from work that ran before them.
    pub(super) fn finish(self) -> Result<(), CudaError> {
        self.done.record(self.stream)?;
        self.done.synchronize()
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        // After an error of the card, no copy runs any more, and the error was already reported.
        let _ = self.done.record(self.stream);
        let _ = self.done.synchronize();
        self.host.copy_is_done();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_stay_inside() {
        assert_eq!(check("memory", 3, 5, 8), Ok(()));
        assert_eq!(check("memory", 8, 0, 8), Ok(()));
        for (offset, bytes) in [(4, 5), (9, 0), (usize::MAX, 2)] {
            let refused = check("memory", offset, bytes, 8);
            assert!(matches!(refused, Err(DeviceError::OutOfBounds { capacity: 8, .. })));
        }
    }
}
