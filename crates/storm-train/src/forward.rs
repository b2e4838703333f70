//! Runs a model's forward pass on a device.

use crate::feed::phase_words;
use crate::input_rules::{InputRules, Reading};
use crate::micro_batch::Entries;
use crate::{MicroBatch, Precision, TrainError, TrainOptions};
use storm_device::{Device, DeviceError, Scalar};
use storm_exec::{Resident, Schedule, ScheduleId, SlotId, Slots, resident_bytes};
use storm_graph::{ProgramParameter, Tensor, TensorClass, Training};
use storm_model::{AnyModel, BuildOptions, PHASE_INPUT, Trainable};

/// The forward pass of a model, with everything in device memory.
pub(crate) struct Forward<D: Device> {
    resident: Resident<D>,
    schedule: ScheduleId,
    inputs: Vec<(Reading, SlotId)>,
    rules: InputRules,
    pub(crate) options: BuildOptions,
}

/// The layout, computed before memory is allocated.
struct Prepared {
    slots: Slots,
    schedule: Schedule,
    rules: InputRules,
    options: BuildOptions,
}

impl Prepared {
    fn new(model: &AnyModel, options: BuildOptions) -> Result<Prepared, TrainError> {
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
        Ok(Prepared { slots, schedule, rules: InputRules::of_program(&program), options })
    }
}

/// Memory of a model's forward pass, including its weights.
pub(crate) fn forward_bytes(model: &AnyModel, options: BuildOptions) -> Result<usize, TrainError> {
    let Prepared { slots, schedule, .. } = Prepared::new(model, options)?;
    Ok(resident_bytes(&slots, &[schedule]))
}

impl<D: Device> Forward<D> {
    /// Creates the pass with uninitialized weights.
    pub(crate) fn new(
        model: &AnyModel,
        options: BuildOptions,
        open: impl FnOnce(usize) -> Result<D, DeviceError>,
    ) -> Result<Forward<D>, TrainError> {
        let Prepared { slots, schedule, rules, options } = Prepared::new(model, options)?;
        let inputs = rules.slots(&slots);
        let phase = slots.find(PHASE_INPUT);
        let mut resident = Resident::new(slots, vec![schedule], open)?;
        if let Some(phase) = phase {
            resident.write(phase, &phase_words(None))?;
        }
        let schedule = resident.schedule(0);
        Ok(Forward { resident, schedule, inputs, rules, options })
    }

    /// The storage of the weights.
    pub(crate) fn weights(&mut self) -> &mut Resident<D> {
        &mut self.resident
    }

    /// Runs a batch.
    ///
    /// # Errors
    /// The batch does not fit, or from the device.
    pub(crate) fn run(&mut self, batch: &impl MicroBatch) -> Result<(), TrainError> {
        let BuildOptions { batch: rows, sequence, packing, .. } = self.options;
        batch.check(&TrainOptions {
            packing,
            ..TrainOptions::new(rows, sequence, Precision::F32)
        })?;
        self.rules.check_entries(batch)?;
        for (reading, slot) in &self.inputs {
            // A program without gradients needs no sorted order.
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
