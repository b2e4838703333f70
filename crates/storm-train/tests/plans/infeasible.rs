//! What the planner reports if nothing fits.

use crate::models::{FAMILIES, budget, gib, least, profile, real_task, tiny, tiny_task};
use storm_plan::{
    Forced, HardwareProfile, Link, Lowering, Placement, PlanError, Storage, Task, Tier, plan,
    random_decisions,
};

const MIB: u64 = 1 << 20;

/// The reported minimum works, and a step less does not.
#[track_caller]
fn is_least(
    about: &str,
    task: &Task,
    profile: &HardwareProfile,
    ram: u64,
    forced: &Forced,
    step: u64,
) {
    let least = least(task, profile, ram, forced);
    let vram = least.min_bytes[Tier::DEVICE];
    assert!(least.min_bytes[Tier::HOST] <= ram, "{about}: {least:?}");
    let works = plan(task, profile, budget(vram, ram), forced)
        .unwrap_or_else(|error| panic!("{about}: {vram} bytes: {error}"));
    assert_eq!(works.vram_min_bytes, vram, "{about}");
    assert!(works.prediction.peak_bytes[Tier::DEVICE] <= vram, "{about}");
    match plan(task, profile, budget(vram - step, ram), forced) {
        Err(PlanError::TooSmall(smaller)) => {
            assert_eq!(smaller.min_bytes[Tier::DEVICE], vram, "{about}")
        }
        other => panic!("{about}: {} bytes: {:?}", vram - step, other.map(|p| p.prediction)),
    }
    let held: u64 = least.consumers.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(held, vram, "{about}: the consumers are all of it");
    assert!(least.consumers.is_sorted_by_key(|&(_, bytes)| std::cmp::Reverse(bytes)));
}

#[test]
fn the_least_budget_of_real_models() {
    let profile = profile("reference");
    let free = Forced::default();
    for (name, batch, micro_batches) in [("qwen2.5-0.5b", 4, 4), ("qwen2.5-7b", 2, 4)] {
        let task = real_task(name, batch, micro_batches);
        is_least(name, &task, &profile, gib(110), &free, MIB);
    }
}

#[test]
fn the_least_budget_with_little_host_memory() {
    let profile = profile("reference");
    let task = real_task("qwen2.5-0.5b", 4, 4);
    let roomy = least(&task, &profile, gib(64), &Forced::default());
    let mut last = roomy.min_bytes[Tier::DEVICE];
    for percent in [90, 60, 30, 5] {
        let ram = roomy.min_bytes[Tier::HOST] * percent / 100;
        is_least(&format!("{percent} %"), &task, &profile, ram, &Forced::default(), MIB);
        let vram = least(&task, &profile, ram, &Forced::default()).min_bytes[Tier::DEVICE];
        assert!(vram > last, "what the host does not hold is on the device");
        last = vram;
    }
}

#[test]
fn the_least_budget_of_forced_plans() {
    let profile = profile("reference");
    let task = real_task("qwen2.5-0.5b", 2, 4);
    let free = least(&task, &profile, gib(64), &Forced::default()).min_bytes[Tier::DEVICE];
    for forced in [
        Forced { weights: Some(Placement::Resident), ..Forced::default() },
        Forced { activations: Some(Storage::Keep), ..Forced::default() },
        Forced { layer_inputs: Some(Placement::Resident), ..Forced::default() },
    ] {
        is_least(&format!("{forced:?}"), &task, &profile, gib(64), &forced, MIB);
        let vram = least(&task, &profile, gib(64), &forced).min_bytes[Tier::DEVICE];
        assert!(vram > free, "{forced:?} takes {vram} instead of {free}");
    }
}

/// No plan is smaller than the reported minimum.
#[test]
fn random_plans_are_not_smaller() {
    let profile = profile("reference");
    for name in FAMILIES {
        let task = tiny_task(&tiny(name), 2);
        let least = least(&task, &profile, gib(1), &Forced::default()).min_bytes[Tier::DEVICE];
        is_least(name, &task, &profile, gib(1), &Forced::default(), 256);
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..2000 {
            let decisions = random_decisions(&task, seed);
            let bytes = lowering.memory(&decisions).expect("decisions that work");
            let vram = bytes[Tier::DEVICE] as u64 + profile.overhead_bytes;
            // Smaller pieces of optimizer state than the planner's take a little less.
            assert!(vram + 32 * 1024 >= least, "{name}: {vram} instead of {least}: {decisions:?}");
        }
    }
}

/// With almost no host memory, everything must be on the device, and the report says how much.
#[test]
fn no_host_memory() {
    let profile = profile("reference");
    let task = real_task("qwen2.5-0.5b", 2, 2);
    let report = least(&task, &profile, 1, &Forced::default());
    assert!(report.min_bytes[Tier::HOST] > 1, "batches come from the host");
    assert!(report.min_bytes[Tier::HOST] < MIB, "and nothing else has to: {report:?}");
    assert!(plan(&task, &profile, budget(gib(100), 1), &Forced::default()).is_err());
}

/// A machine without a link between host and device is named, with the missing link.
#[test]
fn hardware_without_a_link() {
    let machine = HardwareProfile { links: Vec::new(), ..profile("reference") };
    let task = tiny_task(&tiny(FAMILIES[0]), 2);
    let error = plan(&task, &machine, budget(gib(1), gib(1)), &Forced::default()).unwrap_err();
    let (hardware, link) = ("reference".to_owned(), Link::HOST_TO_DEVICE);
    assert_eq!(error, PlanError::NoLink { hardware, link });
    assert!(
        error.to_string().contains("`reference`: it has no link from host to device"),
        "{error}"
    );
}
