//! Folders named by environment variables.

use std::ffi::OsString;
use std::path::PathBuf;

/// The folder that an environment variable of this process names.
pub(super) fn folder(variable: &str) -> Option<PathBuf> {
    absolute(std::env::var_os(variable)?)
}

/// Only an absolute path counts. An empty or relative one would depend on the working directory, where any
/// user may have put a library or a cache entry, so it is treated as not set.
pub(super) fn absolute(value: OsString) -> Option<PathBuf> {
    Some(PathBuf::from(value)).filter(|path| path.is_absolute())
}
