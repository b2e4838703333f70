//! The size of micro-batches, if only the tokens of a step are given.

use crate::models::{
    budget, gib, least, profile, real_options, real_task, small_card, tiny, tiny_options,
};
use storm_model::preset;
use storm_plan::{Forced, PlanError, RankPlace, Tier};
use storm_train::{LaunchRequest, StepPlan, StepSize, TrainError};

#[track_caller]
fn chosen(model: &str, tokens: usize, vram_bytes: u64) -> Result<StepPlan, TrainError> {
    let request = LaunchRequest {
        rank: RankPlace::default(),
        decided: None,
        model: preset(model).expect("a preset").into(),
        options: real_options(1),
        step: StepSize::Tokens(tokens),
        profile: profile("reference"),
        budget: budget(vram_bytes, gib(64)),
        forced: Forced::default(),
        trial: None,
    };
    request.plan()
}

/// The plan for a tiny model on a small card.
fn chosen_tiny(model: &str, sequences: usize, forced: Forced) -> StepPlan {
    let options = tiny_options();
    let request = LaunchRequest {
        rank: RankPlace::default(),
        decided: None,
        model: tiny(model).into(),
        step: StepSize::Tokens(sequences * options.sequence),
        options,
        profile: small_card(1e12, 1e10),
        budget: budget(64 << 20, 1 << 30),
        forced,
        trial: None,
    };
    request.plan().expect("it fits")
}

#[test]
fn a_small_budget_takes_smaller_micro_batches() {
    let model = "qwen2.5-0.5b";
    let two = real_task(model, 2, 8);
    let enough_for_two = least(&two, &profile("reference"), gib(64), &Forced::default());
    let [roomy, tight] = [gib(40), enough_for_two.min_bytes[Tier::DEVICE]]
        .map(|vram| chosen(model, 16 * 1024, vram).expect("it fits"));
    assert!(tight.batch <= 2, "{}", tight.batch);
    assert!(tight.batch < roomy.batch, "{} and {}", tight.batch, roomy.batch);
    for chosen in [roomy, tight] {
        assert_eq!(chosen.batch * chosen.accumulate, 16);
        assert!(chosen.guesses.iter().any(|tried| tried.batch == chosen.batch));
        assert!(chosen.guesses.is_sorted_by_key(|tried| std::cmp::Reverse(tried.batch)));
        for tried in &chosen.guesses {
            assert_eq!(tried.batch * tried.accumulate, 16);
        }
    }
}

#[test]
fn what_cannot_be_chosen_is_refused() {
    let error = chosen("qwen2.5-0.5b", 1000, gib(16)).expect_err("not whole");
    assert!(matches!(error, TrainError::Option { .. }), "{error}");
    match chosen("qwen2.5-0.5b", 8 * 1024, gib(1)) {
        Err(TrainError::Plan(PlanError::TooSmall(least))) => {
            assert!(least.min_bytes[Tier::DEVICE] > gib(1));
            let fits =
                chosen("qwen2.5-0.5b", 8 * 1024, least.min_bytes[Tier::DEVICE]).expect("it fits");
            assert_eq!(fits.batch, 1);
        }
        other => panic!("{:?}", other.map(|chosen| chosen.batch)),
    }
}

/// Steps of a prime number of sequences, of one, and of more than any micro-batch.
#[test]
fn steps_of_any_size() {
    for sequences in [1, 7, 48] {
        let chosen = chosen_tiny("qwen3-0.6b", sequences, Forced::default());
        assert_eq!(chosen.batch * chosen.accumulate, sequences);
    }
}

/// A group size that divides the micro-batches of only some sizes.
#[test]
fn a_forced_group_chooses_the_size() {
    let forced = Forced { group: Some(3), ..Forced::default() };
    let chosen = chosen_tiny("mistral-7b", 6, forced);
    assert_eq!(chosen.planned.decisions.group_sizes(), "3");
    assert!(chosen.accumulate.is_multiple_of(3));
}
