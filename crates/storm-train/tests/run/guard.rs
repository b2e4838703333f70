//! Memory that is not as planned: the run reports it, and is saved before it is too late.

use crate::{Heard, options, run, trainer_on};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_device::{DeviceError, PlanDevice, Supply, Trace};
use storm_graph::{Graph, Node, TensorId};
use storm_plan::{CheckedPlan, PerTier, Place, SegmentId, UpdateTime};
use storm_train::{Alarm, Guard, MemoryReading, OnAlarm, RunOptions, Stop, StopReason};
use tempfile::TempDir;

/// A CPU device whose driver reports given readings, one after another.
struct Pressured {
    inner: CpuPlanDevice,
    readings: Vec<MemoryReading>,
    next: Cell<usize>,
}

impl PlanDevice for Pressured {
    type Options = Vec<MemoryReading>;

    const ALIGNMENT: usize = CpuPlanDevice::ALIGNMENT;

    fn commit(
        plan: Arc<CheckedPlan>,
        readings: Vec<MemoryReading>,
    ) -> Result<Pressured, DeviceError> {
        let options = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
        let inner = CpuPlanDevice::commit(plan, options)?;
        Ok(Pressured { inner, readings, next: Cell::new(0) })
    }

    fn plan(&self) -> &Arc<CheckedPlan> {
        self.inner.plan()
    }

    fn set_supply(&mut self, supply: Arc<dyn Supply>) -> Result<(), DeviceError> {
        self.inner.set_supply(supply)
    }

    fn wait_for_data(&mut self) -> Result<(), DeviceError> {
        self.inner.wait_for_data()
    }

    fn issue(&mut self, segment: SegmentId) -> Result<(), DeviceError> {
        self.inner.issue(segment)
    }

    fn write_input(&mut self, input: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.inner.write_input(input, bytes)
    }

    fn read_result(&mut self, result: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.read_result(result, bytes)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.inner.synchronize()
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), DeviceError> {
        self.inner.write(place, bytes)
    }

    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.read(place, bytes)
    }

    fn run_alone(
        &mut self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<(), DeviceError> {
        self.inner.run_alone(graph, node, place, layer)
    }

    fn memory_taken(&self) -> PerTier<usize> {
        self.inner.memory_taken()
    }

    fn memory_in_use_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.readings[self.next.get()].in_use_bytes)
    }

    fn memory_free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        let now = self.next.get();
        self.next.set((now + 1).min(self.readings.len() - 1));
        Ok(self.readings[now].free_bytes)
    }

    fn identity(&self) -> String {
        self.inner.identity()
    }

    fn trace(&mut self) -> Result<Option<Trace>, DeviceError> {
        self.inner.trace()
    }
}

#[test]
fn a_run_under_pressure_is_saved_at_once() {
    let reading = |in_use_bytes, free_bytes| MemoryReading { in_use_bytes, free_bytes };
    let readings = vec![
        reading(1000, Some(9000)),
        reading(1500, Some(8000)),
        reading(1500, Some(8000)),
        reading(1000, Some(50)),
        reading(1000, Some(50)),
        reading(2500, Some(50)),
        reading(1000, Some(9000)),
    ];
    for in_background in [false, true] {
        under_pressure(readings.clone(), in_background);
    }
}

fn under_pressure(readings: Vec<MemoryReading>, in_background: bool) {
    let folder = TempDir::new().expect("a folder");
    let quiet = RunOptions { save_every: None, evaluate_every: None, ..options(9, 0.01) };
    let mut run = run(&folder, trainer_on::<Pressured>(UpdateTime::NextStep, readings), quiet);
    run.watch(Guard::new(1000, 2000, Duration::ZERO), OnAlarm::GoOn);
    if in_background {
        run.save_in_background().expect("little memory");
    }
    let mut heard = Heard::default();
    run.train(&Stop::new(), &mut heard).expect("a resumed run");
    let expected = [
        (2, Alarm::AbovePlan { in_use_bytes: 1500, planned_bytes: 1000 }),
        (4, Alarm::LittleFree { free_bytes: 50 }),
        (6, Alarm::OverBudget { in_use_bytes: 2500, budget_bytes: 2000 }),
    ];
    assert_eq!(heard.alarms, expected);
    // At alarms that may end the process, the run saves at once. The last step is always saved.
    assert_eq!(heard.saved, [4, 6, 9]);
    assert!(
        heard.saved_later.is_empty(),
        "steps went on before {:?} were on the disk",
        heard.saved_later
    );
}

#[test]
fn a_run_that_makes_room_ends_as_the_one_that_need_not() {
    let reading = |free_bytes| MemoryReading { in_use_bytes: 1000, free_bytes: Some(free_bytes) };
    let quiet = || RunOptions { save_every: None, evaluate_every: None, ..options(6, 0.01) };
    let undisturbed = TempDir::new().expect("a folder");
    let mut alone = run(
        &undisturbed,
        trainer_on::<Pressured>(UpdateTime::NextStep, vec![reading(9000)]),
        quiet(),
    );
    alone.train(&Stop::new(), &mut Heard::default()).expect("a run");

    let folder = TempDir::new().expect("a folder");
    let readings = vec![reading(9000), reading(9000), reading(50)];
    let mut first = run(&folder, trainer_on::<Pressured>(UpdateTime::NextStep, readings), quiet());
    first.watch(Guard::new(1000, 2000, Duration::ZERO), OnAlarm::Stop);
    let mut heard = Heard::default();
    let finished = first.train(&Stop::new(), &mut heard).expect("a run that ends early");
    let alarm = Alarm::LittleFree { free_bytes: 50 };
    assert_eq!((finished.reason, finished.step), (StopReason::MemoryShort(alarm), 3));
    assert_eq!(heard.saved, [3]);
    drop(first.into_trainer());

    // Another plan, as one for less memory would be.
    let trainer = trainer_on::<Pressured>(UpdateTime::EndOfStep, vec![reading(9000)]);
    let mut second = run(&folder, trainer, quiet());
    assert_eq!(second.resume(&mut heard).expect("a checkpoint"), Some(3));
    let finished = second.train(&Stop::new(), &mut heard).expect("the rest of the run");
    assert_eq!((finished.reason, finished.step), (StopReason::Completed, 6));

    let names: Vec<String> = alone.trainer().parameter_names().map(str::to_owned).collect();
    for name in names {
        let [expected, found] = [&mut alone, &mut second].map(|run| {
            run.trainer()
                .read(&name)
                .expect("a parameter")
                .into_iter()
                .map(f32::to_bits)
                .collect::<Vec<_>>()
        });
        assert_eq!(expected, found, "{name}");
    }
}

#[test]
fn the_last_step_needs_no_room() {
    let reading = |free_bytes| MemoryReading { in_use_bytes: 1000, free_bytes: Some(free_bytes) };
    let folder = TempDir::new().expect("a folder");
    let quiet = RunOptions { save_every: None, evaluate_every: None, ..options(2, 0.01) };
    let readings = vec![reading(9000), reading(50)];
    let mut run = run(&folder, trainer_on::<Pressured>(UpdateTime::NextStep, readings), quiet);
    run.watch(Guard::new(1000, 2000, Duration::ZERO), OnAlarm::Stop);
    let finished = run.train(&Stop::new(), &mut Heard::default()).expect("a run");
    assert_eq!((finished.reason, finished.step), (StopReason::Completed, 2));
}
