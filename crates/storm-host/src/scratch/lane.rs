//! One direction of transfers: with io_uring if the system has it, otherwise with threads.

use super::crew::{Crew, Job};
use super::pieces::{Memory, Pieces};
use super::ring_lane::RingLane;
use super::{ScratchAccess, ScratchError};
use std::ops::Range;
use std::sync::Arc;

/// Reads or writes, one transfer at a time.
#[derive(Debug)]
pub(super) struct Lane {
    pieces: Arc<Pieces>,
    access: ScratchAccess,
    crew: Crew,
    ring: Option<RingLane>,
}

impl Lane {
    /// # Errors
    /// The system refuses to start threads.
    pub(super) fn new(
        pieces: &Arc<Pieces>,
        access: ScratchAccess,
        ring: Option<RingLane>,
    ) -> Result<Lane, ScratchError> {
        let name = match access {
            ScratchAccess::Read => "disk reads",
            ScratchAccess::Write => "disk writes",
        };
        let crew = Crew::new(name, pieces)?;
        Ok(Lane { pieces: Arc::clone(pieces), access, crew, ring })
    }

    /// Registers the memory of transfers with the kernel, given as address and length. Returns
    /// whether the kernel accepted it.
    ///
    /// # Safety
    /// The memory stays mapped as long as this is used.
    pub(super) unsafe fn register(&self, memory: &[(usize, usize)]) -> bool {
        // SAFETY: the caller's promise.
        self.ring.as_ref().is_some_and(|ring| unsafe { ring.register(memory) })
    }

    /// Transfers consecutive pieces, and returns when all are done.
    ///
    /// # Safety
    /// `memory` is as large as the pieces. Until this returns, nothing else writes it, or accesses
    /// it at all if the lane reads. Only one caller at a time.
    pub(super) unsafe fn transfer(
        &self,
        mut waiting: Range<usize>,
        memory: Memory,
    ) -> Result<(), ScratchError> {
        let mut moved = Ok(());
        if let Some(ring) = &self.ring {
            // SAFETY: the caller's promise.
            moved = unsafe { ring.transfer(&mut waiting, memory, &self.crew) };
        }
        if moved.is_ok() {
            for index in waiting {
                let job = match self.pieces.begin(self.access, index) {
                    Some(transfer) => Job::Complete(transfer),
                    None => Job::Clear(index),
                };
                // SAFETY: the caller's promise.
                unsafe { self.crew.add(job, memory) };
            }
        }
        let done = self.crew.finish();
        moved.and(done)
    }
}
