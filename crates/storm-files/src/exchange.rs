//! Swaps two names atomically.

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::io;
use std::path::Path;

/// Whether the file system supports the exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exchange {
    Done,
    Unsupported,
}

/// Swaps two names in one atomic operation.
pub(crate) fn exchange(one: &Path, other: &Path) -> io::Result<Exchange> {
    match renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(Exchange::Done),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => Ok(Exchange::Unsupported),
        Err(error) => Err(error.into()),
    }
}
