//! Optimizer state on disk: every bit is that of everything resident, or the run ends with an
//! error.

use crate::exactness::reference;
use crate::lora::{adapted, patterned};
use crate::random_plans::Case;
use crate::support::{batches, options, planned_on, resident, tiny};
use std::path::PathBuf;
use std::sync::Arc;
use storm_device::cpu::{Bf16Products, CpuPlanDevice, CpuPlanOptions};
use storm_device::{DeviceError, DiskOptions, DiskProblem, PlanDevice};
use storm_exec::ExecError;
use storm_graph::{QuantizedFormat, TensorClass, Training};
use storm_host::{
    ScratchAccess, ScratchFault, ScratchFaultKind, ScratchFolder, ScratchOptions, ScratchWay,
};
use storm_model::{Adapters, BaseFormat, LoraOptions, ModelConfig};
use storm_plan::{
    Budget, Decisions, Forced, HardwareProfile, Lasting, Link, LinkProfile, Lowering, OnDisk, Plan,
    Planned, Task, Tier, UpdateTime, check, plan, random_decisions_with_disk, verify,
};
use storm_train::{Moments, Precision, TrainError, TrainOptions, Trainer, training_task};

/// The reference machine with a disk.
fn machine() -> HardwareProfile {
    let mut profile = reference();
    profile.links.push(LinkProfile {
        near: Tier::HOST,
        far: Tier::DISK,
        to_near_bandwidth: 3e9,
        to_far_bandwidth: 2e9,
        duplex_bandwidth: 4e9,
        latency_seconds: 1e-4,
    });
    profile
}

/// A folder on a disk, for this test alone.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("scratch-{name}-{}", std::process::id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    fn open(&self) -> Arc<ScratchFolder> {
        Arc::new(ScratchFolder::open(&self.0).expect("nobody else uses it"))
    }

    /// Options of a device with one thread.
    fn device(&self, scratch: ScratchOptions) -> CpuPlanOptions {
        let disk = Some(DiskOptions { folder: self.open(), scratch });
        CpuPlanOptions { threads: Some(1), disk, ..CpuPlanOptions::default() }
    }

    /// Names of the files left in it.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).expect("it is there");
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Bytes of lasting tensors on disk.
fn bytes_on_disk(plan: &Plan) -> usize {
    let parts = plan.lasting.iter().flat_map(|lasting| {
        lasting.parts.iter().map(|&(piece, place)| (lasting.pieces[piece as usize], place))
    });
    let on_disk = parts.filter(|(_, place)| place.tier == Tier::DISK);
    on_disk.map(|(value, _)| plan.value(value).size_bytes).sum()
}

/// Ten times as many with `STORM_LONG_TESTS=1`.
fn count(short: u64) -> u64 {
    if std::env::var_os("STORM_LONG_TESTS").is_some() { 10 * short } else { short }
}

/// What random plans had on disk.
#[derive(Default)]
struct Seen {
    /// Plans whose updates are deferred.
    deferred: usize,
    /// Plans that begin a step with full slots.
    staged: usize,
    /// Plans whose updates are in the backward pass.
    in_backward: usize,
    /// Plans with frozen weights on disk.
    frozen: usize,
}

impl Seen {
    fn add(&mut self, decisions: &Decisions, plan: &Plan) {
        let on_disk = bytes_on_disk(plan);
        assert!(plan.bytes[Tier::DISK] >= on_disk);
        let is_state = |lasting: &&Lasting| lasting.tensor.class == TensorClass::OptimizerState;
        let has = |lasting: &Lasting, tier: Tier| lasting.parts.iter().any(|(_, p)| p.tier == tier);
        let mut states = plan.lasting.iter().filter(is_state);
        let state = states.clone().any(|lasting| has(lasting, Tier::DISK));
        self.deferred += usize::from(state && decisions.update == UpdateTime::NextStep);
        self.in_backward += usize::from(state && decisions.update == UpdateTime::InBackward);
        self.staged += usize::from(states.any(|lasting| has(lasting, Tier::HOST)));
        let mut weights = plan.lasting.iter().filter(|lasting| !is_state(lasting));
        self.frozen += usize::from(weights.any(|lasting| has(lasting, Tier::DISK)));
    }
}

/// Random plans with random delays. Every sixth uses a real disk, with each way to access it in
/// turn.
fn compare(
    scratch: &Arc<ScratchFolder>,
    case: &Case<'_>,
    seeds: impl Iterator<Item = u64>,
) -> Seen {
    let mut seen = Seen::default();
    case.compare(&machine(), seeds, random_decisions_with_disk, |seed, decisions, plan, device| {
        seen.add(decisions, plan);
        let way = ScratchWay::ALL[(seed / 6) as usize % ScratchWay::ALL.len()];
        let options = ScratchOptions { way, fault: None };
        let disk = DiskOptions { folder: Arc::clone(scratch), scratch: options };
        device.disk = seed.is_multiple_of(6).then_some(disk);
    });
    seen
}

fn random_plans_are_exact(name: &str) {
    let config = tiny(name);
    let folder = Folder::new(name);
    let scratch = folder.open();
    let (mut deferred, mut staged) = (0, 0);
    for (part, (precision, moments, micro_batches)) in [
        (Precision::Bf16Stochastic, Moments::Full, 3),
        (Precision::Bf16Master, Moments::Int8, 2),
        (Precision::F32, Moments::Full, 1),
    ]
    .into_iter()
    .enumerate()
    {
        let mut options = options(precision);
        options.optimizer.moments = moments;
        let case = Case {
            name,
            config: &config,
            options: &options,
            micro_batches,
            products: Bf16Products::Fma,
        };
        let seen = compare(&scratch, &case, (part as u64..count(40)).step_by(3));
        deferred += seen.deferred;
        staged += seen.staged;
    }
    assert!(deferred > 5 && staged > 5, "{deferred} deferred, {staged} with full slots");
    drop(scratch);
    assert_eq!(folder.names(), Vec::<String>::new());
}

/// Both moments, in full and in 8 bits, with updates in the backward pass.
#[test]
fn updates_in_the_backward_pass() {
    let folder = Folder::new("in-backward");
    let scratch = folder.open();
    for (name, moments) in [("llama-3.2-1b", Moments::Int8), ("gpt2", Moments::Full)] {
        let config = tiny(name);
        let mut options = options(Precision::Bf16Stochastic);
        options.optimizer.moments = moments;
        options.optimizer.max_norm = None;
        let case = Case {
            name,
            config: &config,
            options: &options,
            micro_batches: 2,
            products: Bf16Products::Fma,
        };
        let seen = compare(&scratch, &case, 0..count(18));
        assert!(seen.in_backward >= 6, "{name}: {}", seen.in_backward);
    }
}

/// Frozen weights of models with adapters, in full and in 8 bits.
#[test]
fn frozen_weights() {
    let folder = Folder::new("frozen");
    let scratch = folder.open();
    let quantized = |config: ModelConfig| {
        let base = BaseFormat::Quantized(QuantizedFormat::Int8);
        ModelConfig { base, ..config }
    };
    for (name, config, micro_batches) in [
        ("adapters", adapted("gpt2", LoraOptions::new(3, 6.0)), 3),
        ("adapters of some modules", patterned("mistral-7b"), 2),
        ("adapters beside int8", quantized(adapted("qwen3-0.6b", LoraOptions::new(3, 6.0))), 2),
    ] {
        let options = options(Precision::Bf16Stochastic);
        let case = Case {
            name,
            config: &config,
            options: &options,
            micro_batches,
            products: Bf16Products::Fma,
        };
        let seen = compare(&scratch, &case, 0..count(24));
        assert!(seen.frozen >= 12, "{name}: {}", seen.frozen);
    }
}

#[test]
fn gpt2() {
    random_plans_are_exact("gpt2");
}

#[test]
fn llama() {
    random_plans_are_exact("llama-3.2-1b");
}

#[test]
fn mistral() {
    random_plans_are_exact("mistral-7b");
}

#[test]
fn qwen2() {
    random_plans_are_exact("qwen2.5-0.5b");
}

#[test]
fn qwen3() {
    random_plans_are_exact("qwen3-0.6b");
}

/// A task of eight layers, and the memory that it takes without a disk.
struct Planning {
    task: Task,
    profile: HardwareProfile,
    forced: Forced,
    device: u64,
    host: u64,
    /// Bytes on disk in the last plan.
    last: usize,
}

/// Enough of everything.
fn wide() -> Budget {
    Budget::of_each(1 << 40)
}

/// A model large enough that its state does not fit into the memory that plans need anyway.
fn eight_layers() -> ModelConfig {
    let mut config = tiny("llama-3.2-1b");
    (config.hidden_size, config.head_dim, config.intermediate_size) = (64, 16, 160);
    config.layer_count = 8;
    config
}

impl Planning {
    fn new(config: &ModelConfig, options: &TrainOptions, forced: Forced) -> Planning {
        let profile = machine();
        let task = training_task(config, options, 2).expect("a valid model");
        let in_memory = plan(&task, &profile, wide(), &forced).expect("enough of everything");
        assert_eq!(in_memory.plan.bytes[Tier::DISK], 0);
        let host = in_memory.plan.bytes[Tier::HOST] as u64;
        let device = in_memory.prediction.peak_bytes[Tier::DEVICE];
        Planning { task, profile, forced, device, host, last: 0 }
    }

    /// This percentage of the host memory that a plan without a disk takes.
    fn budget(&self, percent: u64) -> Budget {
        Budget::new(self.device, self.host * percent / 100)
    }

    /// A plan with less host memory than the previous one, and more on disk.
    fn within(&mut self, percent: u64) -> Planned {
        let budget = self.budget(percent);
        let without = plan(&self.task, &self.profile, budget, &self.forced);
        assert!(without.is_err(), "{percent} % of host memory are not enough");
        let budget = budget.with(Tier::DISK, 1 << 30);
        let found = plan(&self.task, &self.profile, budget, &self.forced);
        let found = found.unwrap_or_else(|error| panic!("{percent} %: {error}"));
        assert!(found.plan.bytes[Tier::HOST] as u64 <= budget[Tier::HOST]);
        let (on_disk, last) = (bytes_on_disk(&found.plan), self.last);
        assert!(on_disk > last, "{percent} %: {on_disk} bytes on disk, {last} before");
        self.last = on_disk;
        found
    }

    /// The plan with this on disk, given enough of everything.
    fn with_on_disk(&self, on_disk: OnDisk) -> Planned {
        let forced = Forced { on_disk: Some(on_disk), ..self.forced.clone() };
        plan(&self.task, &self.profile, wide(), &forced).expect("enough of everything")
    }
}

fn is_on_disk(lasting: &Lasting) -> bool {
    lasting.parts.iter().any(|(_, place)| place.tier == Tier::DISK)
}

/// The planner uses the disk only if host memory is too small, and as little as possible.
#[test]
fn the_planner_puts_on_disk_what_host_memory_cannot_hold() {
    let streamed = Forced {
        states: Some(storm_plan::Placement::Streamed),
        weights: Some(storm_plan::Placement::Streamed),
        gradients: Some(storm_plan::Placement::Streamed),
        ..Forced::default()
    };
    let options = options(Precision::Bf16Stochastic);
    let mut planning = Planning::new(&eight_layers(), &options, streamed);
    for percent in [95, 90, 85] {
        let found = planning.within(percent);
        verify(&found.plan, found.plan.bytes).expect("a sound plan");
        let names: Vec<&str> = (found.plan.lasting.iter())
            .filter(|lasting| is_on_disk(lasting))
            .map(|lasting| lasting.tensor.name.rsplit('.').next().unwrap())
            .collect();
        // Second moments go first.
        assert!(names.contains(&"second_moment"), "{names:?}");
    }
    let Planning { task, profile, forced, .. } = &planning;
    let tiny_disk = planning.budget(85).with(Tier::DISK, 4096);
    let error = plan(task, profile, tiny_disk, forced).expect_err("too little").to_string();
    assert!(error.contains("on disk; given are 0.00 MiB"), "{error}");

    let found = planning.with_on_disk(OnDisk::SecondMoments);
    let first = |name: &str| name.ends_with("first_moment");
    for lasting in &found.plan.lasting {
        let (name, on_disk) = (lasting.tensor.name.as_str(), is_on_disk(lasting));
        assert!(!(first(name) && on_disk), "{name}");
        let is_layer = name.contains("layers.");
        assert!(on_disk || !is_layer || !name.ends_with("second_moment"), "{name}");
    }
    let forced = Forced { on_disk: Some(OnDisk::SecondMoments), ..forced.clone() };
    let error = plan(task, &reference(), wide(), &forced).expect_err("no disk").to_string();
    assert!(error.contains("no disk was given"), "{error}");
}

/// Frozen weights go to disk if host memory cannot hold them. What learns stays off it, so nothing
/// is written.
#[test]
fn the_planner_puts_frozen_weights_on_disk() {
    let base = eight_layers();
    let adapters = Adapters::new(&base, LoraOptions::new(2, 4.0)).expect("adapters that fit");
    let config = ModelConfig { adapters: Some(adapters), ..base };
    let options = options(Precision::Bf16Stochastic);
    let streamed = Forced { weights: Some(storm_plan::Placement::Streamed), ..Forced::default() };
    let mut planning = Planning::new(&config, &options, streamed);
    let expected = resident(&config, &options, 2);
    let folder = Folder::new("frozen-planned");
    for percent in [90, 60] {
        let found = planning.within(percent);
        let queue = |link| found.plan.links.queue(link).expect("a disk");
        assert_eq!(found.simulation.bytes(queue(Link::HOST_TO_DISK)), 0);
        assert!(found.simulation.bytes(queue(Link::DISK_TO_HOST)) >= planning.last as u64);
        let device = folder.device(ScratchOptions::default());
        assert_eq!(planned_on(&config, &options, found.plan, device), expected);
    }
    let found = planning.with_on_disk(OnDisk::FrozenWeights);
    for lasting in found.plan.lasting.iter().filter(|l| l.tensor.name.contains("layers.")) {
        let is_frozen = lasting.tensor.class == TensorClass::Parameter(Training::Frozen);
        assert_eq!(is_on_disk(lasting), is_frozen, "{}", lasting.tensor.name);
    }
}

/// Every disk fault ends in an error that names it, or changes nothing.
#[test]
fn a_disk_that_goes_wrong() {
    let (config, options) = (tiny("qwen2.5-0.5b"), options(Precision::Bf16Stochastic));
    let profile = machine();
    let task = training_task(&config, &options, 2).expect("a valid model");
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    let seed = (0..100).find(|&seed| {
        let decisions = random_decisions_with_disk(&task, seed);
        let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
        decisions.update == UpdateTime::NextStep
            && plan.bytes[Tier::DISK] >= 6 * 4096
            && decisions.disk_ring < 4
    });
    let decisions = random_decisions_with_disk(&task, seed.expect("one of a hundred"));
    let expected = resident(&config, &options, 2);
    let folder = Folder::new("faults");
    use ScratchAccess::{Read, Write};
    use ScratchFaultKind::{Damage, Error, Full, Short};
    let ways = [ScratchWay::Ring, ScratchWay::Direct];
    let kinds = [(Read, Error), (Read, Short), (Read, Damage), (Write, Error), (Write, Full)];
    let kinds = kinds.into_iter().chain([(Write, Short), (Write, Damage)]);
    let faults = kinds
        .flat_map(|(access, kind)| [1, 5, 13].map(|every| ScratchFault { access, every, kind }));
    for (way, fault) in faults.flat_map(|fault| ways.map(|way| (way, fault))) {
        let ScratchFault { access, every, kind } = fault;
        let case = format!("{way:?} {fault:?}");
        let plan = lowering.lower_with_evaluation(&decisions).expect("decisions");
        let budget = plan.bytes;
        let plan = check(plan, budget).expect("a sound plan");
        let device = folder.device(ScratchOptions { way, fault: Some(fault) });
        // A short transfer is continued. A damaged read is repeated.
        if kind == Short || (kind == Damage && access == Read && every > 1) {
            assert_eq!(planned_on(&config, &options, plan, device), expected, "{case}");
            continue;
        }
        let trainer =
            Trainer::<CpuPlanDevice>::new(&config, options.clone(), Arc::new(plan), device);
        let outcome = trainer.and_then(|mut trainer| {
            (0..10)
                .try_for_each(|step| trainer.step(&batches(&config, 2, step), 1e-2).map(|_| ()))?;
            trainer.synchronize()
        });
        let error = outcome.expect_err(&case);
        let TrainError::Exec(ExecError::Device(DeviceError::Disk { problem, reason })) = &error
        else {
            panic!("{case}: {error}")
        };
        let (wanted, words) = match (kind, access) {
            (Full, _) => (DiskProblem::Full, "the disk is full"),
            (Error, Read) => (DiskProblem::Faulty, "reading"),
            (Error, Write) => (DiskProblem::Faulty, "writing"),
            _ => (DiskProblem::Faulty, "not what was written"),
        };
        assert_eq!(*problem, wanted, "{case}: {reason}");
        assert!(reason.contains(words) && reason.contains("scratch file"), "{case}: {reason}");
    }
}

#[test]
fn a_disk_without_room_says_what_is_needed() {
    let (config, options) = (tiny("qwen2.5-0.5b"), options(Precision::Bf16Stochastic));
    let profile = machine();
    let task = training_task(&config, &options, 1).expect("a valid model");
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    let mut plan =
        lowering.lower(&random_decisions_with_disk(&task, 1)).expect("decisions that work");
    assert!(plan.bytes[Tier::DISK] > 0);
    // More than any disk has.
    plan.bytes[Tier::DISK] = 1 << 58;
    let budget = plan.bytes;
    let plan = Arc::new(check(plan, budget).expect("a sound plan"));
    let folder = Folder::new("full");
    let device = folder.device(ScratchOptions::default());
    let error = CpuPlanDevice::commit(plan, device).expect_err("no such disk");
    let DeviceError::Memory(refused) = &error else { panic!("{error}") };
    assert_eq!((refused.tier, refused.wanted_bytes), (Tier::DISK, 1 << 58));
    assert!(error.to_string().contains("of disk memory are needed"), "{error}");
    // The lock was released with the options.
    assert_eq!(folder.names(), Vec::<String>::new());
}
