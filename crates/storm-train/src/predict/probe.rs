//! A fixed set of held-out micro-batches to measure losses on.

use super::int8::Int8Probe;
use super::paired::{Change, change};
use crate::{AnyBatch, MicroBatch, TrainError, Trainer};
use storm_device::PlanDevice;

/// Held-out micro-batches.
#[derive(Debug)]
pub(super) struct Probe {
    batches: Vec<AnyBatch>,
    /// Each micro-batch's fraction of all targets.
    shares: Vec<f64>,
}

/// Losses per micro-batch: the sum over its targets, divided by the number of all targets.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Measured(Vec<f32>);

impl Measured {
    /// Mean over all targets.
    pub(super) fn loss(&self) -> f64 {
        self.0.iter().map(|&loss| f64::from(loss)).sum()
    }
}

impl Probe {
    /// # Errors
    /// Fewer than two micro-batches have targets, so the noise cannot be estimated.
    pub(super) fn new(mut batches: Vec<AnyBatch>) -> Result<Probe, TrainError> {
        batches.retain(|batch| batch.counted() > 0);
        if batches.len() < 2 {
            let problem = format!(
                "the probe has {} micro-batches with targets, and its noise takes at least 2; give more probe-batches, or \
                 hold more of the data out",
                batches.len()
            );
            return Err(TrainError::Option { option: "predict", problem });
        }
        let targets: usize = batches.iter().map(MicroBatch::counted).sum();
        let shares = batches.iter().map(|batch| batch.counted() as f64 / targets as f64).collect();
        Ok(Probe { batches, shares })
    }

    /// How many there are.
    pub(super) fn micro_batches(&self) -> usize {
        self.batches.len()
    }

    /// The losses at the current weights of the trainer, or of a probe of its own.
    pub(super) fn measure<D: PlanDevice>(
        &self,
        trainer: &mut Trainer<D>,
        int8: Option<&mut Int8Probe<D>>,
    ) -> Result<Measured, TrainError> {
        let mut losses = vec![0.0; self.batches.len()];
        match int8 {
            Some(int8) => int8.measure(&self.batches, &mut losses)?,
            None => drop(trainer.evaluate_each(&self.batches, &mut losses)?),
        }
        Ok(Measured(losses))
    }

    pub(super) fn change(&self, before: &Measured, after: &Measured) -> Change {
        change(&before.0, &after.0, &self.shares)
    }
}
