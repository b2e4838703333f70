use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be saved or used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk is full.
    #[error(
        "{}: the disk is full; free some space, or keep fewer checkpoints (keep-last, keep-every)",
        path.display()
    )]
    DiskFull {
        /// The file that could not be written.
        path: PathBuf,
    },
    /// Any other file system error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation.
        action: &'static str,
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A checkpoint does not match its manifest.
    #[error("{} is damaged: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Checkpoints exist, but a run can resume from none of them.
    #[error(
        "none of the {count} checkpoints in {} can be used; put back a copy that is whole, or give \
         --begin-anew instead of --resume: that sets all of the run aside and begins with step 1",
        path.display()
    )]
    NoneUsable {
        /// The folder of the checkpoints.
        path: PathBuf,
        /// How many there are.
        count: usize,
    },
    /// The checkpoint is intact, but belongs to another run.
    #[error("{} belongs to another run: {problem}; name another run, or use its config", path.display())]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        problem: String,
    },
    /// The checkpoint is newer than this program.
    #[error(
        "{} has format {format}, and this version of storm knows formats up to {known}; use a newer one",
        path.display()
    )]
    Newer {
        /// The manifest.
        path: PathBuf,
        /// The format of the manifest.
        format: u32,
        /// The newest format this program reads.
        known: u32,
    },
}

impl CheckpointError {
    /// Wraps a file system error with the operation and its path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                CheckpointError::DiskFull { path }
            }
            _ => CheckpointError::Io { action, path, source },
        }
    }

    /// Whether an older checkpoint may still work.
    pub fn is_damage(&self) -> bool {
        matches!(self, CheckpointError::Damaged { .. } | CheckpointError::Io { .. })
    }
}
