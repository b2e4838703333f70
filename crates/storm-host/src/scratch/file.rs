//! The scratch file: unnamed, preallocated, opened with O_DIRECT if possible.

use super::folder::FILE_NAME;
use super::{ScratchError, ScratchFolder, ScratchWay};
use crate::PageBuffer;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// Alignment of accesses, in memory and in the file.
pub(super) const BLOCK_BYTES: usize = 4096;

/// Creates an unnamed file of this size. Also returns whether it uses O_DIRECT.
pub(super) fn create(
    folder: &ScratchFolder,
    bytes: u64,
    way: ScratchWay,
) -> Result<(File, bool), ScratchError> {
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
    if way == ScratchWay::PageCache {
        return Ok((file, false));
    }
    match direct(&file, bytes) {
        Ok(is_direct) => Ok((file, is_direct)),
        Err(error) => Err(refused("opening a scratch file", error)),
    }
}

/// Creates an empty file and unlinks it, so nothing is left however the process ends.
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
        // SAFETY: the file is open. No memory is involved.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // The file system cannot preallocate. Writing zeros reserves the space.
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

/// Turns on O_DIRECT if it works here. Some disks have larger blocks, and some file systems do not
/// support it.
fn direct(file: &File, bytes: u64) -> io::Result<bool> {
    let set = |flags: i32| {
        // SAFETY: the file is open. No memory is involved.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    if !is_fit(alignment(file)) {
        return Ok(false);
    }
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

/// The alignment that O_DIRECT requires in memory and in the file, or 0 if it is not supported.
/// `None` before Linux 6.1 and on file systems that do not report it.
fn alignment(file: &File) -> Option<usize> {
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    let (this, mask) = (c"".as_ptr(), libc::STATX_DIOALIGN);
    // SAFETY: the file is open, the path is NUL-terminated, and the kernel fills the structure.
    let code =
        unsafe { libc::statx(file.as_raw_fd(), this, libc::AT_EMPTY_PATH, mask, &mut found) };
    let is_known = code == 0 && found.stx_mask & mask != 0;
    is_known.then(|| found.stx_dio_mem_align.max(found.stx_dio_offset_align) as usize)
}

/// Whether whole blocks are sufficiently aligned, as far as is known.
fn is_fit(alignment: Option<usize>) -> bool {
    alignment.is_none_or(|alignment| (1..=BLOCK_BYTES).contains(&alignment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_access_is_for_blocks_that_are_small_enough() {
        assert!([None, Some(1), Some(512), Some(4096)].into_iter().all(is_fit));
        // Unsupported, and larger blocks.
        assert!(![Some(0), Some(8192), Some(65_536)].into_iter().any(is_fit));
    }
}
