use crate::layout::lay_out;
use crate::schedule::{Home, Schedule, ScheduleId, ValueId};
use crate::{ExecError, SlotId, Slots};
use storm_device::{Device, DeviceError, Scalar};
use storm_graph::{DType, Tensor, TensorId};
use storm_plan::ALIGNMENT;

/// Runs programs with everything in device memory.
#[derive(Debug)]
pub struct Resident<D: Device> {
    device: D,
    slots: Slots,
    schedules: Vec<Committed<D::Instruction>>,
}

/// A schedule with addresses.
#[derive(Debug)]
struct Committed<I> {
    schedule: Schedule,
    instructions: Vec<I>,
    /// Offset of each value in device memory.
    offsets: Vec<usize>,
    work_bytes: usize,
}

impl<D: Device> Resident<D> {
    /// Lays out slots and schedules, allocates that much memory with `open`, and resolves every
    /// instruction. The schedules share one work area: running one overwrites what another left
    /// there.
    ///
    /// # Errors
    /// The memory is not available, or an instruction does not fit the device.
    pub fn new(
        slots: Slots,
        schedules: Vec<Schedule>,
        open: impl FnOnce(usize) -> Result<D, DeviceError>,
    ) -> Result<Resident<D>, ExecError> {
        const { assert!(ALIGNMENT.is_multiple_of(D::ALIGNMENT)) };
        let (base, size_bytes) = (slots.size_bytes(), resident_bytes(&slots, &schedules));
        let mut laid_out = Vec::new();
        for schedule in schedules {
            let layout = lay_out(&schedule.values);
            let offsets: Vec<usize> = schedule
                .values
                .iter()
                .zip(&layout.offsets)
                .map(|(value, offset)| match value {
                    Home::Slot(slot) => slots.offset(*slot),
                    Home::Work { .. } => base.saturating_add(*offset),
                })
                .collect();
            laid_out.push((schedule, offsets, layout.size_bytes));
        }
        let device = open(size_bytes)?;
        let mut committed = Vec::new();
        for (schedule, offsets, work_bytes) in laid_out {
            let mut instructions = Vec::with_capacity(schedule.steps.len());
            for step in &schedule.steps {
                let place = |id: TensorId| {
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

    /// Runs a schedule from start to end. May return before it is done.
    ///
    /// # Errors
    /// From the device.
    pub fn run(&mut self, schedule: ScheduleId) -> Result<(), ExecError> {
        for instruction in &self.schedules[schedule.0].instructions {
            self.device.run(instruction)?;
        }
        Ok(())
    }

    /// Runs a schedule, waiting for each instruction, for profiling. Calls `observe` with the op's name before each
    /// instruction, and with `None` after the last.
    ///
    /// # Errors
    /// From the device.
    pub fn run_observed(
        &mut self,
        schedule: ScheduleId,
        mut observe: impl FnMut(Option<&'static str>),
    ) -> Result<(), ExecError> {
        for instruction in &self.schedules[schedule.0].instructions {
            self.device.synchronize()?;
            observe(Some(D::op_name(instruction)));
            self.device.run(instruction)?;
        }
        self.device.synchronize()?;
        observe(None);
        Ok(())
    }

    /// The names of a schedule's nodes, each once, in order. All layers use the same names.
    pub fn node_names(&self, schedule: ScheduleId) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for step in &self.schedules[schedule.0].schedule.steps {
            let name = step.graph.nodes()[step.node].name.as_str();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// Runs only the nodes of that name, of all layers in a row, for profiling. Their results are meaningless.
    ///
    /// # Errors
    /// From the device.
    pub fn run_nodes(&mut self, schedule: ScheduleId, name: &str) -> Result<(), ExecError> {
        let Committed { schedule, instructions, .. } = &self.schedules[schedule.0];
        for (step, instruction) in schedule.steps.iter().zip(instructions) {
            if step.graph.nodes()[step.node].name == name {
                self.device.run(instruction)?;
            }
        }
        Ok(())
    }

    /// Waits until everything is done.
    ///
    /// # Errors
    /// From earlier work.
    pub fn synchronize(&mut self) -> Result<(), ExecError> {
        Ok(self.device.synchronize()?)
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The persistent tensors.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Total device memory, and how much of it is the work area of a schedule.
    pub fn memory_bytes(&self, schedule: ScheduleId) -> (usize, usize) {
        (self.device.capacity_bytes(), self.schedules[schedule.0].work_bytes)
    }

    /// Writes a slot.
    ///
    /// # Errors
    /// Wrong dtype or element count.
    pub fn write<T: Scalar>(&mut self, slot: SlotId, values: &[T]) -> Result<(), ExecError> {
        check(self.slots.tensor(slot), T::DTYPE, values.len())?;
        Ok(self.device.write(self.slots.offset(slot), values)?)
    }

    /// Writes elements of a slot, starting at `first`.
    ///
    /// # Errors
    /// Wrong dtype, or more elements than it has.
    pub fn write_part<T: Scalar>(
        &mut self,
        slot: SlotId,
        first: usize,
        values: &[T],
    ) -> Result<(), ExecError> {
        check_part(self.slots.tensor(slot), T::DTYPE, first, values.len())?;
        Ok(self.device.write(self.slots.offset(slot) + first * size_of::<T>(), values)?)
    }

    /// Copies a slot's data to the host.
    ///
    /// # Errors
    /// Wrong dtype or element count.
    pub fn read<T: Scalar>(&self, slot: SlotId, values: &mut [T]) -> Result<(), ExecError> {
        check(self.slots.tensor(slot), T::DTYPE, values.len())?;
        Ok(self.device.read(self.slots.offset(slot), values)?)
    }

    /// Copies elements of a slot, starting at `first`, to the host.
    ///
    /// # Errors
    /// Wrong dtype, or more elements than it has.
    pub fn read_part<T: Scalar>(
        &self,
        slot: SlotId,
        first: usize,
        values: &mut [T],
    ) -> Result<(), ExecError> {
        check_part(self.slots.tensor(slot), T::DTYPE, first, values.len())?;
        Ok(self.device.read(self.slots.offset(slot) + first * size_of::<T>(), values)?)
    }

    /// Whether a schedule has a result of this name.
    pub fn has_result(&self, schedule: ScheduleId, name: &str) -> bool {
        self.schedules[schedule.0].schedule.result(name).is_some()
    }

    /// Copies a result of the schedule that ran last to the host.
    ///
    /// # Errors
    /// The schedule has no result of that name, or its dtype differs.
    pub fn result<T: Scalar>(
        &self,
        schedule: ScheduleId,
        name: &str,
        values: &mut [T],
    ) -> Result<(), ExecError> {
        let committed = &self.schedules[schedule.0];
        let &(ValueId(value), ref tensor) = committed.schedule.result(name).ok_or_else(|| {
            ExecError::UnknownName { name: name.to_owned(), known: "loss, logits".to_owned() }
        })?;
        check(tensor, T::DTYPE, values.len())?;
        Ok(self.device.read(committed.offsets[value], values)?)
    }
}

/// Device memory that [`Resident::new`] takes: the slots, and the work area of the largest schedule.
pub fn resident_bytes(slots: &Slots, schedules: &[Schedule]) -> usize {
    let work = schedules.iter().map(|schedule| lay_out(&schedule.values).size_bytes);
    slots.size_bytes().saturating_add(work.max().unwrap_or(0))
}

/// Checks that a tensor has this dtype and `count` elements starting at `first`.
pub(crate) fn check_part(
    tensor: &Tensor,
    given_dtype: DType,
    first: usize,
    count: usize,
) -> Result<(), DeviceError> {
    check(tensor, given_dtype, first.saturating_add(count).max(tensor.shape.elements()))
}

pub(crate) fn check(tensor: &Tensor, given_dtype: DType, given: usize) -> Result<(), DeviceError> {
    let elements = tensor.shape.elements();
    if tensor.dtype == given_dtype && elements == given {
        return Ok(());
    }
    let Tensor { name, dtype, .. } = tensor.clone();
    Err(DeviceError::HostData { tensor: name, elements, dtype, given, given_dtype })
}
