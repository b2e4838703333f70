use super::ScratchError;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use storm_files::{FolderLock, LockError};

/// The name of scratch files. A run unlinks its file as soon as it has created it, so a file with
/// this name was left by a dead run.
pub(super) const FILE_NAME: &str = "storm.scratch";

/// A folder for scratch files, locked by this process until dropped.
#[derive(Debug)]
pub struct ScratchFolder {
    path: PathBuf,
    _lock: FolderLock,
    removed_bytes: Option<u64>,
}

impl ScratchFolder {
    /// Locks a folder, and removes a file that a killed process left in it.
    ///
    /// # Errors
    /// It is not a folder, is in memory, is in use, or is not writable.
    pub fn open(path: &Path) -> Result<ScratchFolder, ScratchError> {
        let folder = path.to_owned();
        if !path.is_dir() {
            return Err(ScratchError::NoFolder { folder });
        }
        if let Some(file_system) = in_memory(path) {
            return Err(ScratchError::InMemory { folder, file_system });
        }
        let lock = match FolderLock::acquire(path) {
            Ok(lock) => lock,
            Err(LockError::Held(holder)) => return Err(ScratchError::InUse { folder, holder }),
            Err(LockError::Io(error)) => return Err(ScratchError::Unwritable { folder, error }),
            Err(LockError::Unsupported(error)) => {
                return Err(ScratchError::Folder { what: "locking scratch space", folder, error });
            }
        };
        // The process that created it is dead, or it would still hold the lock.
        let left = path.join(FILE_NAME);
        let mut removed_bytes = None;
        if let Ok(found) = fs::symlink_metadata(&left) {
            if let Err(error) = fs::remove_file(&left) {
                let what = "removing the scratch file of a dead run";
                return Err(ScratchError::Folder { what, folder, error });
            }
            removed_bytes = Some(found.len());
        }
        Ok(ScratchFolder { path: folder, _lock: lock, removed_bytes })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size of the file that a dead run had left, if there was one.
    pub fn removed_bytes(&self) -> Option<u64> {
        self.removed_bytes
    }

    /// Free space for this user.
    ///
    /// # Errors
    /// The file system does not report it.
    pub fn available_bytes(&self) -> Result<u64, ScratchError> {
        let status = status(&self.path).ok_or_else(|| ScratchError::Folder {
            what: "asking for free space",
            folder: self.path.clone(),
            error: std::io::Error::last_os_error(),
        })?;
        Ok(status.f_bavail.saturating_mul(u64::try_from(status.f_bsize).unwrap_or(0)))
    }
}

/// The name of the file system if it keeps its files in memory only.
fn in_memory(path: &Path) -> Option<&'static str> {
    match status(path)?.f_type as u32 {
        0x0102_1994 => Some("tmpfs"),
        0x8584_58f6 => Some("ramfs"),
        _ => None,
    }
}

fn status(path: &Path) -> Option<libc::statfs> {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut status: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is NUL-terminated, and the kernel fills the structure.
    (unsafe { libc::statfs(path.as_ptr(), &mut status) } == 0).then_some(status)
}
