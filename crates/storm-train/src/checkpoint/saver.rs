//! Saves checkpoints while a run continues: a thread writes a snapshot, one checkpoint at a time.

use super::source::Hashing;
use super::{CheckpointError, Checkpoints, Progress, Retention, Snapshot, Storage, TrainingState};
use crate::TrainError;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Saves the checkpoints of a run, and deletes those not kept.
///
/// With a snapshot, steps pause only while it is filled; a checkpoint counts as saved once [`Saver::finished`] or
/// [`Saver::wait`] returns it. Without one, steps pause until the checkpoint is on disk.
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

/// A checkpoint being written.
#[derive(Debug)]
struct Writing {
    step: u64,
    thread: JoinHandle<(Snapshot, Result<Saved, CheckpointError>)>,
}

/// A checkpoint that is durable on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// Its step.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Time from the first byte read until the checkpoints not kept are deleted.
    pub seconds: f64,
}

/// The result of starting a save.
#[derive(Debug)]
pub enum Begun {
    /// It is on the disk.
    Saved(Saved),
    /// It is being written.
    Writing,
}

/// Which checkpoints to keep besides a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// By age and number.
    pub retention: Retention,
    /// The step of the best checkpoint, if it is to be kept.
    pub best: Option<u64>,
}

impl<S: Storage> Saver<S> {
    /// Pauses steps for every checkpoint.
    pub fn new(checkpoints: Checkpoints<S>) -> Saver<S> {
        Saver { checkpoints: Arc::new(checkpoints), way: Way::Pause }
    }

    /// Writes checkpoints in the background from now on, through this snapshot.
    pub fn use_snapshot(&mut self, snapshot: Snapshot) {
        self.way = Way::Background(snapshot);
    }

    /// The checkpoints it writes.
    pub fn checkpoints(&self) -> &Checkpoints<S> {
        &self.checkpoints
    }

    /// Starts a checkpoint, or, without a snapshot, writes all of it. The caller must have waited for an earlier one.
    ///
    /// # Errors
    /// From the device or the disk. Earlier checkpoints are unchanged.
    ///
    /// # Panics
    /// A checkpoint is still being written.
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

    /// The background checkpoint, if it has just been finished.
    ///
    /// # Errors
    /// From the disk. Earlier checkpoints are unchanged.
    pub fn finished(&mut self) -> Result<Option<Saved>, CheckpointError> {
        match &self.way {
            Way::Writing(writing) if writing.thread.is_finished() => self.wait(),
            _ => Ok(None),
        }
    }

    /// Waits for the background checkpoint, if there is one.
    ///
    /// # Errors
    /// From the disk. Earlier checkpoints are unchanged.
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

    /// The step of the checkpoint being written.
    pub fn writing(&self) -> Option<u64> {
        match &self.way {
            Way::Writing(writing) => Some(writing.step),
            _ => None,
        }
    }
}
