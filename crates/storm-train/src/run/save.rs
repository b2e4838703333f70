//! Saving in a run: starting checkpoints, waiting for them, and reporting them.

use super::{Event, Observer, Run, RunError};
use crate::{Begun, Keep, Saved, Snapshot, Storage, TrainError};
use std::time::Instant;
use storm_device::PlanDevice;

/// How long steps waited for a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Pause {
    /// In total.
    seconds: f64,
    /// Part of `seconds` spent waiting for the checkpoint before it.
    before_seconds: f64,
}

impl<D: PlanDevice, S: Storage> Run<D, S> {
    /// Allocates a snapshot in host memory. From now on, checkpoints are written from it while steps continue.
    ///
    /// # Errors
    /// There is not enough memory, or the run predicts: its checkpoints include copies that change during steps. Saving
    /// then continues as before.
    pub fn save_in_background(&mut self) -> Result<(), TrainError> {
        if self.predictor.is_some() {
            let problem = "steps of a run that predicts pause while a checkpoint is written";
            return Err(TrainError::Option { option: "save-mode", problem: problem.to_owned() });
        }
        self.saver.use_snapshot(Snapshot::new(&self.trainer)?);
        Ok(())
    }

    /// If all ranks share the checkpoint folder, each writes its own part from now on, while steps pause. Returns
    /// whether they do. Otherwise rank 0 collects the parts of the others.
    ///
    /// # Errors
    /// The folder is not writable, or a rank is gone.
    pub fn save_by_ranks(&mut self) -> Result<bool, TrainError> {
        // If this process is killed, the next one deletes what is left there.
        let folder = self.saver.checkpoints().beside(0, "partial");
        self.trainer.let_ranks_write(&folder)
    }

    /// Starts a checkpoint of the last step, after waiting for the one before it.
    pub(super) fn save(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        self.look_at_save(observer)?;
        let start = Instant::now();
        let must_wait = self.saver.writing().is_some();
        self.finish_save(observer)?;
        let before_seconds = if must_wait { start.elapsed().as_secs_f64() } else { 0.0 };
        let step = self.progress.step;
        observer.event(&Event::Saving { step })?;
        let best = self.progress.best.filter(|_| self.options.keep_best).map(|best| best.step);
        let keep = Keep { retention: self.options.retention, best };
        let begun = match &mut self.predictor {
            Some(predictor) => {
                let mut state = predictor.with_copies(&mut self.trainer);
                self.saver.save(&mut state, &self.progress, keep)?
            }
            None => self.saver.save(&mut self.trainer, &self.progress, keep)?,
        };
        self.pause = Pause { seconds: start.elapsed().as_secs_f64(), before_seconds };
        match begun {
            Begun::Saved(saved) => self.tell(&saved, observer),
            Begun::Writing => Ok(()),
        }
    }

    /// Reports the background checkpoint, if it is finished.
    pub(super) fn look_at_save(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let saved = self.saver.finished()?;
        saved.map_or(Ok(()), |saved| self.tell(&saved, observer))
    }

    /// Waits for the background checkpoint and reports it.
    pub(super) fn finish_save(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let saved = self.saver.wait()?;
        saved.map_or(Ok(()), |saved| self.tell(&saved, observer))
    }

    /// Like [`Run::finish_save`], for a run that is ending with another error, which is the one to return.
    pub(super) fn settle(&mut self, observer: &mut dyn Observer) {
        let Some(step) = self.saver.writing() else { return };
        if let Err(error) = self.finish_save(observer) {
            // If the observer fails as well, there is nowhere to report it.
            let _ = observer.event(&Event::SaveFailed { step, problem: &error.to_string() });
        }
    }

    fn tell(&mut self, saved: &Saved, observer: &mut dyn Observer) -> Result<(), RunError> {
        let Saved { step, ref path, seconds } = *saved;
        self.saved = Some(step);
        let Pause { seconds: pause_seconds, before_seconds } = self.pause;
        observer.event(&Event::Saved { step, path, seconds, pause_seconds, before_seconds })
    }
}
