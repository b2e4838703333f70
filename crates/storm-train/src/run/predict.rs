//! Predictions in a run: the work between steps.

use super::{Observer, Run, RunError, StepEvent};
use crate::predict::{BackTo, Made, Predictor};
use crate::{AnyBatch, PredictOptions, PredictState, ProbeDevice, Storage, TrainError, Verified};
use storm_device::PlanDevice;

impl<D: PlanDevice, S: Storage> Run<D, S> {
    /// Turns predictions on. On resume, call this before [`Run::resume`]. One half of the held-out micro-batches
    /// chooses jumps by their loss, and the other half judges corrections; nothing else may train or evaluate on them.
    /// `device` is for losses with weights in 8 bits, see [`ProbeWeights`](crate::ProbeWeights).
    ///
    /// Allocates host memory for copies and returns its size, which is that of [`predict_bytes`](crate::predict_bytes).
    ///
    /// # Errors
    /// The options are invalid, there are too few micro-batches, or there is not enough memory.
    pub fn predict(
        &mut self,
        options: PredictOptions,
        mut held_out: Vec<AnyBatch>,
        device: Option<ProbeDevice<D>>,
    ) -> Result<u64, TrainError> {
        let check = held_out.split_off(held_out.len() / 2);
        let (steps, sets) = (self.options.steps, [held_out, check]);
        let predictor = Predictor::new(&mut self.trainer, options, steps, sets, device)?;
        self.progress.predict = Some(predictor.state());
        let bytes = predictor.size_bytes();
        self.predictor = Some(predictor);
        Ok(bytes)
    }

    /// Does the prediction work that is due after a step.
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

    /// Undoes the jumps before a step with a non-finite loss; false if there are none to undo.
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

    /// Restores the state of predictions from a checkpoint.
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
