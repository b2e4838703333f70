//! Checkpoints: everything a run needs to resume bit for bit as if it had never stopped.
//!
//! A checkpoint is a directory, `step-00000100`, with two safetensors files, more for predictions, and a manifest with
//! a hash of each. It is written under a temporary name, flushed to disk, and renamed, so that under its own name it is
//! always complete. The hashes detect later damage on disk; a run then resumes from the checkpoint before.

mod disk;
mod error;
mod keep;
mod known;
mod load;
mod manifest;
mod save;
mod saver;
mod shared_file;
mod snapshot;
mod source;
mod state;
mod tree;
mod weights;

pub use disk::{Disk, OutputFile, Storage};
pub use error::CheckpointError;
pub use keep::Retention;
pub use load::Verified;
pub use manifest::{Best, FileEntry, Progress};
pub use saver::{Begun, Keep, Saved, Saver};
pub(crate) use shared_file::{OwnPart, SharedFile};
pub use snapshot::Snapshot;
pub(crate) use snapshot::snapshot_bytes;
pub(crate) use state::{Base, state_tensors};
pub use state::{StatePart, StateTensor, TrainingState, checkpoint_bytes};
pub use weights::SavedWeights;

use known::Known;
use std::path::{Path, PathBuf};

/// The checkpoints of a run, in one folder.
#[derive(Debug)]
pub struct Checkpoints<S = Disk> {
    root: PathBuf,
    storage: S,
    known: Known,
}

/// Suffixes of folders that are not finished checkpoints: being written, being deleted, or moved out of the way of a
/// new one. The next process deletes what a killed one left.
const UNFINISHED: [&str; 3] = ["partial", "deleting", "replaced"];

impl<S: Storage> Checkpoints<S> {
    /// Opens the checkpoints in `root`, and creates the folder if it does not exist.
    ///
    /// # Errors
    /// From the file system.
    pub fn open(root: &Path, storage: S) -> Result<Checkpoints<S>, CheckpointError> {
        storage.create_directories(root).map_err(CheckpointError::io("create", root))?;
        Ok(Checkpoints::reading(root, storage))
    }

    /// Opens the checkpoints in `root` for reading; creates nothing.
    pub fn reading(root: &Path, storage: S) -> Checkpoints<S> {
        Checkpoints { root: root.to_owned(), storage, known: Known::default() }
    }

    /// The steps that have a checkpoint, in order. Does not check that they are usable.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<u64> = self.names()?.iter().filter_map(|name| step_of(name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The path of a step's checkpoint, whether or not it exists.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(name_of(step))
    }

    /// Deletes unfinished folders that a killed process left.
    ///
    /// # Errors
    /// From the file system.
    pub fn remove_unfinished(&self) -> Result<(), CheckpointError> {
        for name in self.names()? {
            let is_ours = name.rsplit_once('.').is_some_and(|(step, suffix)| {
                UNFINISHED.contains(&suffix) && step_of(step).is_some()
            });
            if is_ours {
                let path = self.root.join(name);
                self.storage.remove_tree(&path).map_err(CheckpointError::io("delete", &path))?;
            }
        }
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let list = || -> std::io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in std::fs::read_dir(&self.root)? {
                // Checkpoint names are Unicode, so skip all others.
                names.extend(entry?.file_name().into_string());
            }
            Ok(names)
        };
        list().map_err(CheckpointError::io("list", &self.root))
    }
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (name_of(step) == name).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_steps_and_back() {
        for step in [0, 7, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(step_of(&name_of(step)), Some(step));
        }
        for name in ["step-1", "step-00000001.partial", "step-", "step--0000001", "best"] {
            assert_eq!(step_of(name), None, "{name}");
        }
    }
}
