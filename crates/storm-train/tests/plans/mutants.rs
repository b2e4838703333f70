//! Damaged plans of models: the checker must refuse whatever an independent oracle calls unsafe.

use crate::models::{FAMILIES, adapted, profile, tiny, tiny_task, with_disk};
use crate::support::mutate::{Verdicts, try_mutants};
use crate::support::random::Random;
use crate::support::{oracle, tight_budget};
use storm_model::ModelConfig;
use storm_plan::{
    Decisions, HardwareProfile, Lowering, Task, random_decisions, random_decisions_with_disk,
    verify,
};

/// Damages plans of some models, and compares the checker with the oracle.
fn mutants_are_caught(
    configs: &[ModelConfig],
    profile: &HardwareProfile,
    decide: fn(&Task, u64) -> Decisions,
    unsafe_min: usize,
) {
    let mut random = Random(3);
    let mut verdicts = Verdicts::default();
    for (index, config) in configs.iter().enumerate() {
        let task = tiny_task(&ModelConfig { layer_count: 2, ..config.clone() }, 2);
        let lowering = Lowering::new(&task, profile).expect("a task that can be lowered");
        for seed in 0..4 {
            let seed = 100 * index as u64 + seed;
            let plan = lowering.lower(&decide(&task, seed)).expect("decisions that work");
            let name = format!("model {index}, seed {seed}");
            verify(&plan, tight_budget(&plan)).unwrap_or_else(|e| panic!("{name}: {e}"));
            oracle::judge(&plan).unwrap_or_else(|e| panic!("{name}: {e}"));
            try_mutants(&name, &plan, 120, &mut random, &mut verdicts);
        }
    }
    assert!(
        verdicts.caught_share() >= 0.99,
        "{} of {} unsafe mutants survive:\n{}",
        verdicts.survivors.len(),
        verdicts.caught + verdicts.survivors.len(),
        verdicts.survivors.join("\n")
    );
    println!(
        "{} mutants: {} unsafe and caught, {} harmless, {} refused though safe",
        verdicts.total(),
        verdicts.caught,
        verdicts.harmless,
        verdicts.strict.len()
    );
    let caught = verdicts.caught;
    assert!(caught > unsafe_min, "{caught} of {} mutants are unsafe", verdicts.total());
}

#[test]
fn unsafe_mutants_of_models_are_caught() {
    mutants_are_caught(&FAMILIES.map(tiny), &profile("reference"), random_decisions, 1000);
}

/// Copies from and to the disk, of state and of frozen weights.
#[test]
fn unsafe_mutants_with_a_disk_are_caught() {
    let profile = with_disk(profile("reference"), 3e9, 2e9);
    let adapted = adapted(ModelConfig { layer_count: 2, ..tiny("mistral-7b") });
    let configs = [tiny("gpt2"), adapted];
    mutants_are_caught(&configs, &profile, random_decisions_with_disk, 300);
}
