use crate::batch::BatchSize;
use crate::column::Column;
use crate::{Batch, TrainError, weights};
use half::bf16;
use storm_device::cpu::CpuDevice;
use storm_exec::{Resident, Schedule, ScheduleId, SlotId, Slots};
use storm_graph::{DType, ProgramParameter, Tensor, TensorClass, Training};
use storm_model::{BuildOptions, HfDirectory, ModelConfig, ModelOutput, Trainable, build};

/// A model that only looks forward: logits of whole sequences.
pub struct Inference {
    resident: Resident<CpuDevice>,
    schedule: ScheduleId,
    columns: Vec<(Column, SlotId)>,
    vocabulary: usize,
    size: BatchSize,
    dtype: DType,
}

impl Inference {
    /// Loads a model for batches of this size; `options.output` is taken as logits.
    ///
    /// # Errors
    /// The sizes do not fit the model, the files do not hold it, or the memory cannot be had.
    pub fn load(
        config: &ModelConfig,
        options: &BuildOptions,
        directory: &HfDirectory,
    ) -> Result<Inference, TrainError> {
        let options = BuildOptions {
            output: ModelOutput::Logits,
            trainable: Trainable::Where(|_| false),
            ..options.clone()
        };
        let program = build(config, &options)?;
        let mut slots = Slots::new();
        let parameters = program.parameters();
        for instance in crate::optimizer::instances(&parameters, program.layer_count) {
            let ProgramParameter { shape, dtype, .. } = instance.parameter;
            let class = TensorClass::Parameter(Training::Frozen);
            slots.declare(Tensor { name: instance.name, shape, dtype, class })?;
        }
        for input in program.inputs() {
            slots.declare(input)?;
        }
        let schedule = Schedule::of_program(&program, &slots)?;
        let columns = Column::find_all(&slots);
        let mut resident = Resident::new(slots, vec![schedule], CpuDevice::new)?;
        weights::load(&mut resident, config, directory)?;
        let schedule = resident.schedule(0);
        let size = BatchSize::new(config, options.batch, options.sequence, options.packing);
        let (vocabulary, dtype) = (config.vocab_size, options.dtype);
        Ok(Inference { resident, schedule, columns, vocabulary, size, dtype })
    }

    /// The logits of a batch, (B, T, V), widened to f32.
    ///
    /// # Errors
    /// The batch does not fit.
    pub fn logits(&mut self, batch: &Batch) -> Result<Vec<f32>, TrainError> {
        self.size.check_inputs(batch)?;
        for &(column, slot) in &self.columns {
            // A program without gradients asks for no sorted order.
            self.resident.write(slot, column.entries(batch, &mut []))?;
        }
        self.resident.run(self.schedule)?;
        let elements = self.size.batch * self.size.sequence * self.vocabulary;
        Ok(match self.dtype {
            DType::BF16 => {
                let mut logits = vec![bf16::ZERO; elements];
                self.resident.result(self.schedule, "logits", &mut logits)?;
                logits.into_iter().map(bf16::to_f32).collect()
            }
            _ => {
                let mut logits = vec![0.0; elements];
                self.resident.result(self.schedule, "logits", &mut logits)?;
                logits
            }
        })
    }
}
