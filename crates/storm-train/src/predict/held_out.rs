//! The held-out data of predictions, and what measures losses on it.

use super::copies::Copies;
use super::int8::{Int8Plan, Int8Probe, ProbeDevice, model_of_probe, refused};
use super::probe::{Measured, Probe};
use super::write::Work;
use super::{PredictOptions, ProbeWeights};
use crate::{AnyBatch, TrainError, Trainer};
use storm_device::{DeviceError, MemoryRefused, PlanDevice};
use storm_exec::ExecError;
use storm_plan::{Idle, Tier};

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
    /// Commits the probe to its device if it has one.
    ///
    /// # Errors
    /// There is too little data or memory, or the model cannot be probed like this.
    pub(super) fn new(
        trainer: &mut Trainer<D>,
        copies: &mut Copies,
        work: &mut Work,
        options: &PredictOptions,
        [probe, check]: [Vec<AnyBatch>; 2],
        device: Option<ProbeDevice<D>>,
    ) -> Result<HeldOut<D>, TrainError> {
        let (probe, check) = (Probe::new(probe)?, Probe::new(check)?);
        let mut held_out = HeldOut { probe, check, int8: None };
        if options.probe_weights == ProbeWeights::Int8 {
            let device = device.ok_or_else(|| refused("takes a device for the probe"))?;
            held_out.add_int8(trainer, copies, work, device)?;
        }
        Ok(held_out)
    }

    /// Commits a probe in 8 bits, in memory of the trainer. The weights are in the reference copy meanwhile.
    fn add_int8(
        &mut self,
        trainer: &mut Trainer<D>,
        copies: &mut Copies,
        work: &mut Work,
        device: ProbeDevice<D>,
    ) -> Result<(), TrainError> {
        let model = model_of_probe(trainer.model())?;
        let ProbeDevice { profile, options, budget_bytes } = device;
        let micro_batches = self.probe.micro_batches().max(self.check.micro_batches());
        copies.reference.take(trainer)?;
        let committed = match trainer.release_idle(Idle::WithParameters)? {
            0 => Err(refused("takes a device that can release memory between steps")),
            released => Int8Plan::new(model, trainer, profile, micro_batches, released)
                .and_then(|plan| plan.commit(options)),
        };
        trainer.reclaim_idle()?;
        work.write_back(copies, trainer)?;
        self.int8 = Some(committed?);
        let in_use = self.memory_in_use(trainer)?;
        if in_use <= budget_bytes {
            return Ok(());
        }
        let refused = MemoryRefused {
            tier: Tier::DEVICE,
            wanted_bytes: in_use,
            available_bytes: Some(budget_bytes),
            reason: "beside a step, probe-weights = \"int8\" takes memory for the code and the workspace of its probe; \
                     leave it out, or allow more"
                .to_owned(),
        };
        Err(ExecError::from(DeviceError::from(refused)).into())
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
