//! Damaged plans: whatever an independent judge calls unsafe, the checker must refuse.

mod support;

use storm_plan::verify;
use support::mutate::{Verdicts, try_mutants};
use support::random::Random;
use support::toy::toy_plan;
use support::{oracle, tight_budget};

#[test]
fn the_oracle_and_the_checker_accept_the_toys() {
    for seed in 0..300 {
        let plan = toy_plan(seed);
        verify(&plan, tight_budget(&plan)).unwrap_or_else(|e| panic!("plan {seed}: {e}"));
        oracle::judge(&plan).unwrap_or_else(|e| panic!("plan {seed}: {e}"));
    }
}

#[test]
fn unsafe_mutants_are_caught() {
    let mut random = Random(1);
    let mut verdicts = Verdicts::default();
    for seed in 0..150 {
        try_mutants(&format!("plan {seed}"), &toy_plan(seed), 60, &mut random, &mut verdicts);
    }
    assert!(
        verdicts.caught_share() >= 0.99,
        "{} of {} unsafe mutants survive:\n{}",
        verdicts.survivors.len(),
        verdicts.caught + verdicts.survivors.len(),
        verdicts.survivors.join("\n")
    );
    assert!(verdicts.caught > 5_000, "too few of {} mutants are unsafe", verdicts.total());
    assert!(verdicts.harmless > 100, "too few of {} mutants are safe", verdicts.total());
    // Copies without a reader are refused for what they say they carry, and waits for nothing.
    assert!(
        verdicts.strict.len() * 50 < verdicts.total(),
        "{} of {} mutants are refused though they are safe:\n{}",
        verdicts.strict.len(),
        verdicts.total(),
        verdicts.strict.join("\n")
    );
}
