//! Threads that read, or threads that write: while one computes a checksum, others wait for the disk.

use super::ScratchError;
use super::pieces::Pieces;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How many accesses of a direction are in flight.
const THREADS: usize = 4;

/// What a thread does with a piece and its memory.
pub(super) type Access = fn(&Pieces, usize, &mut [u8]) -> Result<(), ScratchError>;

/// Some threads that share the pieces of one transfer at a time.
#[derive(Debug)]
pub(super) struct Lane {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pieces: Arc<Pieces>,
    access: Access,
    state: Mutex<State>,
    /// Signaled when there is work, or all must stop.
    work: Condvar,
    /// Signaled when a transfer is done.
    done: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Pieces that no thread has taken yet.
    waiting: Range<usize>,
    /// Where the first byte of the transfer is in the file, and its address.
    base: (u64, usize),
    /// Pieces that are not done.
    left: usize,
    failure: Option<ScratchError>,
    stopping: bool,
}

impl Lane {
    pub(super) fn new(
        name: &str,
        pieces: &Arc<Pieces>,
        access: Access,
    ) -> Result<Lane, ScratchError> {
        let shared = Arc::new(Shared {
            pieces: Arc::clone(pieces),
            access,
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut lane = Lane { shared, threads: Vec::new() };
        for _ in 0..THREADS {
            let shared = Arc::clone(&lane.shared);
            let thread =
                std::thread::Builder::new().name(name.to_owned()).spawn(move || shared.run());
            lane.threads.push(thread.map_err(ScratchError::Thread)?);
        }
        Ok(lane)
    }

    /// Transfers consecutive pieces, and returns when all are done.
    ///
    /// # Safety
    /// `address` is memory as large as the pieces. Until this returns, nothing else writes it, or accesses it at all
    /// if the lane reads. One caller at a time.
    pub(super) unsafe fn transfer(
        &self,
        pieces: Range<usize>,
        offset: u64,
        address: usize,
    ) -> Result<(), ScratchError> {
        let mut state = self.shared.lock();
        state.left = pieces.len();
        state.base = (offset, address);
        state.waiting = pieces;
        self.shared.work.notify_all();
        let mut state = self
            .shared
            .done
            .wait_while(state, |state| state.left > 0)
            .unwrap_or_else(PoisonError::into_inner);
        state.failure.take().map_or(Ok(()), Err)
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.lock();
        loop {
            let idle = |state: &mut State| state.waiting.is_empty() && !state.stopping;
            state = self.work.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
            let Some(index) = state.waiting.next().filter(|_| !state.stopping) else { return };
            let (offset, address) = state.base;
            drop(state);
            let piece = self.pieces.piece(index);
            let start = (address + (piece.offset - offset) as usize) as *mut u8;
            // SAFETY: the caller of `transfer` promises the memory until the transfer is done, and it is not
            // before this piece is. No two threads take the same piece.
            let memory = unsafe { std::slice::from_raw_parts_mut(start, piece.bytes) };
            let result = (self.access)(&self.pieces, index, memory);
            state = self.lock();
            if let Err(error) = result {
                state.failure.get_or_insert(error);
            }
            state.left -= 1;
            if state.left == 0 {
                self.done.notify_all();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // It has nothing to report.
            let _ = thread.join();
        }
    }
}
