//! Damaged plans of models: whatever an independent judge calls unsafe, the checker must refuse.

use crate::models::{FAMILIES, profile, tiny, tiny_task};
use crate::support::mutate::{Verdicts, try_mutants};
use crate::support::random::Random;
use crate::support::{oracle, tight_budget};
use storm_plan::{Lowering, random_decisions, verify};

#[test]
fn unsafe_mutants_of_models_are_caught() {
    let profile = profile("reference");
    let mut random = Random(3);
    let mut verdicts = Verdicts::default();
    for (index, name) in FAMILIES.into_iter().enumerate() {
        let mut config = tiny(name);
        config.layer_count = 2;
        let task = tiny_task(&config, 2);
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..4 {
            let seed = 100 * index as u64 + seed;
            let plan = lowering.lower(&random_decisions(&task, seed)).expect("decisions that work");
            let name = format!("{name}, seed {seed}");
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
    assert!(verdicts.caught > 1000, "too few of {} mutants are unsafe", verdicts.total());
}
