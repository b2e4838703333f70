//! Folders that environment variables name.

use std::ffi::OsString;
use std::path::PathBuf;

/// The folder that a variable of this process names.
pub(super) fn folder(variable: &str) -> Option<PathBuf> {
    absolute(std::env::var_os(variable)?)
}

/// Only an absolute path names a folder. An empty or relative one would mean whatever folder the process was
/// started in, where any user may have put a library or a cache entry: it counts as not set.
pub(super) fn absolute(value: OsString) -> Option<PathBuf> {
    Some(PathBuf::from(value)).filter(|path| path.is_absolute())
}
