//! A model on a device without gradients.

use crate::batch::BatchSize;
use crate::column::Column;
use crate::{Batch, TrainError, weights};
use storm_device::{Device, DeviceError, Scalar};
use storm_exec::{Resident, Schedule, ScheduleId, SlotId, Slots};
use storm_graph::{ProgramParameter, Tensor, TensorClass, Training};
use storm_model::{BuildOptions, ModelConfig, ParameterSource, Trainable, build};

/// The forward pass of a loaded model, everything in device memory.
pub(crate) struct Forward<D: Device> {
    resident: Resident<D>,
    schedule: ScheduleId,
    columns: Vec<(Column, SlotId)>,
    pub(crate) size: BatchSize,
}

impl<D: Device> Forward<D> {
    pub(crate) fn load(
        config: &ModelConfig,
        options: BuildOptions,
        source: &impl ParameterSource,
        open: impl FnOnce(usize) -> Result<D, DeviceError>,
    ) -> Result<Forward<D>, TrainError> {
        let options = BuildOptions { trainable: Trainable::Where(|_| false), ..options };
        let program = build(config, &options)?;
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
        let columns = Column::find_all(&slots);
        let mut resident = Resident::new(slots, vec![schedule], open)?;
        weights::load(&mut resident, config, source)?;
        let schedule = resident.schedule(0);
        let size = BatchSize::new(config, options.batch, options.sequence, options.packing);
        Ok(Forward { resident, schedule, columns, size })
    }

    /// Runs a batch that was checked.
    pub(crate) fn run(&mut self, batch: &Batch) -> Result<(), TrainError> {
        for &(column, slot) in &self.columns {
            // A program without gradients asks for no sorted order.
            self.resident.write(slot, column.entries(batch, &mut []))?;
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
