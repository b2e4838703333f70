//! No fixed policy is ever faster than what the planner finds.

use crate::models::{
    FAMILIES, budget, gib, least, planned, profile, real_task, small_card, tiny, tiny_task,
};
use storm_plan::{Budget, Forced, HardwareProfile, Task, policies};

/// How many of the policies fit.
#[track_caller]
fn never_slower(about: &str, task: &Task, profile: &HardwareProfile, budget: Budget) -> usize {
    let seconds = planned(task, profile, budget).prediction.step_seconds;
    let policies = policies(task, profile, budget).expect("a task that can be planned");
    assert_eq!(policies.len(), 4);
    let mut fitting = 0;
    for policy in policies {
        let Some(prediction) = policy.prediction else { continue };
        fitting += 1;
        assert!(prediction.vram_peak_bytes <= budget.vram_bytes, "{about}: {}", policy.name);
        assert!(prediction.ram_peak_bytes <= budget.ram_bytes, "{about}: {}", policy.name);
        assert!(
            // The simpler of two equal plans may be a few millionths slower.
            seconds <= prediction.step_seconds * 1.000_01,
            "{about}: {seconds} s, but {} takes {} s",
            policy.name,
            prediction.step_seconds
        );
    }
    fitting
}

#[test]
fn tiny_models_at_all_budgets() {
    // Takes minutes.
    if std::env::var_os("STORM_LONG_TESTS").is_none() {
        return;
    }
    let mut fitting = 0;
    for (bus, card) in [(2e9, "slow bus"), (5e10, "fast bus")] {
        let profile = small_card(1e12, bus);
        for name in FAMILIES {
            let task = tiny_task(&tiny(name), 4);
            let least = least(&task, &profile, 1 << 30, &Forced::default()).vram_min_bytes;
            for percent in [100, 120, 150, 200, 400, 1000] {
                let budget = budget(least * percent / 100, 1 << 30);
                fitting +=
                    never_slower(&format!("{name}, {card}, {percent} %"), &task, &profile, budget);
            }
        }
    }
    assert!(fitting > 60, "only {fitting} policies fit");
}

#[test]
fn real_models_on_real_cards() {
    // Takes minutes.
    if std::env::var_os("STORM_LONG_TESTS").is_none() {
        return;
    }
    let mut fitting = 0;
    for (card, vram) in [("reference", 8), ("rtx-4090", 23), ("rtx-3060-12gb", 6)] {
        let profile = profile(card);
        for (name, batch, micro_batches) in [("qwen2.5-0.5b", 4, 8), ("llama-3.2-1b", 8, 4)] {
            let task = real_task(name, batch, micro_batches);
            let budget = budget(gib(vram), gib(64));
            fitting += never_slower(&format!("{name} on {card}"), &task, &profile, budget);
        }
    }
    let task = real_task("qwen2.5-7b", 4, 4);
    fitting += never_slower("7B", &task, &profile("reference"), budget(gib(12), gib(110)));
    // Plans so large that only a few are tried.
    let task = real_task("qwen2.5-7b", 1, 64);
    fitting +=
        never_slower("7B, 64 in a group", &task, &profile("reference"), budget(gib(16), gib(110)));
    assert!(fitting > 16, "only {fitting} policies fit");
}
