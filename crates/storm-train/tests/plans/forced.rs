//! What a user forces is done, or refused with a reason.

use crate::models::{budget, gib, profile, real_options};
use storm_model::preset;
use storm_plan::{
    ActivationDecisions, Decisions, Forced, Placement, PlanError, StageDecisions, Storage, Task,
    UpdateTime, plan,
};
use storm_train::training_task;

const LAYERS: usize = 6;

/// Some wide layers.
fn task(model: &str) -> Task {
    let mut config = preset(model).expect("a preset");
    config.layer_count = LAYERS;
    training_task(&config, &real_options(1), 4).expect("a valid model")
}

/// Decisions of the layers, between embedding and head.
#[track_caller]
fn layers(decisions: Decisions) -> StageDecisions {
    decisions.stages.into_iter().nth(1).expect("embedding, layers, head")
}

/// What all groups do with the activations of the layers.
fn activations(decisions: Decisions) -> Vec<ActivationDecisions> {
    decisions.groups.into_iter().map(|mut group| group.stages.remove(1)).collect()
}

#[track_caller]
fn decided(forced: &Forced) -> Decisions {
    let planned =
        plan(&task("llama-2-7b"), &profile("reference"), budget(gib(40), gib(100)), forced);
    planned.unwrap_or_else(|error| panic!("{forced:?}: {error}")).decisions
}

#[test]
fn each_class_goes_where_it_is_told() {
    for (wanted, is_resident) in [(Placement::Resident, true), (Placement::Streamed, false)] {
        let decided = |change: fn(&mut Forced, Option<Placement>)| {
            let mut forced = Forced::default();
            change(&mut forced, Some(wanted));
            decided(&forced)
        };
        let forced = |change| layers(decided(change));
        let on_the_device = if is_resident { LAYERS } else { 0 };
        let weights = forced(|forced, wanted| forced.weights = wanted).weights;
        assert_eq!(weights.pinned, on_the_device);
        let gradients = forced(|forced, wanted| forced.gradients = wanted).gradients;
        assert_eq!(gradients.pinned, on_the_device);
        let states = forced(|forced, wanted| forced.states = wanted).states_pinned;
        assert_eq!(states, on_the_device);
        let other = if is_resident { Storage::Offload } else { Storage::Keep };
        for stage in activations(decided(|forced, wanted| forced.layer_inputs = wanted)) {
            assert!(!stage.inputs.contains(&other), "{:?}", stage.inputs);
        }
    }
}

/// Combinations that the planner would not choose by itself.
#[test]
fn classes_go_their_own_ways() {
    for (weights, gradients, states) in [
        (Placement::Resident, Placement::Streamed, Placement::Resident),
        (Placement::Streamed, Placement::Resident, Placement::Resident),
        (Placement::Streamed, Placement::Streamed, Placement::Resident),
    ] {
        let decisions = layers(decided(&Forced {
            weights: Some(weights),
            gradients: Some(gradients),
            states: Some(states),
            ..Forced::default()
        }));
        let count = LAYERS;
        assert_eq!(decisions.weights.pinned == count, weights == Placement::Resident);
        assert_eq!(decisions.gradients.pinned == count, gradients == Placement::Resident);
        assert_eq!(decisions.states_pinned, count);
    }
}

#[test]
fn activations_are_treated_as_told() {
    for storage in [Storage::Keep, Storage::Recompute, Storage::Offload] {
        let forced = Forced { activations: Some(storage), ..Forced::default() };
        for stage in activations(decided(&forced)) {
            let all = stage.saved.iter().flatten().all(|&found| found == storage);
            assert!(all, "{storage:?}: {:?}", stage.saved);
        }
    }
    for stage in activations(decided(&Forced { nothing_kept: true, ..Forced::default() })) {
        assert!(!stage.saved.iter().flatten().any(|&found| found == Storage::Keep));
    }
}

/// If memory is short, the search moves blocks in and out. What is forced stays.
#[test]
fn all_activations_are_kept_in_little_memory_too() {
    let (task, profile) = (task("llama-2-7b"), profile("reference"));
    let forced = Forced { activations: Some(Storage::Keep), ..Forced::default() };
    let planned = |gib_: u64| plan(&task, &profile, budget(gib(gib_), gib(100)), &forced).ok();
    let planned: Vec<_> = (3..16).filter_map(planned).collect();
    assert!(planned.len() > 3, "{} budgets suffice", planned.len());
    for stage in planned.into_iter().flat_map(|planned| activations(planned.decisions)) {
        assert!(stage.saved.iter().flatten().all(|&found| found == Storage::Keep), "{stage:?}");
    }
}

#[test]
fn checkpoints_updates_and_groups() {
    for stage in activations(decided(&Forced { checkpoint_every: Some(3), ..Forced::default() })) {
        for (layer, storage) in stage.inputs.iter().enumerate() {
            assert_eq!(*storage == Storage::Recompute, layer % 3 != 0, "layer {layer}");
        }
    }
    for update in [UpdateTime::EndOfStep, UpdateTime::NextStep] {
        let decisions = decided(&Forced { update: Some(update), ..Forced::default() });
        assert_eq!(decisions.update, update);
    }
    for group in [1, 2, 4] {
        let decisions = decided(&Forced { group: Some(group), ..Forced::default() });
        assert_eq!(decisions.group_sizes(), group.to_string());
    }
}

#[track_caller]
fn refused(model: &str, forced: &Forced, part: &str) {
    match plan(&task(model), &profile("reference"), budget(gib(40), gib(100)), forced) {
        Err(error @ PlanError::Decisions { .. }) => {
            let message = error.to_string();
            assert!(message.contains(part), "{message}");
        }
        other => panic!("{forced:?}: {:?}", other.map(|planned| planned.decisions)),
    }
}

#[test]
fn what_cannot_work_says_why() {
    let group = |group: usize| Forced { group: Some(group), ..Forced::default() };
    refused("llama-2-7b", &group(3), "groups of 3 do not divide 4 micro-batches");
    refused("llama-2-7b", &group(0), "groups of 0");
    let every = |every: usize| Forced { checkpoint_every: Some(every), ..Forced::default() };
    refused("llama-2-7b", &every(7), "every 7 layers needs that many; there are 6");
    refused("llama-2-7b", &every(0), "every 0 layers");
}
