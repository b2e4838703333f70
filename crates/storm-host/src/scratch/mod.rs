//! Scratch space on a disk: data that a process reads back while it runs, discarded when it exits.
//!
//! [`ScratchFolder`] is a folder that one process at a time uses. [`ScratchStore`] is an unnamed
//! file in it, so the system frees its space however the process ends. Its space is preallocated.
//! It uses O_DIRECT and io_uring where the system allows them. Every piece that is read is verified
//! against the checksum of what was written.

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
