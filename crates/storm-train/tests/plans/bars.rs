//! What the planner must reach on the reference card, whose figures are round and never change.

use crate::models::{budget, gib, planned, profile, real_options, real_task};
use storm_model::preset;
use storm_plan::{Forced, HardwareProfile, Planned, Queue, RankPlace, TensorKind, Tier};
use storm_train::{LaunchRequest, StepSize};

/// Enough for everything here.
const RAM: u64 = 110 << 30;

#[track_caller]
fn reaches(model: &str, vram_bytes: u64, tokens: usize, wanted: f64) {
    let request = LaunchRequest {
        rank: RankPlace::default(),
        decided: None,
        model: preset(model).expect("a preset").into(),
        options: real_options(1),
        step: StepSize::Tokens(tokens),
        profile: profile("reference"),
        budget: budget(vram_bytes, RAM),
        forced: Forced::default(),
        trial: None,
    };
    let chosen = request.plan().unwrap();
    let prediction = &chosen.planned.prediction;
    let speed = tokens as f64 / prediction.step_seconds;
    let about = format!("{model} with micro-batches of {}: {prediction:#?}", chosen.batch);
    assert_eq!(chosen.batch * chosen.accumulate * 1024, tokens, "{about}");
    assert!(prediction.peak_bytes[Tier::DEVICE] <= vram_bytes, "{about}");
    assert!(prediction.peak_bytes[Tier::HOST] <= RAM, "{about}");
    assert!(speed >= wanted, "{speed:.0} tokens/s instead of {wanted}: {about}");
}

#[test]
fn qwen_7b_in_16_gib() {
    reaches("qwen2.5-7b", gib(16), 65_536, 11_000.0);
}

#[test]
fn qwen_1_5b_in_9_gb() {
    reaches("qwen2.5-1.5b", 9_000_000_000, 131_072, 47_000.0);
}

fn offloaded_per_token(planned: &Planned, tokens: usize) -> f64 {
    let holdings = planned.plan.holdings();
    let activations = holdings.iter().find(|h| h.kind == TensorKind::Activations).expect("a kind");
    activations.copied_bytes[Queue::DEVICE_TO_HOST] as f64 / tokens as f64
}

/// A card with a slow matrix unit on the same kind of bus offloads where a fast one recomputes.
#[test]
fn a_small_card_offloads_more_and_recomputes_less() {
    let (batch, micro_batches) = (2, 8);
    let task = real_task("qwen2.5-7b", batch, micro_batches);
    let plan_on = |profile: &HardwareProfile| planned(&task, profile, budget(gib(12), 2 * RAM));
    let (small, large) = (plan_on(&profile("rtx-3060-12gb")), plan_on(&profile("reference")));
    let tokens = batch * micro_batches * 1024;
    let [on_small, on_large] = [&small, &large].map(|planned| offloaded_per_token(planned, tokens));
    assert!(on_small > 2.0 * on_large, "{on_small} and {on_large} bytes a token are offloaded");
    let [on_small, on_large] = [&small, &large].map(|p| p.prediction.recompute_fraction);
    assert!(on_small < 0.5 * on_large, "{on_small} and {on_large} of the time are spent again");
}

/// If everything fits, nothing is copied for a gain of microseconds.
#[test]
fn nothing_is_offloaded_where_everything_fits() {
    let task = real_task("qwen2.5-1.5b", 16, 8);
    for vram in [60, 130] {
        let planned = planned(&task, &profile("h200"), budget(gib(vram), RAM));
        for queue in [Queue::HOST_TO_DEVICE, Queue::DEVICE_TO_HOST] {
            let holdings = planned.plan.holdings();
            let copied: u64 = holdings.iter().map(|held| held.copied_bytes[queue]).sum();
            assert!(copied < 1 << 24, "{copied} bytes are copied in {vram} GiB: {holdings:#?}");
        }
    }
}
