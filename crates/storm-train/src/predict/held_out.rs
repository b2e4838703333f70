//! The held-out data of predictions, and what measures losses on it.

use super::copies::Copies;
use super::int8::{Int8Plan, Int8Probe, ProbeDevice};
use super::probe::{Measured, Probe};
use super::{PredictOptions, ProbeWeights};
use crate::{AnyBatch, TrainError, Trainer};
use storm_device::PlanDevice;
use storm_exec::ExecError;
use storm_plan::Idle;

/// Held-out data to measure losses on.
pub(super) struct HeldOut<D: PlanDevice> {
    /// For jumps.
    probe: Probe,
    /// For corrections. Separate, because jumps are selected on `probe`.
    check: Probe,
    /// `None` if the trainer measures losses with its own weights.
    pub(super) int8: Option<Int8Probe<D>>,
}

impl<D: PlanDevice> HeldOut<D> {
    /// Commits the probe to its device if it has one. The weights are in the undo copy meanwhile.
    ///
    /// # Errors
    /// There is too little data, or the model cannot be probed like this.
    pub(super) fn new(
        trainer: &mut Trainer<D>,
        copies: &mut Copies,
        options: &PredictOptions,
        [probe, check]: [Vec<AnyBatch>; 2],
        device: Option<ProbeDevice<D>>,
    ) -> Result<HeldOut<D>, TrainError> {
        let (probe, check) = (Probe::new(probe)?, Probe::new(check)?);
        let int8 = match (options.probe_weights, device) {
            (ProbeWeights::AsTrained, _) => None,
            (ProbeWeights::Int8, Some(ProbeDevice { profile, options })) => {
                let micro_batches = probe.micro_batches().max(check.micro_batches());
                let plan = Int8Plan::new(trainer, profile, micro_batches)?;
                copies.undo.take(trainer)?;
                trainer.release_idle(Idle::WithParameters)?;
                let int8 = plan.commit(options);
                trainer.reclaim_idle()?;
                copies.restore_weights(trainer)?;
                Some(int8?)
            }
            (ProbeWeights::Int8, None) => {
                let problem = "probe-weights = \"int8\" takes a device for the probe".to_owned();
                return Err(TrainError::Option { option: "predict", problem });
            }
        };
        Ok(HeldOut { probe, check, int8 })
    }

    /// The losses that choose jumps.
    pub(super) fn of_jumps(&mut self, trainer: &mut Trainer<D>) -> Result<Measured, TrainError> {
        self.probe.measure(trainer, self.int8.as_mut())
    }

    /// The losses that judge corrections.
    pub(super) fn of_corrections(
        &mut self,
        trainer: &mut Trainer<D>,
    ) -> Result<Measured, TrainError> {
        self.check.measure(trainer, self.int8.as_mut())
    }

    /// The probe that losses for jumps are compared on.
    pub(super) fn probe(&self) -> &Probe {
        &self.probe
    }

    /// Device memory in use.
    pub(super) fn memory_in_use(&self, trainer: &Trainer<D>) -> Result<u64, TrainError> {
        Ok(match &self.int8 {
            Some(int8) => trainer.device().memory_in_use_with(int8.device()),
            None => trainer.device().memory_in_use_bytes(),
        }
        .map_err(ExecError::from)?)
    }
}
