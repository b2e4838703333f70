//! The file: space at once, no name, past the page cache if possible.

use super::folder::FILE_NAME;
use super::{ScratchError, ScratchFolder};
use crate::PageBuffer;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// What accesses are aligned to, in memory and in the file.
pub(super) const BLOCK_BYTES: usize = 4096;

/// How bytes get to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchPath {
    /// Past the page cache.
    Direct,
    /// Through the page cache, because the file system has no direct access. What is written stays there until the
    /// system writes it.
    PageCache,
}

/// For people: `O_DIRECT`.
impl fmt::Display for ScratchPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ScratchPath::Direct => "O_DIRECT",
            ScratchPath::PageCache => "the page cache (the file system has no O_DIRECT)",
        })
    }
}

/// Makes a file of this size without a name.
pub(super) fn create(
    folder: &ScratchFolder,
    bytes: u64,
) -> Result<(File, ScratchPath), ScratchError> {
    let refused = |what: &'static str, error: io::Error| ScratchError::Folder {
        what,
        folder: folder.path().to_owned(),
        error,
    };
    let file = open(folder, 0).map_err(|error| refused("making a scratch file", error))?;
    allocate(&file, bytes).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EFBIG | libc::EDQUOT) => {
            let available_bytes = folder.available_bytes().unwrap_or(0);
            let folder = folder.path().to_owned();
            ScratchError::Full { folder, wanted_bytes: bytes, available_bytes }
        }
        _ => refused("allocating a scratch file", error),
    })?;
    match direct(&file, bytes) {
        Ok(true) => Ok((file, ScratchPath::Direct)),
        Ok(false) => Ok((file, ScratchPath::PageCache)),
        Err(error) => Err(refused("opening a scratch file", error)),
    }
}

/// Makes an empty file and takes its name off, so that nothing is left however the process ends.
fn open(folder: &ScratchFolder, flags: i32) -> io::Result<File> {
    let path = folder.path().join(FILE_NAME);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = options.custom_flags(flags | libc::O_CLOEXEC | libc::O_NOFOLLOW).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let length = i64::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    if length == 0 {
        return Ok(());
    }
    loop {
        // SAFETY: the file is open; no memory is involved.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // The file system cannot allocate ahead: writing makes sure of the space.
            Some(libc::EOPNOTSUPP) => return fill(file, bytes),
            _ => return Err(error),
        }
    }
}

fn fill(file: &File, bytes: u64) -> io::Result<()> {
    let zeros = vec![0; 8 << 20];
    let mut at = 0;
    while at < bytes {
        let count = zeros.len().min((bytes - at) as usize);
        file.write_all_at(&zeros[..count], at)?;
        at += count as u64;
    }
    file.sync_data()
}

/// Turns direct access on if it works here: the blocks of some disks are larger, and some file systems have none.
fn direct(file: &File, bytes: u64) -> io::Result<bool> {
    let set = |flags: i32| {
        // SAFETY: the file is open; no memory is involved.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: as above.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    if set(flags | libc::O_DIRECT).is_err() {
        return Ok(false);
    }
    if bytes < BLOCK_BYTES as u64 {
        return Ok(true);
    }
    let mut block = PageBuffer::new(BLOCK_BYTES);
    let tried = file.read_at(block.as_mut_slice(), 0);
    match tried {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => set(flags).map(|()| false),
        Err(error) => Err(error),
    }
}
