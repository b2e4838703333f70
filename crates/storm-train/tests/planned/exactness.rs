//! Random plans with random delays, against everything resident.

use crate::support::{options, planned, resident, tiny};
use storm_plan::{Decisions, HardwareProfile, Lowering, MemoryBudget, check, random_decisions};
use storm_train::{Precision, training_task};

/// Plans per family; more with `STORM_LONG_TESTS=1`.
fn plan_count() -> u64 {
    if std::env::var_os("STORM_LONG_TESTS").is_some() { 2000 } else { 200 }
}

fn random_plans_are_exact(name: &str) {
    let config = tiny(name);
    let profile = HardwareProfile::builtin("reference").expect("built in");
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
        let expected = resident(&config, &options, micro_batches);
        let task = training_task(&config, &options, micro_batches).expect("a valid model");
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..plan_count() / 4 {
            let seed = seed * 4 + part as u64;
            let decisions: Decisions = random_decisions(&task, seed);
            let plan = lowering.lower(&decisions).expect("decisions that work");
            let budget = MemoryBudget {
                device_bytes: plan.device_bytes,
                host_bytes: plan.host_bytes,
            };
            let plan = check(plan, budget).expect("a sound plan");
            let found = planned(&config, &options, plan, Some(seed));
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
