//! A machine with less memory than planned: the run is planned again, and gives the same results.

use crate::support::{Random, batches, options, tiny};
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_device::{DeviceError, MemoryRefused, PlanDevice, Supply, Trace};
use storm_graph::{Graph, Node, TensorId};
use storm_host::{HostLimit, HostMemoryRefused};
use storm_plan::{
    Budget, CheckedPlan, Forced, HardwareProfile, PerTier, Place, PlanError, RankPlace, SegmentId,
    Tier,
};
use storm_train::{
    AnyBatch, Launch, LaunchRequest, LaunchSite, Notice, Precision, ReferenceTrainer, RunError,
    StepPlan, StepSize, TrainError,
};

/// A CPU device with limited memory.
struct Stingy(CpuPlanDevice);

/// Its memory.
#[derive(Clone, Copy)]
struct Has {
    /// How it refuses host memory.
    host: Option<Limit>,
    device_bytes: u64,
    /// Device memory of the process outside its plan, such as a driver's context and code. It
    /// counts in both wanted and available memory.
    beside_bytes: u64,
}

#[derive(Clone, Copy)]
enum Limit {
    Group(u64),
    Locked(u64),
    /// It gives this much, without saying so.
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

    fn set_supply(&mut self, supply: Arc<dyn Supply>) -> Result<(), DeviceError> {
        self.0.set_supply(supply)
    }

    fn wait_for_data(&mut self) -> Result<(), DeviceError> {
        self.0.wait_for_data()
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

struct Site {
    has: Has,
    /// The budget after each refusal.
    refused: Vec<Budget>,
}

impl LaunchSite<Stingy> for Site {
    fn device(&mut self, _: Budget, _: &StepPlan, _: Option<Stingy>) -> Has {
        self.has
    }

    fn batches(&mut self, _: usize, _: usize) -> Result<Vec<AnyBatch>, RunError> {
        unreachable!("nothing is tried")
    }

    fn notice(&mut self, notice: Notice<'_>) {
        if let Notice::Refused { reason, budget } = notice {
            assert!(!reason.is_empty());
            self.refused.push(budget);
        }
    }
}

fn request(vram_bytes: u64) -> LaunchRequest {
    LaunchRequest {
        rank: RankPlace::default(),
        decided: None,
        model: tiny("llama-3.2-1b").into(),
        options: options(Precision::Bf16Master),
        step: StepSize::MicroBatches(MICRO_BATCHES),
        profile: HardwareProfile {
            overhead_bytes: 0,
            ..HardwareProfile::builtin("reference").expect("built in")
        },
        budget: Budget::new(vram_bytes, HOST_BYTES),
        forced: Forced::default(),
        trial: None,
    }
}

/// Launches with plenty of host memory, on a device that has less. Returns the budget after each
/// refusal, and the loss and memory of a step.
fn launched(vram_bytes: u64, has: Has) -> Result<(Vec<Budget>, f32, PerTier<usize>), RunError> {
    let request = request(vram_bytes);
    let config = tiny("llama-3.2-1b");
    let mut launch = Launch::new(request)?;
    let mut site = Site { has, refused: Vec::new() };
    let mut trainer = launch.start(&mut site, None)?.trainer;
    assert_eq!(launch.budget()[Tier::DEVICE], vram_bytes, "what was refused changes no limit");
    assert_eq!(trainer.plan().bytes, launch.plan().planned.plan.bytes, "the plan that runs");
    let loss = trainer.step(&batches(&config, MICRO_BATCHES, 0), 1e-3)?.loss;
    Ok((site.refused, loss, trainer.memory_taken()))
}

/// One refusal must set the budget of the tier to what is available or slightly less, and change
/// nothing else.
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
    let mut resident =
        ReferenceTrainer::new(&config, options(Precision::Bf16Master)).expect("a trainer");
    let report = resident.step(&batches(&config, MICRO_BATCHES, 0), 1e-3).expect("a step");
    let (refused, loss, plenty) = launched(1 << 30, PLENTY).expect("it fits");
    assert_eq!((refused.len(), loss.to_bits()), (0, report.loss.to_bits()));

    let mut random = Random(3);
    // A failed allocation counts only the plan's block. A budget counts everything in use.
    for beside_bytes in [0, 500 << 20] {
        // Not so little that nothing fits.
        let device_bytes = (plenty[Tier::DEVICE] * 3 / 4 + random.below(1000)) as u64;
        let has = Has { device_bytes, beside_bytes, ..PLENTY };
        let (refused, loss, taken) = launched(1 << 30, has).expect("it fits");
        assert_eq!(loss.to_bits(), report.loss.to_bits());
        assert!(taken[Tier::DEVICE] as u64 <= device_bytes, "{taken:?}");
        check_budget(&refused, Budget::new(1 << 30, HOST_BYTES), Tier::DEVICE, device_bytes);
    }

    // With little device memory, much is stored on the host.
    let tight = (plenty[Tier::DEVICE] * 2 / 3) as u64;
    let (_, _, taken) = launched(tight, PLENTY).expect("it fits");
    let bytes = taken[Tier::HOST] as u64 * 19 / 20;
    for host in [Limit::Group(bytes), Limit::Locked(bytes), Limit::Silent(bytes)] {
        let (refused, loss, taken) =
            launched(tight, Has { host: Some(host), ..PLENTY }).expect("it fits");
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
    match launched(1 << 30, has) {
        Err(RunError::Train(TrainError::Plan(PlanError::TooSmall(problem)))) => {
            assert!(problem.min_bytes[Tier::DEVICE] > 1000);
        }
        other => panic!("{:?}", other.map(|(refused, ..)| refused)),
    }
}

/// If only the tokens of a step are given, less memory may mean smaller micro-batches.
#[test]
fn less_memory_may_mean_smaller_micro_batches() {
    let start = |has: Has| {
        let mut request = request(1 << 30);
        request.step = StepSize::Tokens(16 * request.options.sequence);
        let mut launch = Launch::new(request).expect("a plan");
        let before = launch.plan().batch;
        let launched = launch.start(&mut Site { has, refused: Vec::new() }, None).expect("it fits");
        let StepPlan { batch, accumulate, .. } = *launch.plan();
        assert_eq!((batch * accumulate, launched.trainer.options().batch), (16, batch));
        (before, batch, launched.trainer.memory_taken()[Tier::DEVICE] as u64)
    };
    let (before, roomy, _) = start(PLENTY);
    assert_eq!(before, roomy);
    // Not enough for micro-batches of that size under any plan.
    let mut given = request(0);
    (given.options.batch, given.step) = (roomy, StepSize::MicroBatches(16 / roomy));
    let Err(TrainError::Plan(PlanError::TooSmall(least))) = given.plan() else {
        panic!("no memory at all is too little")
    };
    let device_bytes = least.min_bytes[Tier::DEVICE] - 1;
    let (before, tight, taken) = start(Has { device_bytes, ..PLENTY });
    assert!(before == roomy && tight < roomy && taken <= device_bytes, "{tight} and {roomy}");
}
