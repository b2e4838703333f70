//! Transfers with io_uring: the calling thread keeps pieces in flight, and a crew computes the
//! checksums.

use super::ScratchAccess;
use super::ScratchError;
use super::crew::{Crew, Job};
use super::pieces::{Memory, Pieces, Transfer};
use crate::ring::Ring;
use io_uring::{opcode, squeue, types};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Queue depth per direction.
const DEPTH: usize = 8;

/// Maximum bytes of a registered buffer.
const REGION_BYTES_MAX: usize = 1 << 30;

/// One direction of transfers.
#[derive(Debug)]
pub(super) struct RingLane {
    pieces: Arc<Pieces>,
    access: ScratchAccess,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` once the system has refused it.
    ring: Option<Ring>,
    /// Registered buffers: address and length.
    regions: Vec<(usize, usize)>,
}

/// The pieces in flight. The index is their `user_data` in the ring.
type Places = [Option<Transfer>; DEPTH];

impl RingLane {
    /// # Errors
    /// The system refuses io_uring.
    pub(super) fn new(pieces: &Arc<Pieces>, access: ScratchAccess) -> io::Result<RingLane> {
        let operations = match access {
            ScratchAccess::Read => [opcode::Read::CODE, opcode::ReadFixed::CODE],
            ScratchAccess::Write => [opcode::Write::CODE, opcode::WriteFixed::CODE],
        };
        let ring = Some(Ring::new(DEPTH, &operations)?);
        let state = Mutex::new(State { ring, regions: Vec::new() });
        Ok(RingLane { pieces: Arc::clone(pieces), access, state })
    }

    /// Registers the memory of transfers, given as address and length. Returns whether the kernel
    /// accepted it.
    ///
    /// # Safety
    /// The memory stays mapped as long as this is used.
    pub(super) unsafe fn register(&self, memory: &[(usize, usize)]) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let regions: Vec<(usize, usize)> = memory.iter().flat_map(|&part| cut(part)).collect();
        let Some(ring) = &state.ring else { return false };
        // SAFETY: the caller's promise.
        let is_registered = !regions.is_empty() && unsafe { ring.register(&regions) }.is_ok();
        if is_registered {
            state.regions = regions;
        }
        is_registered
    }

    /// Transfers consecutive pieces, and returns when none is in flight. The crew may still be
    /// computing checksums. If the system refuses the ring, the rest of the pieces stay in
    /// `waiting`.
    ///
    /// # Safety
    /// As [`super::lane::Lane::transfer`], until the crew has finished.
    pub(super) unsafe fn transfer(
        &self,
        waiting: &mut Range<usize>,
        memory: Memory,
        crew: &Crew,
    ) -> Result<(), ScratchError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { ring, regions } = &mut *state;
        let mut places: Places = Default::default();
        let mut failure = None;
        let is_refused = loop {
            let Some(ring) = ring.as_mut() else { break true };
            // After a failure, only wait for what is in flight.
            while failure.is_none()
                && let Some(place) = places.iter().position(Option::is_none)
                && let Some(index) = waiting.next()
            {
                let Some(transfer) = self.pieces.begin(self.access, index) else {
                    // SAFETY: the caller's promise.
                    unsafe { crew.add(Job::Clear(index), memory) };
                    continue;
                };
                places[place] = Some(transfer);
                failure = self.push(ring, regions, place, &mut places, memory).err();
                if self.access == ScratchAccess::Write {
                    // SAFETY: the caller's promise. The disk only reads this memory too.
                    unsafe { crew.add(Job::Remember(index), memory) };
                }
            }
            // Submit what was added before reaping completions.
            if ring.submit().is_err() {
                break true;
            }
            match ring.wait() {
                // The crew completes what the ring did not take.
                Ok(None) => break false,
                Err(_) => break true,
                Ok(Some((place, result))) => {
                    let place = place as usize;
                    // SAFETY: the caller's promise.
                    let arrived = unsafe { self.arrived(&mut places[place], result, memory, crew) };
                    let next =
                        arrived.and_then(|()| self.push(ring, regions, place, &mut places, memory));
                    if let Err(error) = next {
                        places[place] = None;
                        failure.get_or_insert(error);
                    }
                }
            }
        };
        if is_refused && let Some(ring) = ring.take() {
            ring.abandon();
        }
        if let Some(error) = failure {
            return Err(error);
        }
        // The crew completes what a refused ring has left.
        for transfer in places.into_iter().flatten() {
            // SAFETY: nothing is in flight anymore. The rest is the caller's promise.
            unsafe { crew.add(Job::Complete(transfer), memory) };
        }
        Ok(())
    }

    /// Adds the next access of a piece to the ring, if there is a piece. If the ring does not take
    /// it, the piece stays in its place.
    fn push(
        &self,
        ring: &mut Ring,
        regions: &[(usize, usize)],
        place: usize,
        places: &mut Places,
        memory: Memory,
    ) -> Result<(), ScratchError> {
        let Some(transfer) = &places[place] else { return Ok(()) };
        if transfer.ends_ring() {
            ring.refuse();
        }
        let part = match self.pieces.part(transfer) {
            Ok(part) => part,
            Err(error) => {
                places[place] = None;
                return Err(error);
            }
        };
        let at = self.pieces.piece(transfer.index).offset + part.start as u64;
        let (address, bytes) = (memory.address(at), part.len());
        let is_inside = |&(start, length): &(usize, usize)| {
            start <= address && address + bytes <= start + length
        };
        let region = regions.iter().position(is_inside);
        let entry = self.entry(at, address, bytes as u32, region).user_data(place as u64);
        // SAFETY: the promise of `transfer`, which returns only when nothing is in flight. The file
        // stays open as long as the pieces exist.
        unsafe { ring.push(&entry) };
        Ok(())
    }

    fn entry(&self, at: u64, address: usize, bytes: u32, region: Option<usize>) -> squeue::Entry {
        let file = types::Fd(self.pieces.file().as_raw_fd());
        let memory = address as *mut u8;
        match (self.access, region) {
            (ScratchAccess::Read, None) => {
                opcode::Read::new(file, memory, bytes).offset(at).build()
            }
            (ScratchAccess::Write, None) => {
                opcode::Write::new(file, memory, bytes).offset(at).build()
            }
            (ScratchAccess::Read, Some(region)) => {
                opcode::ReadFixed::new(file, memory, bytes, region as u16).offset(at).build()
            }
            (ScratchAccess::Write, Some(region)) => {
                opcode::WriteFixed::new(file, memory, bytes, region as u16).offset(at).build()
            }
        }
    }

    /// Processes the result of an access. A complete piece leaves its place, and goes to the crew
    /// if it was read.
    ///
    /// # Safety
    /// As [`RingLane::transfer`].
    unsafe fn arrived(
        &self,
        place: &mut Option<Transfer>,
        result: io::Result<usize>,
        memory: Memory,
        crew: &Crew,
    ) -> Result<(), ScratchError> {
        let Some(transfer) = place else { return Ok(()) };
        self.pieces.advance(transfer, result)?;
        if !self.pieces.is_complete(transfer) {
            return Ok(());
        }
        let Some(transfer) = place.take() else { return Ok(()) };
        match self.access {
            // SAFETY: the caller's promise. This piece is no longer in flight.
            ScratchAccess::Read => unsafe { crew.add(Job::Complete(transfer), memory) },
            ScratchAccess::Write => {
                // SAFETY: the caller's promise.
                let from = unsafe { memory.of(self.pieces.piece(transfer.index)) };
                self.pieces.written(&transfer, from)?;
            }
        }
        Ok(())
    }
}

/// Splits memory into regions that can be registered.
fn cut((address, bytes): (usize, usize)) -> impl Iterator<Item = (usize, usize)> {
    let starts = (0..bytes).step_by(REGION_BYTES_MAX);
    starts.map(move |start| (address + start, REGION_BYTES_MAX.min(bytes - start)))
}

#[cfg(test)]
mod tests {
    use super::super::file::BLOCK_BYTES;
    use super::super::{ScratchFault, ScratchFaultKind};
    use super::*;
    use crate::PageBuffer;
    use std::fs::{self, File};

    /// Writes more pieces than fit in flight at once, and returns whether the ring is still in use.
    /// `None` without io_uring.
    fn write(name: &str, is_writable: bool, kind: Option<ScratchFaultKind>) -> Option<Written> {
        let path = std::env::temp_dir().join(format!("storm-{name}-{}", std::process::id()));
        fs::write(&path, []).expect("a file");
        let file = File::options().read(true).write(is_writable).open(&path).expect("a file");
        fs::remove_file(&path).expect("it was just made");
        let block = BLOCK_BYTES as u64;
        let extents = (0..=DEPTH as u64).map(|at| at * block..(at + 1) * block).collect();
        let access = ScratchAccess::Write;
        // The last piece, which begins once another has completed.
        let fault = kind.map(|kind| ScratchFault { access, every: DEPTH as u64 + 1, kind });
        let pieces = Arc::new(Pieces::new(file, extents, fault));
        let lane = RingLane::new(&pieces, access).ok()?;
        let crew = Crew::new("test", &pieces).expect("threads");
        let from = PageBuffer::new((DEPTH + 1) * BLOCK_BYTES);
        let memory = Memory { offset: 0, address: from.as_slice().as_ptr() as usize };
        // SAFETY: nothing changes the memory, which is as large as the pieces.
        let result = unsafe { lane.transfer(&mut (0..DEPTH + 1), memory, &crew) };
        let result = result.and(crew.finish());
        let has_ring = lane.state.lock().expect("no panic").ring.is_some();
        Some(Written { result, has_ring })
    }

    struct Written {
        result: Result<(), ScratchError>,
        has_ring: bool,
    }

    #[test]
    fn a_ring_that_is_refused_is_given_up() {
        let Some(written) = write("refused", true, Some(ScratchFaultKind::NoRing)) else { return };
        written.result.expect("written without it");
        assert!(!written.has_ring);
        let Some(written) = write("kept", true, None) else { return };
        written.result.expect("written");
        assert!(written.has_ring);
    }

    #[test]
    fn errors_of_the_kernel_are_those_of_the_transfer() {
        let Some(written) = write("read-only", false, None) else { return };
        let error = written.result.expect_err("it cannot be written to");
        assert!(matches!(error, ScratchError::Io { access: "writing", .. }), "{error}");
    }

    #[test]
    fn memory_is_registered_in_parts_without_gaps() {
        let parts = |bytes| cut((4096, bytes)).collect::<Vec<_>>();
        assert_eq!(parts(0), []);
        assert_eq!(parts(8192), [(4096, 8192)]);
        assert_eq!(
            parts((2 << 30) + 5),
            [(4096, 1 << 30), (4096 + (1 << 30), 1 << 30), (4096 + (2 << 30), 5)]
        );
    }
}
