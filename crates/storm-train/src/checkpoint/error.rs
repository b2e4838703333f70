use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be saved or used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// No room left.
    #[error(
        "{}: the disk is full; free some space, or keep fewer checkpoints (keep-last, keep-every)",
        path.display()
    )]
    DiskFull {
        /// What could not be written.
        path: PathBuf,
    },
    /// Anything else that the file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It is not what was written.
    #[error("{} is damaged: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// There are checkpoints, and not one that a run could go on from.
    #[error(
        "none of the {count} checkpoints in {} can be used; put back a copy that is whole, or give \
         --begin-anew instead of --resume: that sets all of the run aside and begins with step 1",
        path.display()
    )]
    NoneUsable {
        /// Their folder.
        path: PathBuf,
        /// How many there are.
        count: usize,
    },
    /// It is whole, but of something else.
    #[error("{} belongs to another run: {problem}; name another run, or use its config", path.display())]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        problem: String,
    },
    /// It is newer than this program.
    #[error(
        "{} has format {format}, and this version of storm knows formats up to {known}; use a newer one",
        path.display()
    )]
    Newer {
        /// The manifest.
        path: PathBuf,
        /// Of the manifest.
        format: u32,
        /// The newest that this program reads.
        known: u32,
    },
}

impl CheckpointError {
    /// An error of the file system, with what was tried on what.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                CheckpointError::DiskFull { path }
            }
            _ => CheckpointError::Io { action, path, source },
        }
    }

    /// Whether an older checkpoint may help.
    pub fn is_damage(&self) -> bool {
        matches!(self, CheckpointError::Damaged { .. } | CheckpointError::Io { .. })
    }
}
