//! Predictions in a run: what happens between steps.

use super::{Observer, Run, RunError, StepEvent};
use crate::predict::{BackTo, Made, Predictor};
use crate::{AnyBatch, PredictOptions, PredictState, Storage, TrainError, Verified};
use storm_device::PlanDevice;

impl<D: PlanDevice, S: Storage> Run<D, S> {
    /// Predicts from now on; a run that resumes is told so first. Jumps are chosen by the losses of one half of the held-out
    /// micro-batches and corrections judged by those of the other; nothing else may be trained or evaluated on them.
    /// Takes host memory for its copies and says how much: that of [`predict_bytes`](crate::predict_bytes).
    ///
    /// # Errors
    /// Options make no sense, there are too few micro-batches, or there is no memory.
    pub fn predict(
        &mut self,
        options: PredictOptions,
        mut held_out: Vec<AnyBatch>,
    ) -> Result<u64, TrainError> {
        let check = held_out.split_off(held_out.len() / 2);
        let steps = self.options.steps;
        let predictor = Predictor::new(&self.trainer, options, steps, [held_out, check])?;
        self.progress.predict = Some(predictor.state());
        let bytes = predictor.size_bytes();
        self.predictor = Some(predictor);
        Ok(bytes)
    }

    /// Does what is due after a step.
    pub(super) fn look_at_predictions(
        &mut self,
        event: StepEvent,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let Some(predictor) = &mut self.predictor else { return Ok(()) };
        let made = Made {
            step: self.progress.step,
            event,
            steps_left: self.options.steps - self.progress.step,
            data: &self.progress.data,
        };
        let back_to = predictor.after_step(&mut self.trainer, &made, observer)?;
        self.progress.predict = Some(predictor.state());
        self.go_back(back_to);
        Ok(())
    }

    /// Undoes jumps after which a step has no finite loss; false if there are none to undo.
    pub(super) fn recover(
        &mut self,
        step: u64,
        observer: &mut dyn Observer,
    ) -> Result<bool, RunError> {
        let Some(predictor) = &mut self.predictor else { return Ok(false) };
        if self.trainer.is_partly_updated() {
            return Ok(false);
        }
        let back_to = predictor.after_bad_step(&mut self.trainer, step, observer)?;
        self.progress.predict = Some(predictor.state());
        let is_back = back_to.is_some();
        self.go_back(back_to);
        Ok(is_back)
    }

    fn go_back(&mut self, back_to: Option<BackTo>) {
        if let Some(BackTo { updates, data }) = back_to {
            (self.progress.updates, self.progress.data) = (updates, data);
        }
    }

    /// Puts predictions back where a checkpoint has them.
    pub(super) fn restore_predictions(&mut self, verified: &Verified) -> Result<(), RunError> {
        let other = |problem: &str| {
            let problem = format!(
                "{} {problem}; go on as the run began, or give another --name",
                verified.path().display()
            );
            RunError::from(TrainError::Option { option: "predict", problem })
        };
        let saved: Option<&PredictState> = verified.progress().predict.as_ref();
        match (&mut self.predictor, saved) {
            (None, None) => Ok(()),
            (Some(predictor), Some(saved)) => {
                predictor.resume(saved, verified)?;
                Ok(predictor.restart_updates(&mut self.trainer)?)
            }
            (None, Some(_)) => Err(other("is of a run that predicts, and this one does not")),
            (Some(_), None) => Err(other("is of a run that does not predict, and this one does")),
        }
    }
}
