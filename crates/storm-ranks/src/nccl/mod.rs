//! Collectives between GPUs over NCCL, in stream order.
//!
//! Only calls that move bytes are used. NCCL's reductions add in an order that depends on the
//! placement of ranks, and they round at every hop. The library is loaded at run time, so building
//! this needs no CUDA. Streams and addresses come from the owner of the device.

mod library;

use crate::engine::Place;
use crate::launch::Variables;
use library::{Code, Functions, Handle};
use std::ffi::{CStr, c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// The oldest supported version. It is the first in which a communicator can be finalized and
/// aborted as done here.
const VERSION_MIN: Version = Version { major: 2, minor: 19, patch: 0 };

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch version.
    pub patch: u32,
}

/// The unique ID of a communicator. Rank 0 creates it, and a rendezvous sends it to the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Id(library::UniqueId);

impl Id {
    /// Encodes the ID as a message.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.0.to_vec()
    }

    /// Decodes a message. `None` if its length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Id> {
        bytes.try_into().ok().map(|bytes| Id(library::UniqueId(bytes)))
    }
}

/// Why NCCL cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NcclError {
    /// No library was found.
    #[error(
        "NCCL was not found (libnccl.so.2; tried {tried}). Install it, for example by pip install nvidia-nccl-cu13 in \
         an active environment, or set STORM_CUDA_LIBRARIES to its folder"
    )]
    NotFound {
        /// The paths tried.
        tried: String,
    },
    /// A function is missing.
    #[error("{} has no {symbol}: install NCCL 2.19 or newer", .path.display())]
    Symbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The library is too old.
    #[error(
        "{} is NCCL {}.{}.{}: install 2.19 or newer",
        .path.display(), .version.major, .version.minor, .version.patch
    )]
    TooOld {
        /// The library.
        path: PathBuf,
        /// Its version.
        version: Version,
    },
    /// A function failed.
    #[error("{function} failed: {message}")]
    Failed {
        /// The function.
        function: &'static str,
        /// NCCL's message.
        message: String,
    },
    /// There is no such rank.
    #[error("there is no rank {rank}, only {ranks} ranks")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Number of ranks.
        ranks: u32,
    },
    /// The communicator was aborted.
    #[error("the communicator was aborted")]
    Aborted,
}

/// The loaded NCCL library.
pub struct Nccl {
    functions: Functions,
    version: Version,
}

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Device address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: usize,
}

/// A message to or from another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The other rank.
    pub rank: u32,
    /// The source or destination memory.
    pub piece: Piece,
}

/// A CUDA stream, as a driver handle.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub *mut c_void);

impl Nccl {
    /// Finds and loads the library.
    pub fn load(variables: &Variables) -> Result<Arc<Nccl>, NcclError> {
        let (path, functions) = library::load(variables)?;
        let mut number = 0;
        // SAFETY: has no preconditions.
        let code = unsafe { (functions.get_version)(&mut number) };
        let version = Version::from_number(number);
        let nccl = Nccl { functions, version };
        nccl.check("ncclGetVersion", code, ptr::null_mut())?;
        match version < VERSION_MIN {
            true => Err(NcclError::TooOld { path, version }),
            false => Ok(Arc::new(nccl)),
        }
    }

    /// The library's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Creates an ID. This opens a port on this machine.
    pub fn new_id(&self) -> Result<Id, NcclError> {
        let mut id = library::UniqueId([0; 128]);
        // SAFETY: the id is written.
        let code = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code, ptr::null_mut())?;
        Ok(Id(id))
    }

    fn check(
        &self,
        function: &'static str,
        code: Code,
        communicator: Handle,
    ) -> Result<(), NcclError> {
        if code == library::SUCCESS {
            return Ok(());
        }
        // SAFETY: both return a string that lives as long as the library. The second accepts a null
        // communicator.
        let texts = unsafe {
            [(self.functions.get_error_string)(code), (self.functions.get_last_error)(communicator)]
        };
        let texts = texts.map(|text| match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL's strings are null-terminated.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        });
        let message = match texts {
            [what, why] if why.is_empty() => what,
            [what, why] => format!("{what} ({why})"),
        };
        Err(NcclError::Failed { function, message })
    }
}

impl Version {
    /// Decodes NCCL's version number: 22809 is 2.28.9.
    fn from_number(number: c_int) -> Version {
        let number = u32::try_from(number).unwrap_or(0);
        Version { major: number / 10_000, minor: number / 100 % 100, patch: number % 100 }
    }
}

/// Connects a rank's GPU to those of the other ranks.
pub struct Communicator {
    shared: Arc<Shared>,
    place: Place,
}

struct Shared {
    nccl: Arc<Nccl>,
    /// `None` after it was aborted or destroyed.
    handle: Mutex<Option<Communication>>,
}

/// The handle of a communicator.
#[derive(Clone, Copy)]
struct Communication(Handle);

// SAFETY: NCCL's communicators may be used from any thread.
unsafe impl Send for Communication {}

/// Aborts a communicator, from any thread.
#[derive(Clone)]
pub struct Aborter(Arc<Shared>);

impl Communicator {
    /// Connects this rank's GPU to the others. Waits for all ranks.
    ///
    /// # Safety
    /// The CUDA context of the rank's GPU is current on this thread and outlives the communicator.
    pub unsafe fn connect(
        nccl: &Arc<Nccl>,
        id: Id,
        place: Place,
    ) -> Result<Communicator, NcclError> {
        let mut handle = ptr::null_mut();
        let (rank, ranks) = (place.rank as c_int, place.ranks as c_int);
        // SAFETY: the handle is written. The caller guarantees that the context is current.
        let code = unsafe { (nccl.functions.comm_init_rank)(&mut handle, ranks, id.0, rank) };
        nccl.check("ncclCommInitRank", code, ptr::null_mut())?;
        let handle = Mutex::new(Some(Communication(handle)));
        Ok(Communicator { shared: Arc::new(Shared { nccl: nccl.clone(), handle }), place })
    }

    /// This rank and the number of ranks.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Enqueues messages to and from other ranks. Messages between two ranks are matched in the
    /// order in which both list them.
    ///
    /// # Safety
    /// All pieces are memory of this rank's GPU. Until the stream has executed this call, nothing
    /// writes the memory that is sent and nothing accesses the memory that is received. Received
    /// memory does not overlap any other piece of this call. For every message, the other rank
    /// enqueues its counterpart with the same number of bytes.
    pub unsafe fn exchange(
        &self,
        sends: &[Message],
        receives: &[Message],
        stream: Stream,
    ) -> Result<(), NcclError> {
        let ranks = self.place.ranks;
        let is_other = |message: &Message| message.rank < ranks && message.rank != self.place.rank;
        if let Some(wrong) = sends.iter().chain(receives).find(|message| !is_other(message)) {
            return Err(NcclError::NoSuchRank { rank: wrong.rank, ranks });
        }
        let handle = self.shared.handle()?;
        let Functions { group_start, group_end, send, receive, .. } = self.shared.nccl.functions;
        let check = |function, code| self.shared.nccl.check(function, code, handle);
        // SAFETY: has no preconditions.
        check("ncclGroupStart", unsafe { group_start() })?;
        let mut queued = Ok(());
        for &Message { rank, piece } in sends {
            // SAFETY: guaranteed by the caller.
            let code = unsafe {
                send(device(&piece), piece.bytes, library::BYTES, rank as c_int, handle, stream.0)
            };
            queued = queued.and(check("ncclSend", code));
        }
        for &Message { rank, piece } in receives {
            // SAFETY: guaranteed by the caller.
            let code = unsafe {
                receive(
                    device(&piece),
                    piece.bytes,
                    library::BYTES,
                    rank as c_int,
                    handle,
                    stream.0,
                )
            };
            queued = queued.and(check("ncclRecv", code));
        }
        // A started group must be ended, even after an error.
        // SAFETY: as above.
        let ended = check("ncclGroupEnd", unsafe { group_end() });
        queued.and(ended)
    }

    /// An asynchronous error, such as the loss of another rank.
    pub fn failure(&self) -> Option<NcclError> {
        let handle = match self.shared.handle() {
            Ok(handle) => handle,
            Err(error) => return Some(error),
        };
        let mut state = library::SUCCESS;
        // SAFETY: the communicator is alive, and the state is written.
        let code = unsafe { (self.shared.nccl.functions.comm_get_async_error)(handle, &mut state) };
        let state = if code == library::SUCCESS { state } else { code };
        if state == library::IN_PROGRESS {
            return None;
        }
        self.shared.nccl.check("NCCL", state, handle).err()
    }

    /// Returns a handle that can abort this communicator from any thread.
    pub fn aborter(&self) -> Aborter {
        Aborter(self.shared.clone())
    }

    /// Waits for all enqueued work and disconnects. Every rank must call this.
    pub fn finish(self) -> Result<(), NcclError> {
        let Some(Communication(handle)) = self.shared.take() else {
            return Err(NcclError::Aborted);
        };
        let Functions { comm_finalize, comm_destroy, .. } = self.shared.nccl.functions;
        // SAFETY: the handle was taken, so no other code uses or destroys it.
        let codes = unsafe { [comm_finalize(handle), comm_destroy(handle)] };
        let check = |function, code| self.shared.nccl.check(function, code, ptr::null_mut());
        check("ncclCommFinalize", codes[0]).and(check("ncclCommDestroy", codes[1]))
    }
}

/// Aborts a communicator that was not finished. Finishing would wait for ranks that may be gone.
impl Drop for Communicator {
    fn drop(&mut self) {
        self.aborter().abort();
    }
}

impl Aborter {
    /// Stops all work in flight. This may block forever, so call it on a thread that the process
    /// does not join.
    pub fn abort(&self) {
        if let Some(Communication(handle)) = self.0.take() {
            // SAFETY: the handle was taken, so it is not destroyed again. NCCL allows this during
            // other calls.
            unsafe { (self.0.nccl.functions.comm_abort)(handle) };
        }
    }
}

impl Shared {
    fn handle(&self) -> Result<Handle, NcclError> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        handle.map(|Communication(handle)| handle).ok_or(NcclError::Aborted)
    }

    fn take(&self) -> Option<Communication> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn device(piece: &Piece) -> *mut c_void {
    ptr::without_provenance_mut(piece.address as usize)
}

#[cfg(test)]
mod tests;
