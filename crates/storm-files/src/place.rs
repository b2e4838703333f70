//! Moves files and directories to their final place.

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Renames a file or directory to a name that must be free.
///
/// If the file system cannot check and rename atomically, the check comes right before the rename.
/// Another process could then still create the name in between.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if anything is at `to`, even an empty directory or a dangling
/// link.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => match to.symlink_metadata() {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(_) => fs::rename(from, to),
        },
        Err(error) => Err(error.into()),
    }
}

/// Flushes a directory's entries to disk.
///
/// # Errors
/// From the file system.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rename_never_replaces() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("new")).unwrap();
        fs::create_dir(path("empty")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("dangling")).unwrap();
        for taken in ["empty", "dangling"] {
            let error = rename_new(&path("new"), &path(taken)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{taken}");
        }
        rename_new(&path("new"), &path("free")).unwrap();
        assert!(path("free").is_dir() && !path("new").exists());
    }
}
