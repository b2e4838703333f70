//! A machine that has less memory than was planned with: the run is planned anew, and is the same.

use crate::support::{Random, batches, options, tiny};
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_device::{DeviceError, MemoryRefused, PlanDevice, Trace};
use storm_graph::{Graph, Node, TensorId};
use storm_host::{HostLimit, HostMemoryRefused};
use storm_plan::{
    Budget, CheckedPlan, Forced, HardwareProfile, PerTier, Place, PlanError, SegmentId, Tier,
};
use storm_train::{Notice, Precision, Preparation, TrainError, Trainer, prepare};

/// A CPU device with little memory to give.
struct Stingy(CpuPlanDevice);

/// What it has.
#[derive(Clone, Copy)]
struct Has {
    /// How it refuses host memory.
    host: Option<Limit>,
    device_bytes: u64,
    /// What the process holds of the device beside its plan: the context of a driver, code. It counts in what is
    /// wanted and in what is available.
    beside_bytes: u64,
}

#[derive(Clone, Copy)]
enum Limit {
    Group(u64),
    Locked(u64),
    /// It gives this much, and does not say so.
    Silent(u64),
}

impl Has {
    fn refuse(&self, plan: &CheckedPlan) -> Option<MemoryRefused> {
        let wanted_bytes = plan.bytes[Tier::HOST];
        let limit = match self.host {
            Some(Limit::Group(available_bytes)) if available_bytes < wanted_bytes as u64 => {
                Some(HostLimit::ControlGroup { available_bytes, limit_bytes: available_bytes })
            }
            Some(Limit::Locked(limit_bytes)) if limit_bytes < wanted_bytes as u64 => {
                Some(HostLimit::LockedMemory { limit_bytes })
            }
            Some(Limit::Silent(bytes)) if bytes < wanted_bytes as u64 => {
                Some(HostLimit::System { reason: "out of memory".to_owned() })
            }
            _ => None,
        };
        if let Some(limit) = limit {
            return Some(HostMemoryRefused { wanted_bytes, limit }.into());
        }
        let wanted_bytes = plan.bytes[Tier::DEVICE] as u64 + self.beside_bytes;
        let available_bytes = self.device_bytes.saturating_add(self.beside_bytes);
        (wanted_bytes > available_bytes).then(|| MemoryRefused {
            tier: Tier::DEVICE,
            wanted_bytes,
            available_bytes: Some(available_bytes),
            reason: "the budget allows no more".to_owned(),
        })
    }
}

impl PlanDevice for Stingy {
    type Options = Has;

    const ALIGNMENT: usize = CpuPlanDevice::ALIGNMENT;

    fn commit(plan: Arc<CheckedPlan>, has: Has) -> Result<Stingy, DeviceError> {
        match has.refuse(&plan) {
            Some(error) => Err(error.into()),
            None => CpuPlanDevice::commit(plan, CpuPlanOptions::default()).map(Stingy),
        }
    }

    fn plan(&self) -> &Arc<CheckedPlan> {
        self.0.plan()
    }

    fn issue(&mut self, segment: SegmentId) -> Result<(), DeviceError> {
        self.0.issue(segment)
    }

    fn write_input(&mut self, input: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.0.write_input(input, bytes)
    }

    fn read_result(&mut self, result: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.0.read_result(result, bytes)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.0.synchronize()
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), DeviceError> {
        self.0.write(place, bytes)
    }

    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.0.read(place, bytes)
    }

    fn run_alone(
        &mut self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<(), DeviceError> {
        self.0.run_alone(graph, node, place, layer)
    }

    fn memory_taken(&self) -> PerTier<usize> {
        self.0.memory_taken()
    }

    fn identity(&self) -> String {
        self.0.identity()
    }

    fn trace(&mut self) -> Result<Option<Trace>, DeviceError> {
        self.0.trace()
    }
}

const HOST_BYTES: u64 = 1 << 30;
const MICRO_BATCHES: usize = 4;

/// Prepares with plenty of host memory, on a device that has less; what was planned with after each refusal, and
/// the loss and memory of a step.
fn prepared(vram_bytes: u64, has: Has) -> Result<(Vec<Budget>, f32, PerTier<usize>), TrainError> {
    let config = tiny("llama-3.2-1b");
    let profile = HardwareProfile {
        overhead_bytes: 0,
        ..HardwareProfile::builtin("reference").expect("built in")
    };
    let preparation = Preparation {
        config: &config,
        options: &options(Precision::Bf16Master),
        accumulate: MICRO_BATCHES,
        profile: &profile,
        budget: Budget::new(vram_bytes, HOST_BYTES),
        forced: &Forced::default(),
    };
    let mut refused = Vec::new();
    let tell = |notice: Notice<'_>| {
        if let Notice::Refused { reason, budget } = notice {
            assert!(!reason.is_empty());
            refused.push(budget);
        }
    };
    let mut trainer = prepare::<Stingy>(&preparation, || has, tell)?.trainer;
    let loss = trainer.step(&batches(&config, MICRO_BATCHES, 0), 1e-3)?.loss;
    Ok((refused, loss, trainer.memory_taken()))
}

/// What one refusal must come to: a budget of the tier within what there is, not much below it, and nothing else
/// changed.
fn check_budget(refused: &[Budget], asked: Budget, tier: Tier, available_bytes: u64) {
    let [budget] = refused else { panic!("refused {} times: {refused:?}", refused.len()) };
    let allowed = available_bytes * 31 / 32..=available_bytes;
    assert!(allowed.contains(&budget[tier]), "{} of {available_bytes}", budget[tier]);
    assert_eq!(budget.with(tier, asked[tier]), asked);
}

const PLENTY: Has = Has { host: None, device_bytes: u64::MAX, beside_bytes: 0 };

#[test]
fn less_memory_is_planned_with() {
    let config = tiny("llama-3.2-1b");
    let mut resident = Trainer::new(&config, options(Precision::Bf16Master)).expect("a trainer");
    let report = resident.step(&batches(&config, MICRO_BATCHES, 0), 1e-3).expect("a step");
    let (refused, loss, plenty) = prepared(1 << 30, PLENTY).expect("it fits");
    assert_eq!((refused.len(), loss.to_bits()), (0, report.loss.to_bits()));

    let mut random = Random(3);
    // An allocation that fails counts the plan's block alone, a budget all that is in use.
    for beside_bytes in [0, 500 << 20] {
        // Not so little that nothing fits.
        let device_bytes = (plenty[Tier::DEVICE] * 3 / 4 + random.below(1000)) as u64;
        let has = Has { device_bytes, beside_bytes, ..PLENTY };
        let (refused, loss, taken) = prepared(1 << 30, has).expect("it fits");
        assert_eq!(loss.to_bits(), report.loss.to_bits());
        assert!(taken[Tier::DEVICE] as u64 <= device_bytes, "{taken:?}");
        check_budget(&refused, Budget::new(1 << 30, HOST_BYTES), Tier::DEVICE, device_bytes);
    }

    // In little device memory much waits on the host.
    let tight = (plenty[Tier::DEVICE] * 2 / 3) as u64;
    let (_, _, taken) = prepared(tight, PLENTY).expect("it fits");
    let bytes = taken[Tier::HOST] as u64 * 19 / 20;
    for host in [Limit::Group(bytes), Limit::Locked(bytes), Limit::Silent(bytes)] {
        let (refused, loss, taken) =
            prepared(tight, Has { host: Some(host), ..PLENTY }).expect("it fits");
        assert_eq!(loss.to_bits(), report.loss.to_bits());
        assert!(taken[Tier::HOST] as u64 <= bytes, "{taken:?}");
        match host {
            // An eighth less at a time.
            Limit::Silent(_) => assert!(!refused.is_empty()),
            _ => check_budget(&refused, Budget::new(tight, HOST_BYTES), Tier::HOST, bytes),
        }
    }
}

#[test]
fn too_little_is_too_little() {
    let has = Has { device_bytes: 1000, ..PLENTY };
    match prepared(1 << 30, has) {
        Err(TrainError::Plan(PlanError::TooSmall(problem))) => {
            assert!(problem.min_bytes[Tier::DEVICE] > 1000);
        }
        other => panic!("{:?}", other.map(|(refused, ..)| refused)),
    }
}
