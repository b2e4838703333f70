//! The block-level estimate that guides the search, and its results.

use crate::models::{
    FAMILIES, adapted, budget, gib, planned, profile, real_task, small_card, tiny, tiny_options,
    with_disk,
};
use storm_plan::{
    Decisions, HardwareProfile, Lowering, Task, random_decisions, random_decisions_with_disk,
    simulate,
};
use storm_train::training_task;

/// Enough for everything here.
const RAM: u64 = 110 << 30;

/// Ratio of the estimate of decisions to the simulation of their plan.
fn ratio(task: &Task, profile: &HardwareProfile, decisions: &Decisions) -> f64 {
    let lowering = Lowering::new(task, profile).unwrap();
    let plan = lowering.lower(decisions).unwrap();
    let estimate = lowering.estimate_seconds(decisions).unwrap();
    estimate / simulate(&plan, profile).step_seconds
}

#[test]
fn estimates_of_random_decisions_are_close_to_their_simulation() {
    // First the copies are the limit, then the kernels.
    for profile in [small_card(1e9, 1e7), small_card(1e9, 1e9)] {
        for name in FAMILIES {
            let task = training_task(tiny(name), &tiny_options(), 6).unwrap();
            let ratios: Vec<f64> = (0..24)
                .map(|seed| ratio(&task, &profile, &random_decisions(&task, seed)))
                .collect();
            let worst = ratios.iter().map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max);
            let mean = ratios.iter().map(|ratio| (ratio - 1.0).abs()).sum::<f64>() / 24.0;
            assert!(worst < 0.12 && mean < 0.03, "{name}: {mean}, {worst}: {ratios:?}");
        }
    }
}

#[test]
fn estimates_with_a_disk_are_close_to_their_simulation() {
    // First the disk is the limit, then it is not.
    for profile in
        [with_disk(small_card(1e9, 1e8), 2e7, 1e7), with_disk(small_card(1e9, 1e7), 1e8, 1e8)]
    {
        for config in [tiny("gpt2"), tiny("qwen3-0.6b"), adapted(tiny("llama-3.2-1b"))] {
            let task = training_task(&config, &tiny_options(), 6).unwrap();
            let ratios: Vec<f64> = (0..24)
                .map(|seed| ratio(&task, &profile, &random_decisions_with_disk(&task, seed)))
                .collect();
            let worst = ratios.iter().map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max);
            let mean = ratios.iter().map(|ratio| (ratio - 1.0).abs()).sum::<f64>() / 24.0;
            assert!(worst < 0.15 && mean < 0.04, "{mean}, {worst}: {ratios:?}");
        }
    }
}

#[test]
fn few_plans_are_built_and_their_estimates_hold() {
    for (model, batch, micro_batches, vram_bytes) in [
        ("qwen2.5-7b", 32, 2, 11_500_000_000),
        ("qwen2.5-7b", 32, 512, gib(16)),
        ("gpt2", 8, 4, gib(2)),
    ] {
        let task = real_task(model, batch, micro_batches);
        let profile = profile("h200");
        let planned = planned(&task, &profile, budget(vram_bytes, RAM));
        assert!(planned.plans_built <= 6, "{model}: {} plans", planned.plans_built);
        let ratio = ratio(&task, &profile, &planned.decisions);
        assert!((ratio - 1.0).abs() < 0.005, "{model}: the estimate is off by {ratio}");
    }
}

#[test]
fn two_more_gigabytes_make_a_step_faster() {
    let task = real_task("qwen2.5-1.5b", 16, 8);
    let seconds = |vram_bytes: u64| {
        planned(&task, &profile("h200"), budget(vram_bytes, RAM)).prediction.step_seconds
    };
    let (nine, eleven) = (seconds(9_000_000_000), seconds(11_000_000_000));
    assert!(nine <= 2.61, "{nine} s in 9 GB");
    assert!(eleven <= 0.993 * nine, "{nine} s in 9 GB, {eleven} s in 11");
}

#[test]
fn more_memory_is_never_slower() {
    let profile = small_card(1e9, 2e7);
    let task = training_task(tiny("qwen3-0.6b"), &tiny_options(), 4).unwrap();
    let mut last = f64::INFINITY;
    for kilobytes in [170, 190, 220, 260, 300, 400, 600, 1000] {
        let planned = planned(&task, &profile, budget(kilobytes << 10, RAM));
        let seconds = planned.prediction.step_seconds;
        // The simpler of two plans may be a ten-thousandth slower.
        assert!(seconds <= last * 1.000_2, "{seconds} s in {kilobytes} KiB, {last} s in less");
        last = seconds;
    }
}
