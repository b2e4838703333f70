//! Files that only one user can write, such as caches with trusted content.

use crate::open_plain;
use rustix::process::geteuid;
use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// Only the owner can read, write or enter.
const PRIVATE: u32 = 0o700;

/// Permission bits that let another user change a file.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Reads a plain file of at most `bytes_max` bytes that belongs to this user and that no other user
/// can write.
///
/// The check is on the open file, not on its path, so another process cannot swap the file in
/// between.
///
/// # Errors
/// The file cannot be read, is larger, or another user could have written it.
pub fn read_private(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open_plain(path)?;
    let metadata = file.metadata()?;
    check_owner(&metadata)?;
    if metadata.mode() & WRITABLE_BY_OTHERS != 0 {
        return Err(refused("can be written by other users"));
    }
    let mut bytes = Vec::new();
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("is larger than {bytes_max} bytes"),
        ));
    }
    Ok(bytes)
}

/// Writes a private file, completely or not at all, in a directory that only this user can enter.
/// Creates a missing directory, and makes an existing one private.
///
/// The file is written under a random name and then renamed, so concurrent writers of the same file
/// do not mix their bytes.
///
/// # Errors
/// The directory belongs to another user, or a file system operation failed.
pub fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.ok_or_else(|| refused("has no folder"))?;
    DirBuilder::new().recursive(true).mode(PRIVATE).create(folder)?;
    let metadata = fs::metadata(folder)?;
    check_owner(&metadata)?;
    if metadata.mode() & 0o777 != PRIVATE {
        fs::set_permissions(folder, Permissions::from_mode(PRIVATE))?;
    }
    let mut unfinished =
        tempfile::Builder::new().prefix(".").suffix(".unfinished").tempfile_in(folder)?;
    unfinished.write_all(bytes)?;
    unfinished.persist(path).map_err(|error| error.error)?;
    Ok(())
}

fn check_owner(metadata: &Metadata) -> io::Result<()> {
    match metadata.uid() == geteuid().as_raw() {
        true => Ok(()),
        false => Err(refused("belongs to another user")),
    }
}

fn refused(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn what_is_written_is_private_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache/kernels/entry");
        write_private(&path, b"first").unwrap();
        write_private(&path, b"second").unwrap();
        assert_eq!(read_private(&path, 6).unwrap(), b"second");
        assert_eq!(read_private(&path, 5).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let kernels = path.parent().unwrap();
        assert_eq!((mode(kernels), mode(kernels.parent().unwrap())), (0o700, 0o700));
        assert_eq!(mode(&path), 0o600);
        // No unfinished file is left.
        assert_eq!(fs::read_dir(kernels).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_was_open_to_others_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let kernels = folder.path().join("kernels");
        fs::create_dir(&kernels).unwrap();
        fs::set_permissions(&kernels, Permissions::from_mode(0o777)).unwrap();
        write_private(&kernels.join("entry"), b"bytes").unwrap();
        assert_eq!(mode(&kernels), 0o700);
    }

    #[test]
    fn what_others_could_have_written_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("entry");
        fs::write(&path, b"bytes").unwrap();
        for mode in [0o620, 0o602, 0o666] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = read_private(&path, 100).unwrap_err();
            assert_eq!(error.to_string(), "can be written by other users", "{mode:o}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert_eq!(read_private(&path, 100).unwrap(), b"bytes");
    }

    #[test]
    fn what_belongs_to_others_is_refused() {
        // Root can change owners, so it tests both cases. Other users test with a system directory.
        let folder = tempfile::tempdir().unwrap();
        let (inside, entry) = (folder.path().join("theirs"), folder.path().join("theirs/entry"));
        fs::create_dir(&inside).unwrap();
        fs::write(&entry, b"planted").unwrap();
        if !geteuid().is_root() {
            assert!(write_private(Path::new("/usr/entry"), b"bytes").is_err());
            return;
        }
        for path in [&entry, &inside] {
            std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        }
        assert_eq!(read_private(&entry, 100).unwrap_err().to_string(), "belongs to another user");
        let error = write_private(&entry, b"bytes").unwrap_err();
        assert_eq!(error.to_string(), "belongs to another user");
        assert_eq!(fs::read(&entry).unwrap(), b"planted");
    }
}
