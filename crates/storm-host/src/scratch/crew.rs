//! Threads that share the pieces of a transfer. With io_uring they only compute checksums. Without
//! it they do everything.

use super::ScratchAccess;
use super::ScratchError;
use super::pieces::{Memory, Pieces, Transfer};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Enough to compute the checksums of several drives, and to keep one drive busy without io_uring.
const THREADS: usize = 4;

/// What to do with a piece.
#[derive(Debug)]
pub(super) enum Job {
    /// Transfers the rest of it. A piece that was read is verified against its checksum.
    Complete(Transfer),
    /// Records its checksum while it is written.
    Remember(usize),
    /// Fills its memory with zeros.
    Clear(usize),
}

/// Threads that work on one transfer at a time.
#[derive(Debug)]
pub(super) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pieces: Arc<Pieces>,
    state: Mutex<State>,
    /// Signaled when there is work, or when all must stop.
    work: Condvar,
    /// Signaled when no job is left.
    done: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Jobs that no thread has taken yet.
    waiting: VecDeque<(Job, Memory)>,
    /// Jobs that are not finished.
    left: usize,
    failure: Option<ScratchError>,
    stopping: bool,
}

impl Crew {
    /// # Errors
    /// The system refuses to start threads.
    pub(super) fn new(name: &str, pieces: &Arc<Pieces>) -> Result<Crew, ScratchError> {
        let shared = Arc::new(Shared {
            pieces: Arc::clone(pieces),
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut crew = Crew { shared, threads: Vec::new() };
        for _ in 0..THREADS {
            let shared = Arc::clone(&crew.shared);
            let thread =
                std::thread::Builder::new().name(name.to_owned()).spawn(move || shared.run());
            crew.threads.push(thread.map_err(ScratchError::Thread)?);
        }
        Ok(crew)
    }

    /// Queues a job.
    ///
    /// # Safety
    /// `memory` has room for the job's piece. Until [`Crew::finish`] returns, nothing else writes
    /// there, or accesses it at all if the piece is read or cleared.
    pub(super) unsafe fn add(&self, job: Job, memory: Memory) {
        let mut state = self.shared.lock();
        state.left += 1;
        state.waiting.push_back((job, memory));
        self.shared.work.notify_one();
    }

    /// Waits for all jobs.
    ///
    /// # Errors
    /// The error of the first job that failed.
    pub(super) fn finish(&self) -> Result<(), ScratchError> {
        let state = self.shared.lock();
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
            let Some((job, memory)) = state.waiting.pop_front() else { return };
            drop(state);
            // SAFETY: the promise of `add`. `finish` does not return before this job is finished.
            let result = unsafe { self.work_on(job, memory) };
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

    /// # Safety
    /// As [`Crew::add`].
    unsafe fn work_on(&self, job: Job, memory: Memory) -> Result<(), ScratchError> {
        // SAFETY: the caller's promise, in each case.
        unsafe {
            match job {
                Job::Complete(transfer) => {
                    let piece = self.pieces.piece(transfer.index);
                    match transfer.access {
                        ScratchAccess::Read => {
                            self.pieces.complete_read(transfer, memory.of_mut(piece))
                        }
                        ScratchAccess::Write => {
                            self.pieces.complete_write(transfer, memory.of(piece))
                        }
                    }
                }
                Job::Remember(index) => {
                    self.pieces.remember(index, memory.of(self.pieces.piece(index)));
                    Ok(())
                }
                Job::Clear(index) => {
                    memory.of_mut(self.pieces.piece(index)).fill(0);
                    Ok(())
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // The thread returns nothing.
            let _ = thread.join();
        }
    }
}
