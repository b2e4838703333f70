//! No fixed policy is ever faster than what the planner finds.

use crate::models::{
    FAMILIES, budget, gib, least, planned, profile, real_task, small_card, tiny, tiny_task,
};
use storm_plan::{Budget, Forced, HardwareProfile, Task, Tier, policies};

/// Returns how many of the policies fit.
#[track_caller]
fn never_slower(about: &str, task: &Task, profile: &HardwareProfile, budget: Budget) -> usize {
    let seconds = planned(task, profile, budget).prediction.step_seconds;
    let policies = policies(task, profile, budget).expect("a task that can be planned");
    assert_eq!(policies.len(), 4);
    let mut fitting = 0;
    for policy in policies {
        let Some(prediction) = policy.prediction else { continue };
        fitting += 1;
        assert!(
            prediction.peak_bytes[Tier::DEVICE] <= budget[Tier::DEVICE],
            "{about}: {}",
            policy.name
        );
        assert!(
            prediction.peak_bytes[Tier::HOST] <= budget[Tier::HOST],
            "{about}: {}",
            policy.name
        );
        assert!(
            // The simpler of two plans may be up to a ten-thousandth slower, by sketch and by simulation.
            seconds <= prediction.step_seconds * 1.000_2,
            "{about}: {seconds} s, but {} takes {} s",
            policy.name,
            prediction.step_seconds
        );
    }
    fitting
}

#[test]
fn tiny_models_at_all_budgets() {
    let mut fitting = 0;
    for (bus, card) in [(2e9, "slow bus"), (5e10, "fast bus")] {
        let profile = small_card(1e12, bus);
        for name in FAMILIES {
            let task = tiny_task(&tiny(name), 4);
            let least = least(&task, &profile, 1 << 30, &Forced::default()).min_bytes[Tier::DEVICE];
            for percent in [100, 130, 200, 600] {
                let budget = budget(least * percent / 100, 1 << 30);
                fitting +=
                    never_slower(&format!("{name}, {card}, {percent} %"), &task, &profile, budget);
            }
        }
    }
    assert!(fitting > 40, "only {fitting} policies fit");
}

#[test]
fn real_models_on_real_cards() {
    let mut fitting = 0;
    for (name, card, vram) in [
        ("qwen2.5-0.5b", "reference", 8),
        ("qwen2.5-0.5b", "rtx-3060-12gb", 3),
        ("llama-3.2-1b", "rtx-4090", 12),
        ("llama-3.2-1b", "rtx-5060-ti-16gb", 6),
    ] {
        let task = real_task(name, 4, 4);
        let (profile, budget) = (profile(card), budget(gib(vram), gib(64)));
        fitting += never_slower(&format!("{name} on {card}"), &task, &profile, budget);
    }
    // Plans so large that the planner tries only a few.
    let task = real_task("qwen2.5-7b", 1, 64);
    fitting +=
        never_slower("7B, 64 in a group", &task, &profile("reference"), budget(gib(16), gib(110)));
    assert!(fitting > 12, "only {fitting} policies fit");
}
