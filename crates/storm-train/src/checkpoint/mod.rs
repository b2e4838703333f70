//! Checkpoints: everything that a run needs to go on as if nothing had happened, bit by bit.
//!
//! A checkpoint is a directory, `step-00000100`, of two safetensors files, up to three more for predictions, and a manifest
//! that has a hash of each. It is written under another name, flushed to disk, and renamed: under its own name it
//! is never half there. The hashes find what the disk damaged later; a run then goes on from the
//! checkpoint before.

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

/// What a name in the folder is that is no checkpoint: being written, being deleted, or out of the way
/// of a new one. What a process that was killed left of these is deleted by the next.
const UNFINISHED: [&str; 3] = ["partial", "deleting", "replaced"];

impl<S: Storage> Checkpoints<S> {
    /// Checkpoints in `root`, which is made if it is not there.
    ///
    /// # Errors
    /// From the file system.
    pub fn open(root: &Path, storage: S) -> Result<Checkpoints<S>, CheckpointError> {
        storage.create_directories(root).map_err(CheckpointError::io("create", root))?;
        Ok(Checkpoints::reading(root, storage))
    }

    /// Checkpoints in `root` to read: nothing is made there.
    pub fn reading(root: &Path, storage: S) -> Checkpoints<S> {
        Checkpoints { root: root.to_owned(), storage, known: Known::default() }
    }

    /// Steps that have a checkpoint, in order; whether it can be used is not looked at.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<u64> = self.names()?.iter().filter_map(|name| step_of(name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Where the checkpoint of a step is, if there is one.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(name_of(step))
    }

    /// Deletes what a killed process left half-done.
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
                // A name that is not Unicode is none of ours.
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
