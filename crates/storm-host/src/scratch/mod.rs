//! Scratch space on a disk: bytes that a process reads back while it runs, discarded when it ends.
//!
//! [`ScratchFolder`] is a folder that one process at a time uses. [`ScratchStore`] is a file in it that has no
//! name: the system frees its space however the process ends. Its space is allocated at once, its bytes go past
//! the page cache where the file system allows that, by io_uring where the system allows it, and every piece that is
//! read is compared with the checksum of what was written.

mod crew;
mod error;
mod fault;
mod file;
mod folder;
mod lane;
mod options;
mod pieces;
mod rates;
mod ring_lane;
mod store;

pub use error::ScratchError;
pub use fault::{ScratchAccess, ScratchFault, ScratchFaultKind};
pub use folder::ScratchFolder;
pub use options::{ScratchOptions, ScratchPath, ScratchWay};
pub use rates::ScratchRates;
pub use store::ScratchStore;
