//! Collectives over MPI, between processes started by `mpirun`.
//!
//! One binary works with every MPI: the library is found and loaded at run time, and only functions
//! common to all are used. Every collective consists of point-to-point messages. MPI's own
//! collectives have 32-bit counts and keep a core busy while they wait. Here the waiting thread
//! yields.
//!
//! A failure with messages in flight ends the process, because MPI may still write to their memory.

mod abi;
mod find;

use crate::engine::{Engine, Place, check_exchange, check_gather, check_rank};
use crate::error::{Collective, RankError};
use crate::launch::{Launch, LaunchError, Launcher, Variables};
use crate::watch::{end_process, last_words};
use abi::{Failed, Library, Request};
use std::ffi::c_int;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use thiserror::Error;

/// Maximum bytes of one message. MPI's counts have 32 bits.
const CHUNK_BYTES: usize = 1 << 30;

/// Tags below this are valid with every MPI.
const TAG_END: u32 = 1 << 15;

/// Unsuccessful tests before the waiting thread sleeps between tests.
const EAGER_TESTS: u32 = 2000;

/// How long the waiting thread then sleeps between tests.
const TEST_INTERVAL: Duration = Duration::from_micros(50);

/// How long MPI may take to end all ranks before this process exits anyway.
const ABORT_TIME: Duration = Duration::from_secs(3);

/// Whether MPI was started in this process. It can be started only once.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Why MPI cannot be used.
#[derive(Debug, Error)]
pub enum MpiError {
    /// The process was not started by `mpirun`.
    #[error(
        "ranks without GPUs are connected by MPI, but {launcher} started this process. Use mpirun -n 4 storm …"
    )]
    NotByMpi {
        /// The launcher.
        launcher: Launcher,
    },
    /// No library was found.
    #[error(
        "{launcher} started this process, but its library was not found (tried {tried}). Set STORM_MPI_LIBRARY to its \
         path, such as /usr/lib/libmpi.so.40; or install an MPI with `pip install mpich` and use its mpirun"
    )]
    NotFound {
        /// The launcher.
        launcher: Launcher,
        /// The paths tried.
        tried: String,
    },
    /// The library named by the user cannot be used.
    #[error("STORM_MPI_LIBRARY is {}, which cannot be used: {reason}", .path.display())]
    Named {
        /// The path.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A function is missing.
    #[error("{} has no {symbol}: it is too old, or no MPI library", .path.display())]
    Symbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: String,
    },
    /// The library does not see the ranks that the launcher started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A function failed.
    #[error("{function} failed: {message}")]
    Failed {
        /// The function.
        function: &'static str,
        /// MPI's message.
        message: String,
    },
    /// The library was built without support for threads.
    #[error(
        "{version} was built without support for threads (MPI_THREAD_SERIALIZED). Use another MPI"
    )]
    NoThreads {
        /// The library.
        version: String,
    },
    /// MPI was already started.
    #[error("MPI was started before in this process")]
    StartedBefore,
}

impl From<Failed> for MpiError {
    fn from(Failed { function, message }: Failed) -> Self {
        MpiError::Failed { function, message }
    }
}

/// A rank that is a process of `mpirun`. A process has at most one.
pub struct Mpi {
    library: Box<dyn Library>,
    version: String,
    place: Place,
    /// Number of collectives so far. Part of every tag.
    count: u32,
    chunk_bytes: usize,
    is_finished: bool,
}

/// A receive in flight.
struct Receiving {
    request: Request,
    from: u32,
    expected: usize,
}

/// The messages of one collective.
struct Pending {
    collective: Collective,
    tag: c_int,
    sending: Vec<Request>,
    receiving: Vec<Receiving>,
}

impl Mpi {
    /// Loads the launcher's library, starts MPI and checks that it sees the launcher's ranks.
    pub fn start(launch: &Launch, variables: &Variables) -> Result<Mpi, MpiError> {
        let library = find::load(launch.launcher, variables)?;
        if STARTED.swap(true, Ordering::SeqCst) {
            return Err(MpiError::StartedBefore);
        }
        let version = library.version();
        let has_threads = library.start()?;
        let (rank, ranks) = library.place()?;
        let advice = "set STORM_MPI_LIBRARY to the library of this mpirun, or use the mpirun of this library";
        let confirmed = launch.confirm(&version, rank, ranks, advice);
        if confirmed.is_err() || !has_threads {
            // Otherwise the launcher waits for this rank, or takes its end for a crash.
            library.finish()?;
            confirmed?;
            return Err(MpiError::NoThreads { version });
        }
        let place = Place { rank, ranks };
        Ok(Mpi { library, version, place, count: 0, chunk_bytes: CHUNK_BYTES, is_finished: false })
    }

    /// Limits messages to this many bytes, so that tests cover messages of several chunks.
    pub fn with_chunks_of(mut self, bytes: usize) -> Mpi {
        self.chunk_bytes = bytes.clamp(1, CHUNK_BYTES);
        self
    }

    /// Name and version of the library.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Waits for all ranks and ends MPI.
    pub fn finish(mut self) -> Result<(), MpiError> {
        // On failure, this ends the process.
        let _ = self.barrier();
        self.is_finished = true;
        Ok(self.library.finish()?)
    }

    fn begin(&mut self, collective: Collective) -> Pending {
        // The tag detects ranks that are at different collectives, before they mix up data.
        let tag = self.count.wrapping_mul(8).wrapping_add(collective as u32) % TAG_END;
        self.count = self.count.wrapping_add(1);
        Pending { collective, tag: tag as c_int, sending: Vec::new(), receiving: Vec::new() }
    }

    /// Starts a receive from a rank.
    ///
    /// # Safety
    /// Nothing else accesses the bytes until [`Mpi::complete`] returns.
    unsafe fn receive(&self, pending: &mut Pending, from: u32, bytes: &mut [u8]) {
        for chunk in chunks(bytes.len(), self.chunk_bytes) {
            let expected = chunk.len();
            let bytes = bytes[chunk].as_mut_ptr();
            // SAFETY: guaranteed by the caller.
            match unsafe { self.library.receive(bytes, expected as c_int, from) } {
                Ok(request) => pending.receiving.push(Receiving { request, from, expected }),
                Err(failed) => self.end(&MpiError::from(failed).to_string()),
            }
        }
    }

    /// Starts a send to a rank.
    ///
    /// # Safety
    /// The bytes do not change until [`Mpi::complete`] returns.
    unsafe fn send(&self, pending: &mut Pending, to: u32, bytes: &[u8]) {
        for chunk in chunks(bytes.len(), self.chunk_bytes) {
            let (bytes, count) = (bytes[chunk.clone()].as_ptr(), chunk.len() as c_int);
            // SAFETY: guaranteed by the caller.
            match unsafe { self.library.send(bytes, count, to, pending.tag) } {
                Ok(request) => pending.sending.push(request),
                Err(failed) => self.end(&MpiError::from(failed).to_string()),
            }
        }
    }

    /// Waits until every message is complete. Ends the process if one fails.
    fn complete(&self, mut pending: Pending) {
        let Pending { collective, tag, .. } = pending;
        let mut idle = 0;
        loop {
            let before = pending.sending.len() + pending.receiving.len();
            pending.sending.retain_mut(|request| match self.library.test(request) {
                Ok(done) => done.is_none(),
                Err(failed) => self.end(&MpiError::from(failed).to_string()),
            });
            pending.receiving.retain_mut(|receiving| {
                let Receiving { request, from, expected } = receiving;
                let done = match self.library.test(request) {
                    Ok(Some(done)) => done,
                    Ok(None) => return true,
                    Err(failed) => self.end(&MpiError::from(failed).to_string()),
                };
                if done.tag != tag {
                    self.end(&RankError::OutOfStep { collective, other: *from }.to_string());
                }
                if done.bytes != *expected {
                    let (from, sent, expected) = (*from, done.bytes, *expected);
                    self.end(&RankError::Length { collective, from, sent, expected }.to_string());
                }
                false
            });
            let after = pending.sending.len() + pending.receiving.len();
            if after == 0 {
                return;
            }
            idle = if after < before { 0 } else { idle + 1 };
            match idle < EAGER_TESTS {
                true => std::thread::yield_now(),
                false => std::thread::sleep(TEST_INTERVAL),
            }
        }
    }

    /// The other ranks, starting with the next one, so that not all ranks send to rank 0 at once.
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let Place { rank, ranks } = self.place;
        (1..ranks).map(move |distance| (rank + distance) % ranks)
    }

    /// Sends a piece to all ranks and receives theirs.
    fn gather_as(
        &mut self,
        collective: Collective,
        piece: &[u8],
        all: &mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<(), RankError> {
        let own = &mut all[ranges[self.place.rank as usize].clone()];
        if own.len() != piece.len() {
            let (from, sent, expected) = (self.place.rank, piece.len(), own.len());
            return Err(RankError::Length { collective, from, sent, expected });
        }
        own.copy_from_slice(piece);
        let mut pending = self.begin(collective);
        for other in self.others() {
            let bytes = &mut all[ranges[other as usize].clone()];
            // SAFETY: the ranges are disjoint, and nothing accesses them before all messages are
            // complete.
            unsafe { self.receive(&mut pending, other, bytes) };
        }
        for other in self.others() {
            // SAFETY: the piece is borrowed until all messages are complete.
            unsafe { self.send(&mut pending, other, piece) };
        }
        self.complete(pending);
        Ok(())
    }

    /// Prints the reason and ends all ranks.
    fn end(&self, reason: &str) -> ! {
        let rank = self.place.rank;
        last_words(&format!("storm: rank {rank}: {reason}. All ranks end\n"));
        // MPI_Abort has been seen to hang, so a thread guards against it if one can be started.
        let _ = std::thread::Builder::new().name("mpi-abort".to_owned()).spawn(|| {
            std::thread::sleep(ABORT_TIME);
            end_process(1)
        });
        self.library.abort();
        end_process(1)
    }
}

/// Cuts a message into chunks. An empty message is one empty chunk, so that the receiver can detect
/// a wrong length.
fn chunks(length: usize, chunk_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let count = length.div_ceil(chunk_bytes).max(1);
    (0..count).map(move |index| index * chunk_bytes..((index + 1) * chunk_bytes).min(length))
}

impl Engine for Mpi {
    fn place(&self) -> Place {
        self.place
    }

    fn exchange(
        &mut self,
        send: &[u8],
        sends: &[Range<usize>],
        receive: &mut [u8],
        receives: &[Range<usize>],
    ) -> Result<(), RankError> {
        check_exchange(self.place, send, sends, receive, receives)?;
        let collective = Collective::Exchange;
        let rank = self.place.rank;
        let (own, to) =
            (&send[sends[rank as usize].clone()], &mut receive[receives[rank as usize].clone()]);
        if own.len() != to.len() {
            let (sent, expected) = (own.len(), to.len());
            return Err(RankError::Length { collective, from: rank, sent, expected });
        }
        to.copy_from_slice(own);
        let mut pending = self.begin(collective);
        for other in self.others() {
            let bytes = &mut receive[receives[other as usize].clone()];
            // SAFETY: the ranges are disjoint, and nothing accesses them before all messages are
            // complete.
            unsafe { self.receive(&mut pending, other, bytes) };
        }
        for other in self.others() {
            // SAFETY: the sent bytes are borrowed until all messages are complete.
            unsafe { self.send(&mut pending, other, &send[sends[other as usize].clone()]) };
        }
        self.complete(pending);
        Ok(())
    }

    fn gather(
        &mut self,
        piece: &[u8],
        all: &mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<(), RankError> {
        check_gather(self.place, all, ranges)?;
        self.gather_as(Collective::Gather, piece, all, ranges)
    }

    fn broadcast(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), RankError> {
        check_rank(self.place, from)?;
        let mut pending = self.begin(Collective::Broadcast);
        if from == self.place.rank {
            for other in self.others() {
                // SAFETY: the bytes are borrowed until all messages are complete.
                unsafe { self.send(&mut pending, other, bytes) };
            }
        } else {
            // SAFETY: nothing accesses the bytes before the message is complete.
            unsafe { self.receive(&mut pending, from, bytes) };
        }
        self.complete(pending);
        Ok(())
    }

    fn agree(&mut self, numbers: &mut [i64]) -> Result<(), RankError> {
        let own: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let ranks = self.place.ranks as usize;
        let ranges: Vec<_> =
            (0..ranks).map(|rank| rank * own.len()..(rank + 1) * own.len()).collect();
        let mut all = vec![0; own.len() * ranks];
        self.gather_as(Collective::Agree, &own, &mut all, &ranges)?;
        for range in ranges {
            for (number, bytes) in numbers.iter_mut().zip(all[range].as_chunks().0) {
                *number = (*number).max(i64::from_le_bytes(*bytes));
            }
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), RankError> {
        let ranges = vec![0..0; self.place.ranks as usize];
        self.gather_as(Collective::Barrier, &[], &mut [], &ranges)
    }

    fn abort(&mut self, reason: &str) {
        self.end(reason)
    }
}

/// A rank dropped without [`Mpi::finish`] has failed, and the others would wait for it.
impl Drop for Mpi {
    fn drop(&mut self) {
        if !self.is_finished {
            self.end("it stopped in the middle of a run");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_message() {
        let cut = |length, chunk| chunks(length, chunk).collect::<Vec<_>>();
        assert_eq!(cut(0, 4), vec![0..0; 1]);
        assert_eq!(cut(4, 4), vec![0..4; 1]);
        assert_eq!(cut(9, 4), [0..4, 4..8, 8..9]);
        let large = cut(5 << 30, CHUNK_BYTES);
        assert_eq!(large.len(), 5);
        assert!(large.iter().all(|chunk| chunk.len() <= c_int::MAX as usize));
    }
}
