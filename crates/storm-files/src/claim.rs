//! Temporary names next to an output, and removal of those left by killed processes.
//!
//! A process holds a lock while it uses a temporary name. A name whose lock is free is a leftover.

use rustix::fs::OFlags;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Maximum bytes of the output's name in temporary names, because file systems limit name lengths.
const NAME_BYTES_MAX: usize = 100;

/// Maximum number of temporary names to try: another process may remove one as a leftover before it
/// is locked.
pub(crate) const ATTEMPTS: usize = 16;

/// The prefix of this output's temporary names. A random part follows.
pub(crate) fn prefix(name: &OsStr, purpose: &str) -> OsString {
    let name = name.as_bytes();
    let mut prefix = b".".to_vec();
    prefix.extend(&name[..name.len().min(NAME_BYTES_MAX)]);
    prefix.extend(format!(".{purpose}-").bytes());
    OsString::from_vec(prefix)
}

/// Deletes a temporary file or directory, and retries once. Returns whether it is gone. If not, the
/// next process that writes there removes it.
pub(crate) fn delete(remove: impl Fn() -> io::Result<()>) -> bool {
    let is_gone = || match remove() {
        Ok(()) => true,
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    is_gone() || is_gone()
}

/// Locks a new file. Returns false if another process removed it before it was locked.
///
/// Also succeeds on a file system without locks. The temporary name then stays if this process is
/// killed.
pub(crate) fn lock(file: &File) -> io::Result<bool> {
    file.lock().ok();
    Ok(file.metadata()?.nlink() > 0)
}

/// Opens the lock of a possible leftover. Special files and links are not leftovers.
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits();
    // Network file systems lock only files that are open for writing.
    let file = File::options().read(true).write(true).custom_flags(flags as i32).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(ErrorKind::InvalidInput.into()),
    }
}

/// Whether the file was not locked. If so, locks it for as long as it is open.
pub(crate) fn is_free(file: &File) -> bool {
    file.try_lock().is_ok()
}

/// The directory that contains a path.
pub(crate) fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
