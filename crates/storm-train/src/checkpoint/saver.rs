//! Saving beside the steps of a run: a thread writes what a snapshot holds, one checkpoint at a time.

use super::source::Hashing;
use super::{CheckpointError, Checkpoints, Progress, Retention, Snapshot, Storage, TrainingState};
use crate::TrainError;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Saves the checkpoints of a run, and deletes those that need not stay.
///
/// With a snapshot, steps wait only while it is filled; a checkpoint counts as saved when
/// [`Saver::finished`] or [`Saver::wait`] has said so. Without, they wait until it is on the disk.
#[derive(Debug)]
pub struct Saver<S> {
    checkpoints: Arc<Checkpoints<S>>,
    way: Way,
}

#[derive(Debug)]
enum Way {
    Pause,
    Background(Snapshot),
    Writing(Writing),
}

/// A checkpoint that is being written.
#[derive(Debug)]
struct Writing {
    step: u64,
    thread: JoinHandle<(Snapshot, Result<Saved, CheckpointError>)>,
}

/// A checkpoint that is on the disk to stay.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// Its step.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// From the first byte read to the last one deleted of what need not stay.
    pub seconds: f64,
}

/// What became of a save that was asked for.
#[derive(Debug)]
pub enum Begun {
    /// It is on the disk.
    Saved(Saved),
    /// It is being written.
    Writing,
}

/// What stays beside a new checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// By age and number.
    pub retention: Retention,
    /// The step of the best one, if that stays.
    pub best: Option<u64>,
}

impl<S: Storage> Saver<S> {
    /// Steps wait for every checkpoint.
    pub fn new(checkpoints: Checkpoints<S>) -> Saver<S> {
        Saver { checkpoints: Arc::new(checkpoints), way: Way::Pause }
    }

    /// From now on, checkpoints of the state that this is a snapshot of are written in the background.
    pub fn use_snapshot(&mut self, snapshot: Snapshot) {
        self.way = Way::Background(snapshot);
    }

    /// Where they are.
    pub fn checkpoints(&self) -> &Checkpoints<S> {
        &self.checkpoints
    }

    /// Begins a checkpoint, or makes it, where there is no snapshot. What was being written must have
    /// been waited for.
    ///
    /// # Errors
    /// From the device or the disk; checkpoints before are as they were.
    ///
    /// # Panics
    /// A checkpoint is being written.
    pub fn save(
        &mut self,
        state: &mut impl TrainingState,
        progress: &Progress,
        keep: Keep,
    ) -> Result<Begun, TrainError> {
        let begun = Instant::now();
        let mut snapshot = match std::mem::replace(&mut self.way, Way::Pause) {
            Way::Background(snapshot) => snapshot,
            Way::Writing(_) => panic!("wait for the checkpoint before"),
            Way::Pause => {
                let path = self.checkpoints.save(state, progress)?;
                self.checkpoints.keep(keep, &state.tensors())?;
                let seconds = begun.elapsed().as_secs_f64();
                return Ok(Begun::Saved(Saved { step: progress.step, path, seconds }));
            }
        };
        if let Err(error) = snapshot.take(state) {
            self.way = Way::Background(snapshot);
            return Err(error);
        }
        let (checkpoints, step) = (Arc::clone(&self.checkpoints), progress.step);
        let progress = progress.clone();
        let write = move || {
            let written = checkpoints.save_snapshot(&snapshot, &progress).and_then(|path| {
                checkpoints.keep_by(keep, snapshot.tensors(), Hashing::OneCore)?;
                Ok(Saved { step, path, seconds: begun.elapsed().as_secs_f64() })
            });
            (snapshot, written)
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        let path = self.checkpoints.path(step);
        let thread = thread.map_err(CheckpointError::io("start a thread to write", &path))?;
        self.way = Way::Writing(Writing { step, thread });
        Ok(Begun::Writing)
    }

    /// The checkpoint that was being written, if it is on the disk now.
    ///
    /// # Errors
    /// From the disk; checkpoints before are as they were.
    pub fn finished(&mut self) -> Result<Option<Saved>, CheckpointError> {
        match &self.way {
            Way::Writing(writing) if writing.thread.is_finished() => self.wait(),
            _ => Ok(None),
        }
    }

    /// Waits for the checkpoint that is being written, if there is one.
    ///
    /// # Errors
    /// From the disk; checkpoints before are as they were.
    pub fn wait(&mut self) -> Result<Option<Saved>, CheckpointError> {
        match std::mem::replace(&mut self.way, Way::Pause) {
            Way::Writing(Writing { thread, .. }) => {
                let joined = thread.join();
                let (snapshot, written) =
                    joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                self.way = Way::Background(snapshot);
                written.map(Some)
            }
            other => {
                self.way = other;
                Ok(None)
            }
        }
    }

    /// The step of the checkpoint that is being written.
    pub fn writing(&self) -> Option<u64> {
        match &self.way {
            Way::Writing(writing) => Some(writing.step),
            _ => None,
        }
    }
}
