//! A model on a device without gradients.

use crate::feed::phase_words;
use crate::input_rules::{InputRules, Reading};
use crate::micro_batch::Entries;
use crate::{MicroBatch, Precision, TrainError, TrainOptions, weights};
use storm_device::{Device, DeviceError, Scalar};
use storm_exec::{Resident, Schedule, ScheduleId, SlotId, Slots};
use storm_graph::{ProgramParameter, Tensor, TensorClass, Training};
use storm_model::{AnyModel, BuildOptions, PHASE_INPUT, ParameterSource, Trainable};

/// The forward pass of a loaded model, everything in device memory.
pub(crate) struct Forward<D: Device> {
    resident: Resident<D>,
    schedule: ScheduleId,
    inputs: Vec<(Reading, SlotId)>,
    rules: InputRules,
    pub(crate) options: BuildOptions,
}

impl<D: Device> Forward<D> {
    pub(crate) fn load(
        model: &AnyModel,
        options: BuildOptions,
        source: &impl ParameterSource,
        open: impl FnOnce(usize) -> Result<D, DeviceError>,
    ) -> Result<Forward<D>, TrainError> {
        let options = BuildOptions { trainable: Trainable::Where(|_| false), ..options };
        let program = model.build(&options)?;
        let mut slots = Slots::new();
        for instance in program.parameter_instances() {
            let ProgramParameter { shape, dtype, .. } = instance.parameter;
            let class = TensorClass::Parameter(Training::Frozen);
            slots.declare(Tensor { name: instance.name, shape, dtype, class })?;
        }
        for input in program.inputs() {
            slots.declare(input)?;
        }
        let schedule = Schedule::of_program(&program, &slots)?;
        let rules = InputRules::of_program(&program);
        let inputs = rules.slots(&slots);
        let phase = slots.find(PHASE_INPUT);
        let mut resident = Resident::new(slots, vec![schedule], open)?;
        if let Some(phase) = phase {
            resident.write(phase, &phase_words(None))?;
        }
        weights::load(&mut resident, model, source)?;
        let schedule = resident.schedule(0);
        Ok(Forward { resident, schedule, inputs, rules, options })
    }

    /// Runs a batch.
    ///
    /// # Errors
    /// It does not fit, or from the device.
    pub(crate) fn run(&mut self, batch: &impl MicroBatch) -> Result<(), TrainError> {
        let BuildOptions { batch: rows, sequence, packing, .. } = self.options;
        batch.check(&TrainOptions {
            packing,
            ..TrainOptions::new(rows, sequence, Precision::F32)
        })?;
        self.rules.check_entries(batch)?;
        for (reading, slot) in &self.inputs {
            // A program without gradients asks for no sorted order.
            match reading.entries(batch, &mut []) {
                Entries::F32(values) => self.resident.write(*slot, values)?,
                Entries::Bf16(values) => self.resident.write(*slot, values)?,
                Entries::I32(values) => self.resident.write(*slot, values)?,
                Entries::U8(values) => self.resident.write(*slot, values)?,
            }
        }
        Ok(self.resident.run(self.schedule)?)
    }

    /// A result of the last run.
    pub(crate) fn result<T: Scalar>(
        &mut self,
        name: &str,
        values: &mut [T],
    ) -> Result<(), TrainError> {
        Ok(self.resident.result(self.schedule, name, values)?)
    }
}
