//! Transfers by io_uring: the thread that asks for one computes checksums while other pieces are on their way.

use super::ScratchAccess;
use super::ScratchError;
use super::pieces::{Pieces, Transfer};
use crate::ring::Ring;
use io_uring::{opcode, squeue, types};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

/// How many pieces of a direction are in flight.
const DEPTH: usize = 8;

/// What the kernel registers at a time, at most.
const REGION_BYTES_MAX: usize = 1 << 30;

/// One direction.
#[derive(Debug)]
pub(super) struct RingLane {
    pieces: Arc<Pieces>,
    access: ScratchAccess,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None once the system has refused it.
    ring: Option<Ring>,
    /// Registered memory, by address: first byte and how many.
    regions: Vec<(usize, usize)>,
}

/// Where the bytes of a transfer are.
#[derive(Clone, Copy)]
struct Memory {
    /// The first one in the file.
    offset: u64,
    /// Its address.
    address: usize,
}

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

    /// Registers memory that transfers use, given as address and bytes. Says whether the system has accepted it.
    ///
    /// # Safety
    /// It stays where it is as long as this is used.
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

    /// Transfers consecutive pieces, and returns when all are done.
    ///
    /// # Safety
    /// `address` is memory as large as the pieces. Until this returns, nothing else writes it, or accesses it at all if
    /// the lane reads.
    pub(super) unsafe fn transfer(
        &self,
        mut waiting: Range<usize>,
        offset: u64,
        address: usize,
    ) -> Result<(), ScratchError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { ring, regions } = &mut *state;
        let memory = Memory { offset, address };
        let mut on_their_way: [Option<Transfer>; DEPTH] = Default::default();
        let mut failure = None;
        let is_refused = loop {
            let Some(ring) = ring.as_mut() else { break true };
            // After a failure, only what is in flight is waited for.
            while failure.is_none()
                && let Some(place) = on_their_way.iter().position(Option::is_none)
                && let Some(index) = waiting.next()
            {
                if let Some(transfer) = self.begin(index, memory) {
                    on_their_way[place] = Some(transfer);
                    let pushed = self.push(ring, regions, place, &mut on_their_way, memory);
                    failure = pushed.err();
                }
            }
            // Before the next checksum is computed.
            if ring.submit().is_err() {
                break true;
            }
            match ring.wait() {
                Ok(None) => break on_their_way.iter().any(Option::is_some),
                Err(_) => break true,
                Ok(Some((place, result))) => {
                    let place = place as usize;
                    let arrived = self.arrived(&mut on_their_way[place], result, memory);
                    let next = arrived
                        .and_then(|()| self.push(ring, regions, place, &mut on_their_way, memory));
                    if let Err(error) = next {
                        on_their_way[place] = None;
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
        // If the ring was refused, what is left is transferred without it, from its beginning.
        let left = on_their_way.iter().flatten().map(|transfer| transfer.index);
        for index in left.chain(waiting) {
            let (start, bytes) = self.memory_of(index, memory);
            match self.access {
                ScratchAccess::Read => {
                    // SAFETY: nothing is in flight any more; the rest is the caller's promise.
                    let to = unsafe { std::slice::from_raw_parts_mut(start, bytes) };
                    self.pieces.read(index, to)?;
                }
                ScratchAccess::Write => {
                    // SAFETY: as above.
                    let from = unsafe { std::slice::from_raw_parts(start, bytes) };
                    self.pieces.write(index, from)?;
                }
            }
        }
        Ok(())
    }

    /// Begins a piece; none if nothing is to be transferred.
    fn begin(&self, index: usize, memory: Memory) -> Option<Transfer> {
        let transfer = self.pieces.begin(self.access, index);
        if transfer.is_none() {
            let (start, bytes) = self.memory_of(index, memory);
            // SAFETY: the promise of `transfer`; this piece is not in flight.
            unsafe { std::ptr::write_bytes(start, 0, bytes) };
        }
        transfer
    }

    /// Adds the next access of a piece to the ring, if the piece is not done. If the ring does not take it, the piece
    /// stays where it is.
    fn push(
        &self,
        ring: &mut Ring,
        regions: &[(usize, usize)],
        place: usize,
        on_their_way: &mut [Option<Transfer>],
        memory: Memory,
    ) -> Result<(), ScratchError> {
        let Some(transfer) = &on_their_way[place] else { return Ok(()) };
        let part = match self.pieces.part(transfer) {
            Ok(part) => part,
            Err(error) => {
                on_their_way[place] = None;
                return Err(error);
            }
        };
        let at = self.pieces.piece(transfer.index).offset + part.start as u64;
        let address = memory.address + (at - memory.offset) as usize;
        let bytes = part.len();
        let is_inside = |&(start, length): &(usize, usize)| {
            start <= address && address + bytes <= start + length
        };
        let region = regions.iter().position(is_inside);
        let entry = self.entry(at, address, bytes as u32, region).user_data(place as u64);
        // SAFETY: the promise of `transfer`, which returns only when nothing is in flight; the file is open as long as the
        // pieces are there.
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

    /// Takes the result of an access. A piece that is done leaves its place.
    fn arrived(
        &self,
        place: &mut Option<Transfer>,
        result: io::Result<usize>,
        memory: Memory,
    ) -> Result<(), ScratchError> {
        let Some(transfer) = place else { return Ok(()) };
        if !self.pieces.advance(transfer, result)? {
            return Ok(());
        }
        let (start, bytes) = self.memory_of(transfer.index, memory);
        let is_done = match self.access {
            ScratchAccess::Read => {
                // SAFETY: the promise of `transfer`; this piece is no longer in flight.
                let to = unsafe { std::slice::from_raw_parts_mut(start, bytes) };
                self.pieces.finish_read(transfer, to)?
            }
            ScratchAccess::Write => {
                // SAFETY: as above.
                let from = unsafe { std::slice::from_raw_parts(start, bytes) };
                self.pieces.finish_write(transfer, from)?;
                true
            }
        };
        if is_done {
            *place = None;
        }
        Ok(())
    }

    /// Address and bytes of a piece.
    fn memory_of(&self, index: usize, memory: Memory) -> (*mut u8, usize) {
        let piece = self.pieces.piece(index);
        let start = memory.address + (piece.offset - memory.offset) as usize;
        (start as *mut u8, piece.bytes)
    }
}

/// Parts of memory that can be registered.
fn cut((address, bytes): (usize, usize)) -> impl Iterator<Item = (usize, usize)> {
    let starts = (0..bytes).step_by(REGION_BYTES_MAX);
    starts.map(move |start| (address + start, REGION_BYTES_MAX.min(bytes - start)))
}

#[cfg(test)]
mod tests {
    use super::*;

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
