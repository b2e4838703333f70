use super::{BatchSource, Event, Observer, Run, RunError};
use crate::{Best, Losses, MicroBatch, Storage};
use std::ops::Range;
use std::time::Instant;
use storm_device::PlanDevice;

impl<D: PlanDevice, S: Storage> Run<D, S> {
    /// Evaluates on the held-out data, always the same part of it. Returns whether this is the best
    /// evaluation so far.
    pub(super) fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<bool, RunError> {
        let Some(mut held_out) = self.held_out.take() else { return Ok(false) };
        let start = Instant::now();
        let beginning = held_out.position();
        let losses = self.losses(&mut *held_out, self.options.evaluation_steps)?;
        held_out.resume(&beginning)?;
        self.held_out = Some(held_out);
        let Some(loss) = losses.loss() else { return Err(RunError::NothingHeldOut) };
        let (step, accuracy) = (self.progress.step, losses.accuracy());
        // A non-finite loss is never the best.
        let is_best = loss.is_finite() && self.progress.best.is_none_or(|best| loss < best.loss);
        if is_best {
            self.progress.best = Some(Best { step, loss });
            self.progress.evaluations_without_gain = 0;
        } else {
            self.progress.evaluations_without_gain += 1;
        }
        let seconds = start.elapsed().as_secs_f64();
        observer.event(&Event::Evaluated { step, loss, accuracy, is_best, seconds })?;
        if let Some(viewer) = &mut self.viewer {
            let start = Instant::now();
            let guesses = viewer.look(&mut self.trainer)?;
            let seconds = start.elapsed().as_secs_f64();
            observer.event(&Event::Viewed { step, guesses: &guesses, seconds })?;
        }
        Ok(is_best)
    }

    /// Measures the loss on held-out rows that evaluations do not read, and reports it as [`Event::Tested`]. `data` is
    /// at the first of these rows. They are whole steps of rows, or all rows to the end of the data. Neither the run
    /// nor its checkpoints depend on it.
    ///
    /// # Errors
    /// The data has no targets, or from data, device or observer.
    pub fn test(
        &mut self,
        data: &mut dyn BatchSource,
        rows: Range<u64>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let start = Instant::now();
        let step_rows = (self.batches.len() * self.trainer.options().batch) as u64;
        let losses = self.losses(data, (rows.end - rows.start).div_ceil(step_rows))?;
        let Some(loss) = losses.loss() else { return Err(RunError::NothingToTest) };
        let (step, accuracy) = (self.progress.step, losses.accuracy());
        let (rows, seconds) = ([rows.start, rows.end], start.elapsed().as_secs_f64());
        observer.event(&Event::Tested { step, rows, loss, accuracy, seconds })
    }

    /// The losses on the next data, as much as this many training steps read or all that is left.
    fn losses(&mut self, data: &mut dyn BatchSource, steps: u64) -> Result<Losses, RunError> {
        let mut losses = Losses::default();
        for _ in 0..steps {
            let mut rows = 0;
            for batch in &mut self.batches {
                rows += data.next_batch(batch)?;
            }
            if rows == 0 {
                break;
            }
            let valid: usize = self.batches.iter().map(MicroBatch::counted).sum();
            if valid == 0 {
                // No target counts here, but later batches may have some.
                continue;
            }
            losses.add(self.trainer.evaluate(&self.batches)?, valid);
        }
        Ok(losses)
    }
}
