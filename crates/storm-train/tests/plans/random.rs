//! All decisions give a sound plan.

use crate::models::{FAMILIES, profile, tiny, tiny_task};
use rayon::prelude::*;
use storm_model::ModelConfig;
use storm_plan::{Lowering, random_decisions, simulate, verify};

/// The checker verifies one in this many plans. Other tests check all of theirs.
const CHECKED: u64 = 10;

/// Lowers and simulates plans of the given seeds.
fn try_out(config: &ModelConfig, micro_batches: usize, seeds: std::ops::Range<u64>) {
    let profile = profile("reference");
    let task = tiny_task(config, micro_batches);
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    for seed in seeds {
        let decisions = random_decisions(&task, seed);
        let family = config.family;
        let about =
            || format!("{family:?}, {micro_batches} micro-batches, seed {seed}: {decisions:?}");
        let plan = lowering.lower(&decisions).unwrap_or_else(|e| panic!("{e}\n{}", about()));
        let memory = lowering.memory(&decisions).expect("as for lowering");
        assert_eq!(plan.bytes, memory, "{}", about());
        let simulation = simulate(&plan, &profile);
        let step = simulation.step_seconds;
        assert!(step > 0.0 && step.is_finite(), "{step} s: {}", about());
        for (_, &busy) in simulation.busy_seconds.iter() {
            assert!((0.0..=step * 1.000_001).contains(&busy), "{busy} of {step} s: {}", about());
        }
        if seed % CHECKED == 0
            && let Err(error) = verify(&plan, memory)
        {
            panic!("{error}\n{}", about());
        }
    }
}

#[test]
fn ten_thousand_random_plans() {
    let cases: Vec<(ModelConfig, usize)> = FAMILIES
        .into_iter()
        .flat_map(|name| [1, 2, 3, 4, 6].map(|micro_batches| (tiny(name), micro_batches)))
        .collect();
    let count = 10_000 / cases.len() as u64;
    cases.par_iter().enumerate().for_each(|(index, (config, micro_batches))| {
        let mut config = config.clone();
        config.layer_count = 1 + index % 4;
        let first = index as u64 * count;
        try_out(&config, *micro_batches, first..first + count);
    });
}

#[test]
fn many_layers_and_groups() {
    for name in ["gpt2", "mistral-7b"] {
        let mut config = tiny(name);
        config.layer_count = 9;
        for micro_batches in [8, 12] {
            try_out(&config, micro_batches, 0..40);
        }
    }
}
