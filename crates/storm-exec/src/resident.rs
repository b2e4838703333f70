use crate::layout::lay_out;
use crate::schedule::{Home, Schedule, ScheduleId, ValueId};
use crate::{ExecError, SlotId, Slots};
use storm_device::cpu::{CpuDevice, Instruction};
use storm_device::{DeviceError, Scalar};
use storm_graph::Tensor;

/// Programs on a device with everything in its memory.
#[derive(Debug)]
pub struct Resident {
    device: CpuDevice,
    slots: Slots,
    schedules: Vec<Committed>,
}

/// A schedule with addresses.
#[derive(Debug)]
struct Committed {
    schedule: Schedule,
    instructions: Vec<Instruction>,
    /// Offset of each value in device memory.
    offsets: Vec<usize>,
    work_bytes: usize,
}

impl Resident {
    /// Lays out slots and schedules, takes the memory, and resolves every instruction. The
    /// schedules share one work area: what one leaves there is gone when another runs.
    ///
    /// # Errors
    /// The memory cannot be had, or an instruction does not fit the device.
    pub fn new(slots: Slots, schedules: Vec<Schedule>) -> Result<Resident, ExecError> {
        let base = slots.size_bytes();
        let mut laid_out = Vec::new();
        for schedule in schedules {
            let layout = lay_out(&schedule.values, schedule.steps.len());
            let offsets: Vec<usize> = schedule
                .values
                .iter()
                .zip(&layout.offsets)
                .map(|(value, offset)| match value {
                    Home::Slot(slot) => slots.offset(*slot),
                    Home::Work { .. } => base + offset,
                })
                .collect();
            laid_out.push((schedule, offsets, layout.size_bytes));
        }
        let work = laid_out.iter().map(|&(_, _, size)| size).max().unwrap_or(0);
        let device = CpuDevice::new(base + work)?;
        let mut committed = Vec::new();
        for (schedule, offsets, work_bytes) in laid_out {
            let mut instructions = Vec::with_capacity(schedule.steps.len());
            for step in &schedule.steps {
                let place = |id: storm_graph::TensorId| {
                    let value = step.values[id.index()].expect("scheduled with its values");
                    offsets[value.0]
                };
                let node = &step.graph.nodes()[step.node];
                instructions.push(device.prepare(&step.graph, node, place, step.layer)?);
            }
            committed.push(Committed { schedule, instructions, offsets, work_bytes });
        }
        Ok(Resident { device, slots, schedules: committed })
    }

    /// The id of the `index`-th schedule given to [`Resident::new`].
    ///
    /// # Panics
    /// There are fewer.
    pub fn schedule(&self, index: usize) -> ScheduleId {
        assert!(index < self.schedules.len(), "there are {} schedules", self.schedules.len());
        ScheduleId(index)
    }

    /// Runs a schedule from start to end.
    pub fn run(&mut self, schedule: ScheduleId) {
        for instruction in &self.schedules[schedule.0].instructions {
            self.device.run(instruction);
        }
    }

    /// Runs a schedule and calls `observe` before each instruction and once after the last:
    /// for profiles and for tests.
    pub fn run_observed(
        &mut self,
        schedule: ScheduleId,
        mut observe: impl FnMut(Option<&Instruction>),
    ) {
        for instruction in &self.schedules[schedule.0].instructions {
            observe(Some(instruction));
            self.device.run(instruction);
        }
        observe(None);
    }

    /// The lasting tensors.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Device memory in all, and how much of it is the work area of a schedule.
    pub fn memory_bytes(&self, schedule: ScheduleId) -> (usize, usize) {
        (self.device.capacity_bytes(), self.schedules[schedule.0].work_bytes)
    }

    /// Sets a slot.
    ///
    /// # Errors
    /// Wrong dtype or element count.
    pub fn write<T: Scalar>(&mut self, slot: SlotId, values: &[T]) -> Result<(), ExecError> {
        check(self.slots.tensor(slot), T::DTYPE, values.len())?;
        Ok(self.device.write(self.slots.offset(slot), values)?)
    }

    /// A slot's data.
    ///
    /// # Errors
    /// Wrong dtype.
    pub fn view<T: Scalar>(&self, slot: SlotId) -> Result<&[T], ExecError> {
        let tensor = self.slots.tensor(slot);
        check(tensor, T::DTYPE, tensor.shape.elements())?;
        Ok(self.device.view(self.slots.offset(slot), tensor.shape.elements())?)
    }

    /// A slot's data, to be changed in place.
    ///
    /// # Errors
    /// Wrong dtype.
    pub fn view_mut<T: Scalar>(&mut self, slot: SlotId) -> Result<&mut [T], ExecError> {
        let tensor = self.slots.tensor(slot);
        check(tensor, T::DTYPE, tensor.shape.elements())?;
        Ok(self.device.view_mut(self.slots.offset(slot), tensor.shape.elements())?)
    }

    /// A result of the schedule that ran last.
    ///
    /// # Errors
    /// The schedule has no result of that name, or another dtype.
    pub fn result<T: Scalar>(&self, schedule: ScheduleId, name: &str) -> Result<&[T], ExecError> {
        let committed = &self.schedules[schedule.0];
        let &(ValueId(value), ref tensor) = committed.schedule.result(name).ok_or_else(|| {
            ExecError::UnknownName { name: name.to_owned(), known: "loss, logits".to_owned() }
        })?;
        check(tensor, T::DTYPE, tensor.shape.elements())?;
        Ok(self.device.view(committed.offsets[value], tensor.shape.elements())?)
    }
}

fn check(
    tensor: &Tensor,
    given_dtype: storm_graph::DType,
    given: usize,
) -> Result<(), DeviceError> {
    let elements = tensor.shape.elements();
    if tensor.dtype == given_dtype && elements == given {
        return Ok(());
    }
    let Tensor { name, dtype, .. } = tensor.clone();
    Err(DeviceError::HostData { tensor: name, elements, dtype, given, given_dtype })
}
