//! Measures losses with matrices in 8 bits: a forward-only plan, on a device that has memory only
//! while the step's plan has released its own.

use super::copies::{CHUNK, PIECE_ELEMENTS, Weight};
use super::write::Destination;
use crate::evaluation::{Evaluation, evaluation_task};
use crate::{AnyBatch, MicroBatch, TrainError, TrainOptions, Trainer};
use half::bf16;
use rayon::prelude::*;
use std::sync::Arc;
use storm_device::cpu::kernels::quantized::quantize;
use storm_device::{PlanDevice, bytes_of};
use storm_graph::{Program, QuantizedFormat, QuantizedRow, Training};
use storm_model::{AnyModel, BaseFormat, BuildOptions, ModelConfig};
use storm_plan::{Budget, CheckedPlan, Forced, HardwareProfile, Idle, PlanError, plan};

/// The device of probes in 8 bits.
pub struct ProbeDevice<D: PlanDevice> {
    /// The speeds of the machine, for the plan of the probe.
    pub profile: HardwareProfile,
    /// How to open it. It must be able to release [`Idle::WithParameters`], and so must the device of the run.
    pub options: D::Options,
    /// Device memory that both devices may have in use together.
    pub budget_bytes: u64,
}

/// Micro-batches that pass through the weights together, at most.
const TOGETHER_MAX: usize = 32;

/// Host memory of a probe's plan beside weights and inputs.
const HOST_BYTES: usize = 1 << 20;

/// Alignment of tensors in host memory, at most.
const HOST_ALIGNMENT: usize = 4096;

/// Buffers for a piece of a weight: its values and its rows.
const WORK_BYTES: usize = PIECE_ELEMENTS * (size_of::<f32>() + 4);

/// Columns that a row of 8 bits takes memory for, at least.
const COLUMNS_MIN: usize = 16;

pub(super) fn refused(problem: &str) -> TrainError {
    let problem = format!("probe-weights = \"int8\" {problem}");
    TrainError::Option { option: "predict", problem }
}

/// The model as the probe reads it.
pub(super) fn model_of_probe(model: Option<&AnyModel>) -> Result<AnyModel, TrainError> {
    match model {
        Some(AnyModel::Language(config)) if config.adapters.is_some() => Err(refused(
            "is for weights that are trained; with adapters, base = \"int8\" keeps the others in 8 bits in steps and in \
             probes",
        )),
        Some(AnyModel::Language(config)) => {
            let base = BaseFormat::Quantized(QuantizedFormat::Int8);
            Ok(ModelConfig { base, ..(**config).clone() }.into())
        }
        Some(AnyModel::Image(_)) => Err(refused(
            "is for language models; the matrices of image classifiers have no form in 8 bits",
        )),
        None => Err(refused("takes a model with a config; this is a program without one")),
    }
}

/// Host memory of a probe, at most.
///
/// # Errors
/// The model cannot be probed in 8 bits.
pub(super) fn int8_bytes(model: &AnyModel, options: &TrainOptions) -> Result<u64, TrainError> {
    let model = model_of_probe(Some(model))?;
    let task = evaluation_task(model, &options.build_options(), 1)?;
    Ok((plan_host_bytes(&task.forward) + WORK_BYTES) as u64)
}

/// Host memory of the plan, at most: all weights, if they are not on the device.
fn plan_host_bytes(program: &Program) -> usize {
    let aligned = |bytes: usize| bytes.next_multiple_of(HOST_ALIGNMENT);
    let instances = program.parameter_instances();
    let weights = instances.iter().map(|instance| &instance.parameter);
    let weights =
        weights.map(|weight| aligned(weight.shape.elements() * weight.dtype.size_bytes()));
    let inputs = program.inputs().into_iter().map(|input| aligned(input.size_bytes()));
    weights.sum::<usize>() + TOGETHER_MAX * inputs.sum::<usize>() + HOST_BYTES
}

/// A probe in 8 bits that has no device yet.
pub(super) struct Int8Plan {
    model: AnyModel,
    options: BuildOptions,
    plan: Arc<CheckedPlan>,
    rows: Vec<Option<QuantizedRow>>,
    host_bytes: u64,
}

/// A probe in 8 bits.
pub(super) struct Int8Probe<D: PlanDevice> {
    evaluation: Evaluation<D>,
    /// How the rows of each weight are stored. `None` for those that are stored as in training.
    rows: Vec<Option<QuantizedRow>>,
    values: Vec<f32>,
    packed: Vec<u8>,
    host_bytes: u64,
}

impl Int8Plan {
    /// Plans the probe of this model within the device memory that the trainer has released.
    ///
    /// # Errors
    /// The probe does not fit.
    pub(super) fn new<D: PlanDevice>(
        model: AnyModel,
        trainer: &Trainer<D>,
        profile: HardwareProfile,
        micro_batches: usize,
        released_bytes: u64,
    ) -> Result<Int8Plan, TrainError> {
        let instances = trainer.instances();
        // Released parameters are written again from copies, which have those that are trained.
        let mut parameters = instances.iter().map(|instance| &instance.parameter);
        assert!(
            parameters.all(|parameter| parameter.training == Training::Trainable),
            "a language model without adapters trains all parameters"
        );
        let options = trainer.options().build_options();
        let task = evaluation_task(model.clone(), &options, micro_batches.clamp(1, TOGETHER_MAX))?;
        let host_bytes = plan_host_bytes(&task.forward);
        // The overhead is there already.
        let profile = HardwareProfile { overhead_bytes: 0, ..profile };
        let budget = Budget::new(released_bytes, host_bytes as u64);
        let planned = plan(&task, &profile, budget, &Forced::default());
        let planned = planned.map_err(|error| match error {
            PlanError::TooSmall(_) => {
                refused(&format!("does not fit into the device memory that steps release: {error}"))
            }
            error => error.into(),
        })?;
        let rows = instances.iter().map(|i| task.forward.quantized_rows(&i.parameter.name));
        Ok(Int8Plan {
            rows: rows.collect(),
            plan: planned.plan.into(),
            host_bytes: (host_bytes + WORK_BYTES) as u64,
            model,
            options,
        })
    }

    /// Commits the plan to a device, which then releases its memory. The trainer has released
    /// [`Idle::WithParameters`].
    ///
    /// # Errors
    /// From the device.
    pub(super) fn commit<D: PlanDevice>(
        self,
        device: D::Options,
    ) -> Result<Int8Probe<D>, TrainError> {
        let Int8Plan { model, options, plan, rows, host_bytes } = self;
        let evaluation = Evaluation::commit(&model, &options, plan, device)?;
        let (values, packed) = (Vec::new(), Vec::new());
        let mut probe = Int8Probe { evaluation, rows, values, packed, host_bytes };
        probe.release()?;
        Ok(probe)
    }
}

impl<D: PlanDevice> Int8Probe<D> {
    /// Its host memory, at most.
    pub(super) fn host_bytes(&self) -> u64 {
        self.host_bytes
    }

    /// Releases all device memory. The weights are lost.
    pub(super) fn release(&mut self) -> Result<(), TrainError> {
        self.evaluation.planned().release_idle(Idle::WithParameters)?;
        Ok(())
    }

    /// Reclaims the memory. Weights must be written before losses are measured.
    pub(super) fn reclaim(&mut self) -> Result<(), TrainError> {
        Ok(self.evaluation.planned().reclaim_idle()?)
    }

    /// The losses of these batches, each divided by the targets of all of them.
    pub(super) fn measure(
        &mut self,
        batches: &[AnyBatch],
        losses: &mut [f32],
    ) -> Result<(), TrainError> {
        let targets = batches.iter().map(MicroBatch::counted).sum();
        let together = self.evaluation.micro_batches();
        let mut parts = batches.chunks(together).zip(losses.chunks_mut(together));
        parts.try_for_each(|(batches, losses)| self.evaluation.each(batches, targets, losses))
    }

    /// The device of the probe.
    pub(super) fn device(&self) -> &D {
        self.evaluation.device()
    }
}

impl<D: PlanDevice> Destination for Int8Probe<D> {
    /// Whole rows.
    fn piece_elements(&self, number: usize) -> usize {
        match self.rows[number] {
            Some(form) => (PIECE_ELEMENTS / form.columns.max(COLUMNS_MIN)).max(1) * form.columns,
            None => PIECE_ELEMENTS,
        }
    }

    /// Masters are not part of the probe.
    fn write(
        &mut self,
        number: usize,
        weight: &Weight,
        first: usize,
        parameter: &[u8],
        _: &[u8],
    ) -> Result<(), TrainError> {
        let planned = self.evaluation.planned();
        let size = weight.form.parameter_bytes();
        let Some(form) = self.rows[number] else {
            return Ok(planned.write_bytes(&weight.parameter, first * size, parameter)?);
        };
        let value = |bytes: &[u8]| match *bytes {
            [low, high] => bf16::from_ne_bytes([low, high]).to_f32(),
            _ => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        };
        self.values.resize(parameter.len() / size, 0.0);
        let stored = parameter.par_chunks_exact(size).with_min_len(CHUNK);
        stored.zip(&mut self.values).for_each(|(bytes, to)| *to = value(bytes));
        self.packed.resize(self.values.len() / form.columns * form.bytes(), 0);
        quantize(form, &self.values, &mut self.packed);
        let first_byte = first / form.columns * form.bytes();
        Ok(planned.write_bytes(&weight.parameter, first_byte, bytes_of(&self.packed))?)
    }
}
