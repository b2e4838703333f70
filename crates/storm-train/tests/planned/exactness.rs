//! Random plans with random delays, against everything resident.

use crate::support::{options, planned, resident, tiny};
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_model::ModelConfig;
use storm_plan::{
    Budget, Decisions, Forced, HardwareProfile, Lowering, Tier, check, plan, random_decisions,
};
use storm_train::{Precision, TrainOptions, Trainer, training_task};

const FAMILIES: [&str; 5] = ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"];

pub(crate) fn reference() -> HardwareProfile {
    HardwareProfile::builtin("reference").expect("built in")
}

/// Plans per family; more with `STORM_LONG_TESTS=1`.
fn plan_count() -> u64 {
    if std::env::var_os("STORM_LONG_TESTS").is_some() { 2000 } else { 200 }
}

fn random_plans_are_exact(name: &str) {
    random_plans_of_config_are_exact(name, &tiny(name), plan_count());
}

pub(crate) fn random_plans_of_config_are_exact(name: &str, config: &ModelConfig, count: u64) {
    random_plans_of_options_are_exact(name, config, options, count);
}

pub(crate) fn random_plans_of_options_are_exact(
    name: &str,
    config: &ModelConfig,
    options: impl Fn(Precision) -> TrainOptions,
    count: u64,
) {
    let profile = reference();
    for (part, (precision, micro_batches)) in [
        (Precision::Bf16Stochastic, 4),
        (Precision::Bf16Master, 2),
        (Precision::F32, 3),
        (Precision::Bf16Stochastic, 1),
    ]
    .into_iter()
    .enumerate()
    {
        let options = options(precision);
        let expected = resident(config, &options, micro_batches);
        let task = training_task(config, &options, micro_batches).expect("a valid model");
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..count / 4 {
            let seed = seed * 4 + part as u64;
            let decisions: Decisions = random_decisions(&task, seed);
            let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
            let budget = plan.bytes;
            let plan = check(plan, budget)
                .unwrap_or_else(|error| panic!("{name} seed {seed}: {error}\n{decisions:?}"));
            let found = planned(config, &options, plan, Some(seed));
            assert_eq!(found, expected, "{name} {precision:?} seed {seed}: {decisions:?}");
        }
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

/// What the planner itself chooses, from the smallest budget that works to one that holds
/// everything.
#[test]
fn the_planners_choice_is_exact_at_every_budget() {
    let profile = HardwareProfile { overhead_bytes: 0, ..reference() };
    for name in FAMILIES {
        let config = tiny(name);
        let options = options(Precision::Bf16Stochastic);
        let micro_batches = 2;
        let expected = resident(&config, &options, micro_batches);
        let task = training_task(&config, &options, micro_batches).expect("a valid model");
        let ample = Budget::new(1 << 40, 1 << 40);
        let forced = Forced::default();
        let everything = plan(&task, &profile, ample, &forced).expect("a plan");
        let most = everything.prediction.peak_bytes[Tier::DEVICE];
        let least = everything.vram_min_bytes;
        assert!(least < most / 2, "{name}: {least} of {most} bytes");
        for part in 0..5 {
            let vram_bytes = least + (most - least) * part / 4;
            let budget = ample.with(Tier::DEVICE, vram_bytes);
            let chosen = plan(&task, &profile, budget, &forced).expect("a plan");
            let predicted = chosen.prediction.clone();
            assert!(predicted.peak_bytes[Tier::DEVICE] <= vram_bytes, "{name} at {vram_bytes}");
            let device = CpuPlanOptions::default();
            let trainer: Trainer<CpuPlanDevice> =
                Trainer::new(&config, options.clone(), chosen.plan.clone().into(), device)
                    .expect("a trainer");
            let taken = trainer.memory_taken();
            assert_eq!(taken[Tier::DEVICE] as u64, predicted.peak_bytes[Tier::DEVICE]);
            assert_eq!(taken[Tier::HOST] as u64, predicted.peak_bytes[Tier::HOST]);
            drop(trainer);
            let found = planned(&config, &options, chosen.plan, Some(part));
            assert_eq!(found, expected, "{name} at {vram_bytes} bytes: {:?}", chosen.decisions);
        }
    }
}
