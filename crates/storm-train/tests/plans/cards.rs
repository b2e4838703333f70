//! Every built-in card plans a model.

use crate::models::{budget, gib, planned, profile, real_task, tiny, tiny_task};
use storm_model::ModelConfig;
use storm_plan::HardwareProfile;

#[test]
fn every_built_in_card_plans_a_small_model() {
    let config = ModelConfig { layer_count: 2, ..tiny("qwen2.5-0.5b") };
    let task = tiny_task(&config, 2);
    for name in HardwareProfile::builtin_names() {
        let card = profile(name);
        let all = budget(card.memory_bytes, gib(1));
        let seconds = planned(&task, &card, all).prediction.step_seconds;
        assert!(seconds.is_finite() && seconds > 0.0, "{name}: {seconds}");
    }
}

/// Cards with more of everything are faster.
#[test]
fn better_cards_are_faster() {
    let task = real_task("qwen2.5-0.5b", 4, 1);
    let cards = ["rtx-4060", "rtx-4080", "rtx-5090"];
    let seconds = cards.map(|name| {
        planned(&task, &profile(name), budget(gib(6), gib(32))).prediction.step_seconds
    });
    assert!(seconds.is_sorted_by(|slow, fast| slow > fast), "{seconds:?}");
}
