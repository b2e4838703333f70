//! Optimizer state on disk: whatever is there, every bit is that of everything resident, or the run ends with an error.

use crate::exactness::reference;
use crate::lora::{adapted, patterned};
use crate::random_plans::Case;
use crate::support::{batches, options, planned_on, resident, tiny};
use std::path::PathBuf;
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_device::{DiskOptions, PlanDevice};
use storm_graph::{QuantizedFormat, TensorClass, Training};
use storm_host::{ScratchAccess, ScratchFault, ScratchFaultKind, ScratchFolder};
use storm_model::{Adapters, BaseFormat, LoraOptions, ModelConfig};
use storm_plan::{
    Budget, Decisions, Forced, HardwareProfile, Lasting, Link, LinkProfile, Lowering, OnDisk, Plan,
    Tier, UpdateTime, check, plan, random_decisions_with_disk, verify,
};
use storm_train::{Moments, Precision, Trainer, training_task};

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

    /// What is left in it.
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

/// Bytes of lasting tensors that are on disk.
fn bytes_on_disk(plan: &Plan) -> usize {
    let parts = plan.lasting.iter().flat_map(|lasting| {
        lasting.parts.iter().map(|&(piece, place)| (lasting.pieces[piece as usize], place))
    });
    let on_disk = parts.filter(|(_, place)| place.tier == Tier::DISK);
    on_disk.map(|(value, _)| plan.value(value).size_bytes).sum()
}

/// More with `STORM_LONG_TESTS=1`.
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
    /// Plans with frozen weights there.
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

/// Random plans with random delays; every sixth on a real disk.
fn compare(
    scratch: &Arc<ScratchFolder>,
    case: &Case<'_>,
    seeds: impl Iterator<Item = u64>,
) -> Seen {
    let mut seen = Seen::default();
    case.compare(&machine(), seeds, random_decisions_with_disk, |seed, decisions, plan, device| {
        seen.add(decisions, plan);
        let disk = DiskOptions { folder: Arc::clone(scratch), fault: None };
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
        let case = Case { name, config: &config, options: &options, micro_batches };
        let seen = compare(&scratch, &case, (part as u64..count(40)).step_by(3));
        deferred += seen.deferred;
        staged += seen.staged;
    }
    assert!(deferred > 5 && staged > 5, "{deferred} deferred, {staged} with full slots");
    drop(scratch);
    assert_eq!(folder.names(), Vec::<String>::new());
}

/// Both moments, whole and in 8 bits, with updates in the backward pass.
#[test]
fn updates_in_the_backward_pass() {
    let folder = Folder::new("in-backward");
    let scratch = folder.open();
    for (name, moments) in [("llama-3.2-1b", Moments::Int8), ("gpt2", Moments::Full)] {
        let config = tiny(name);
        let mut options = options(Precision::Bf16Stochastic);
        options.optimizer.moments = moments;
        options.optimizer.max_norm = None;
        let case = Case { name, config: &config, options: &options, micro_batches: 2 };
        let seen = compare(&scratch, &case, 0..count(18));
        assert!(seen.in_backward >= 6, "{name}: {}", seen.in_backward);
    }
}

/// Frozen weights beside adapters, as they are and in 8 bits.
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
        let case = Case { name, config: &config, options: &options, micro_batches };
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

/// The planner uses the disk only if host memory does not suffice, and as little as possible.
#[test]
fn the_planner_puts_on_disk_what_host_memory_cannot_hold() {
    let mut config = tiny("llama-3.2-1b");
    (config.hidden_size, config.head_dim, config.intermediate_size) = (64, 16, 160);
    config.layer_count = 8;
    let (options, profile) = (options(Precision::Bf16Stochastic), machine());
    let task = training_task(&config, &options, 2).expect("a valid model");
    let wide = Budget::of_each(1 << 40);
    let streamed = Forced {
        states: Some(storm_plan::Placement::Streamed),
        weights: Some(storm_plan::Placement::Streamed),
        gradients: Some(storm_plan::Placement::Streamed),
        ..Forced::default()
    };
    let in_memory = plan(&task, &profile, wide, &streamed).expect("enough of everything");
    assert_eq!(in_memory.plan.bytes[Tier::DISK], 0);
    let host = in_memory.plan.bytes[Tier::HOST] as u64;
    let device = in_memory.prediction.peak_bytes[Tier::DEVICE];

    let mut last = 0;
    for percent in [95, 90, 85] {
        let budget = Budget::new(device, host * percent / 100);
        let without = plan(&task, &profile, budget, &streamed);
        assert!(without.is_err(), "{percent} % of host memory are not enough");
        let found = plan(&task, &profile, budget.with(Tier::DISK, 1 << 30), &streamed);
        let found = found.unwrap_or_else(|error| panic!("{percent} %: {error}"));
        assert!(found.plan.bytes[Tier::HOST] as u64 <= budget[Tier::HOST]);
        let on_disk = bytes_on_disk(&found.plan);
        assert!(on_disk > last, "{percent} %: {on_disk} bytes on disk, {last} before");
        last = on_disk;
        verify(&found.plan, found.plan.bytes).expect("a sound plan");
        let names: Vec<&str> = (found.plan.lasting.iter())
            .filter(|lasting| lasting.parts.iter().any(|(_, place)| place.tier == Tier::DISK))
            .map(|lasting| lasting.tensor.name.rsplit('.').next().unwrap())
            .collect();
        // Second moments go first.
        assert!(names.contains(&"second_moment"), "{names:?}");
    }
    let tiny_disk = Budget::new(device, host * 85 / 100).with(Tier::DISK, 4096);
    let error = plan(&task, &profile, tiny_disk, &streamed).expect_err("too little").to_string();
    assert!(error.contains("on disk; given are 0.00 MiB"), "{error}");

    let forced = Forced { on_disk: Some(OnDisk::SecondMoments), ..streamed.clone() };
    let found = plan(&task, &profile, wide, &forced).expect("enough of everything");
    let first = |name: &str| name.ends_with("first_moment");
    for lasting in &found.plan.lasting {
        let name = lasting.tensor.name.as_str();
        let on_disk = lasting.parts.iter().any(|(_, place)| place.tier == Tier::DISK);
        assert!(!(first(name) && on_disk), "{name}");
        let is_layer = name.contains("layers.");
        assert!(on_disk || !is_layer || !name.ends_with("second_moment"), "{name}");
    }
    let error = plan(&task, &reference(), wide, &forced).expect_err("no disk").to_string();
    assert!(error.contains("no disk was given"), "{error}");
}

/// Frozen weights go to disk if host memory does not hold them; what learns stays off it, so that nothing is written.
#[test]
fn the_planner_puts_frozen_weights_on_disk() {
    let mut base = tiny("llama-3.2-1b");
    (base.hidden_size, base.head_dim, base.intermediate_size) = (64, 16, 160);
    base.layer_count = 8;
    let adapters = Adapters::new(&base, LoraOptions::new(2, 4.0)).expect("adapters that fit");
    let config = ModelConfig { adapters: Some(adapters), ..base };
    let (options, profile) = (options(Precision::Bf16Stochastic), machine());
    let task = training_task(&config, &options, 2).expect("a valid model");
    let wide = Budget::of_each(1 << 40);
    let streamed = Forced { weights: Some(storm_plan::Placement::Streamed), ..Forced::default() };
    let in_memory = plan(&task, &profile, wide, &streamed).expect("enough of everything");
    assert_eq!(in_memory.plan.bytes[Tier::DISK], 0);
    let host = in_memory.plan.bytes[Tier::HOST] as u64;
    let device = in_memory.prediction.peak_bytes[Tier::DEVICE];
    let expected = resident(&config, &options, 2);
    let folder = Folder::new("frozen-planned");
    let mut last = 0;
    for percent in [90, 60] {
        let budget = Budget::new(device, host * percent / 100);
        let without = plan(&task, &profile, budget, &streamed);
        assert!(without.is_err(), "{percent} % of host memory are not enough");
        let found = plan(&task, &profile, budget.with(Tier::DISK, 1 << 30), &streamed);
        let found = found.unwrap_or_else(|error| panic!("{percent} %: {error}"));
        assert!(found.plan.bytes[Tier::HOST] as u64 <= budget[Tier::HOST]);
        let on_disk = bytes_on_disk(&found.plan);
        assert!(on_disk > last, "{percent} %: {on_disk} bytes on disk, {last} before");
        last = on_disk;
        let queue = |link| found.plan.links.queue(link).expect("a disk");
        assert_eq!(found.simulation.bytes(queue(Link::HOST_TO_DISK)), 0);
        assert!(found.simulation.bytes(queue(Link::DISK_TO_HOST)) >= on_disk as u64);
        let disk = Some(DiskOptions { folder: folder.open(), fault: None });
        let device = CpuPlanOptions { threads: Some(1), disk, ..CpuPlanOptions::default() };
        assert_eq!(planned_on(&config, &options, found.plan, device), expected);
    }
    let forced = Forced { on_disk: Some(OnDisk::FrozenWeights), ..streamed };
    let found = plan(&task, &profile, wide, &forced).expect("enough of everything");
    for lasting in found.plan.lasting.iter().filter(|l| l.tensor.name.contains("layers.")) {
        let on_disk = lasting.parts.iter().any(|(_, place)| place.tier == Tier::DISK);
        let is_frozen = lasting.tensor.class == TensorClass::Parameter(Training::Frozen);
        assert_eq!(on_disk, is_frozen, "{}", lasting.tensor.name);
    }
}

/// Everything that a disk may do wrong ends in an error that says so, or changes nothing.
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
    let scratch = folder.open();
    use ScratchAccess::{Read, Write};
    use ScratchFaultKind::{Damage, Error, Short};
    for access in [Read, Write] {
        for kind in [Error, Short, Damage] {
            for every in [1, 5, 13] {
                let plan = lowering.lower_with_evaluation(&decisions).expect("decisions");
                let budget = plan.bytes;
                let plan = check(plan, budget).expect("a sound plan");
                let fault = Some(ScratchFault { access, every, kind });
                let disk = DiskOptions { folder: Arc::clone(&scratch), fault };
                let device = CpuPlanOptions {
                    threads: Some(1),
                    disk: Some(disk),
                    ..CpuPlanOptions::default()
                };
                // A short transfer is continued; a read that arrives damaged is repeated.
                if kind == Short || (kind == Damage && access == Read && every > 1) {
                    let found = planned_on(&config, &options, plan, device);
                    assert_eq!(found, expected, "{access:?} {kind:?} {every}");
                    continue;
                }
                let trainer =
                    Trainer::<CpuPlanDevice>::new(&config, options.clone(), Arc::new(plan), device);
                let outcome = trainer.and_then(|mut trainer| {
                    (0..10).try_for_each(|step| {
                        trainer.step(&batches(&config, 2, step), 1e-2).map(|_| ())
                    })?;
                    trainer.synchronize()
                });
                let message = outcome.expect_err("the fault").to_string();
                let wanted = match (kind, access) {
                    (Error, Read) => "reading",
                    (Error, _) => "writing",
                    _ => "not what was written",
                };
                assert!(message.contains(wanted), "{access:?} {kind:?} {every}: {message}");
                assert!(message.contains("scratch file"), "{message}");
            }
        }
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
    let disk = DiskOptions { folder: folder.open(), fault: None };
    let options = CpuPlanOptions { disk: Some(disk), ..CpuPlanOptions::default() };
    let error = CpuPlanDevice::commit(plan, options).expect_err("no such disk");
    let storm_device::DeviceError::Memory(refused) = &error else { panic!("{error}") };
    assert_eq!((refused.tier, refused.wanted_bytes), (Tier::DISK, 1 << 58));
    assert!(error.to_string().contains("of disk memory are needed"), "{error}");
    // The lock went with the options.
    assert_eq!(folder.names(), Vec::<String>::new());
}
