//! Remembers the condition of checkpoints, so that retention counts only usable ones.

use super::manifest::{self, Manifest};
use super::source::Hashing;
use super::{Checkpoints, StatePart, StateTensor, Storage};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The condition of a checkpoint when it was last read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// This process wrote and flushed it, or read all of it and verified its hashes.
    Whole,
    /// It is damaged, unreadable or from another run.
    Unusable,
}

/// The checkpoints whose condition is known, by step.
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<BTreeMap<u64, Condition>>);

impl Known {
    pub(super) fn set(&self, step: u64, condition: Condition) {
        self.steps().insert(step, condition);
    }

    pub(super) fn forget(&self, step: u64) {
        self.steps().remove(&step);
    }

    fn get(&self, step: u64) -> Option<Condition> {
        self.steps().get(&step).copied()
    }

    fn steps(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Condition>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Storage> Checkpoints<S> {
    /// Whether a checkpoint is usable. Reads all of it if this process has neither written nor read it before,
    /// otherwise only its manifest.
    pub(super) fn is_whole(&self, step: u64, tensors: &[StateTensor], hashing: Hashing) -> bool {
        match self.known.get(step) {
            Some(Condition::Whole) => {
                let is_there = self.is_all_there(step);
                if !is_there {
                    self.known.set(step, Condition::Unusable);
                }
                is_there
            }
            Some(Condition::Unusable) => false,
            None => self.verify_by(step, tensors, hashing).is_ok(),
        }
    }

    /// Whether the manifest is intact and every file has the length it records.
    fn is_all_there(&self, step: u64) -> bool {
        let path = self.path(step);
        let Ok(manifest) = Manifest::read(&path.join(manifest::FILE_NAME)) else { return false };
        StatePart::ALL.iter().all(|part| {
            let entry = manifest.files.iter().find(|entry| entry.name == part.file_name());
            let Some(entry) = entry else { return !part.is_always_saved() };
            std::fs::metadata(path.join(part.file_name()))
                .is_ok_and(|found| found.is_file() && found.len() == entry.bytes)
        })
    }
}
