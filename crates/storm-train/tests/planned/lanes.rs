//! Steps of several lanes: the gradient of a step is the f32 sum of its lanes in order, rounded
//! once, under any plan.

use crate::exactness::reference;
use crate::support::{batches, options, planned, resident, tiny};
use half::bf16;
use storm_model::ModelConfig;
use storm_plan::{
    Budget, Forced, Lanes, Lowering, PlanError, UpdateTime, check, plan, random_decisions, simulate,
};
use storm_train::{
    Batch, Moments, Precision, ReferenceTrainer, TrainError, TrainOptions, training_task,
};

fn with_lanes(precision: Precision, lanes: impl Into<Lanes>) -> TrainOptions {
    TrainOptions { lanes: lanes.into(), ..options(precision) }
}

fn lanes(text: &str) -> Lanes {
    text.parse().expect("lanes")
}

/// Plans per case. More with `STORM_LONG_TESTS=1`.
fn plan_count() -> u64 {
    if std::env::var_os("STORM_LONG_TESTS").is_some() { 500 } else { 10 }
}

/// Tied and untied heads, lanes of one micro-batch and of several, more than one lane in the
/// middle, and groups of lanes.
#[test]
fn random_plans_with_lanes_are_exact() {
    let profile = reference();
    let (full, int8) = (Moments::Full, Moments::Int8);
    let cases = [
        ("gpt2", Precision::Bf16Stochastic, full, 4, "2"),
        ("llama-3.2-1b", Precision::F32, full, 4, "4"),
        ("mistral-7b", Precision::Bf16Master, int8, 6, "2"),
        ("qwen3-0.6b", Precision::Bf16Stochastic, full, 8, "4"),
        ("qwen2.5-0.5b", Precision::F32, full, 6, "2"),
        ("mistral-7b", Precision::Bf16Stochastic, int8, 5, "5"),
        ("gpt2", Precision::F32, full, 4, "2x2"),
        ("qwen3-0.6b", Precision::Bf16Stochastic, full, 12, "2x3"),
        ("llama-3.2-1b", Precision::Bf16Master, int8, 8, "4x2"),
    ];
    for (case, (name, precision, moments, micro_batches, lanes)) in cases.into_iter().enumerate() {
        let config = tiny(name);
        let mut options = with_lanes(precision, self::lanes(lanes));
        options.optimizer.moments = moments;
        let expected = resident(&config, &options, micro_batches);
        let task = training_task(&config, &options, micro_batches).expect("a valid model");
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..plan_count() {
            let seed = seed * 10 + case as u64;
            let decisions = random_decisions(&task, seed);
            let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
            let budget = plan.bytes;
            let about = format!("{name}, {lanes} lanes, seed {seed}: {decisions:?}");
            let plan = check(plan, budget).unwrap_or_else(|error| panic!("{error}: {about}"));
            assert_eq!(planned(&config, &options, plan, Some(seed)), expected, "{about}");
        }
    }
}

/// Parameters in several pieces, whose lane sums stream through slots of the ring of optimizer
/// state.
#[test]
fn sums_of_lanes_in_pieces_are_exact() {
    let mut config = tiny("llama-3.2-1b");
    (config.hidden_size, config.head_dim, config.intermediate_size) = (64, 16, 160);
    for (lanes, sum) in [(Lanes::from(3), ".lanes (part"), (lanes("2x3"), ".group (part")] {
        let options = with_lanes(Precision::Bf16Stochastic, lanes);
        let task = training_task(&config, &options, lanes.count()).expect("a valid model");
        let profile = reference();
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        let expected = resident(&config, &options, lanes.count());
        let mut cut = 0;
        for seed in 0..8 {
            let decisions = random_decisions(&task, seed);
            let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
            let parts = plan.values.iter().filter(|value| value.name.contains(sum));
            cut += usize::from(parts.count() > 0);
            let budget = plan.bytes;
            let plan = check(plan, budget).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let found = planned(&config, &options, plan, Some(seed));
            assert_eq!(found, expected, "{lanes} lanes, seed {seed}: {decisions:?}");
        }
        assert!(cut >= 3, "{cut} plans have sums in several pieces");
    }
}

/// The planner's plans, from everything on the device to the least that works.
#[test]
fn plans_of_the_planner_are_exact() {
    let profile = reference();
    let config = tiny("llama-3.2-1b");
    let options = with_lanes(Precision::Bf16Stochastic, lanes("2x2"));
    let expected = resident(&config, &options, 4);
    let task = training_task(&config, &options, 4).expect("a valid model");
    let roomy = Budget::new(1 << 32, 1 << 32);
    let forced = Forced::default();
    let least = plan(&task, &profile, roomy, &forced).expect("a plan").vram_min_bytes;
    for vram in [least, least + least / 8, 1 << 32] {
        let found = plan(&task, &profile, Budget::new(vram, 1 << 32), &forced).expect("a plan");
        let simulated = simulate(&found.plan, &profile).step_seconds;
        assert!((simulated - found.prediction.step_seconds).abs() <= 1e-9 * simulated);
        assert_eq!(planned(&config, &options, found.plan, Some(7)), expected, "{vram} bytes");
    }
}

/// Batches in which every target counts, so that a lane's share of the step is a power of two.
fn full_batches(config: &ModelConfig, count: usize) -> Vec<Batch> {
    let mut found = batches(config, count, 3);
    for batch in &mut found {
        let vocabulary = config.vocab_size as i32;
        let targets = batch.tokens.iter().map(|token| (token + 1) % vocabulary).collect();
        *batch = Batch::new(batch.tokens.clone(), targets, crate::support::SEQUENCE);
    }
    found
}

fn ordered_sum(parts: &[Vec<f32>]) -> Vec<f32> {
    let mut sum = parts[0].clone();
    for part in &parts[1..] {
        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    sum
}

/// The definition itself: gradients of lanes that ran alone, added in order, group by group.
#[test]
fn a_step_has_the_ordered_sum_of_its_lanes() {
    let config = tiny("mistral-7b");
    for precision in [Precision::F32, Precision::Bf16Stochastic] {
        for (micro_batches, lanes) in
            [(4, "2"), (4, "4"), (8, "2"), (4, "2x2"), (8, "2x4"), (8, "4x2")]
        {
            let all = full_batches(&config, micro_batches);
            let lanes: Lanes = self::lanes(lanes);
            let mut trainer =
                ReferenceTrainer::new(&config, with_lanes(precision, lanes)).expect("a model");
            trainer.accumulate(&all).expect("a loss");
            let mut alone =
                ReferenceTrainer::new(&config, options(precision)).expect("a valid model");
            let names: Vec<String> =
                alone.parameter_names().map(|name| format!("{name}.grad")).collect();
            // By parameter: the lanes of each group.
            let mut parts: Vec<Vec<Vec<f32>>> = vec![Vec::new(); names.len()];
            for lane in all.chunks(micro_batches / lanes.count()) {
                alone.accumulate(lane).expect("a loss");
                for (name, parts) in names.iter().zip(&mut parts) {
                    let part = alone.read(name).expect("a gradient");
                    parts.push(part.into_iter().map(|x| x / lanes.count() as f32).collect());
                }
            }
            for (name, parts) in names.iter().zip(parts) {
                let groups = parts.chunks(lanes.in_group()).map(ordered_sum).collect::<Vec<_>>();
                let sum = ordered_sum(&groups);
                let rounded: Vec<u32> = (sum.into_iter())
                    .map(|x| match precision {
                        Precision::F32 => x.to_bits(),
                        _ => bf16::from_f32(x).to_f32().to_bits(),
                    })
                    .collect();
                let found = trainer.read(name).expect("a gradient");
                let found: Vec<u32> = found.into_iter().map(f32::to_bits).collect();
                assert_eq!(found, rounded, "{name}, {precision:?}, {lanes} lanes");
            }
        }
    }
}

/// Lanes are part of what a run computes, and so are their groups.
#[test]
fn other_lanes_are_another_run() {
    let config = tiny("mistral-7b");
    let of = |text| resident(&config, &with_lanes(Precision::F32, lanes(text)), 4);
    let (one, two, four, groups) = (of("1"), of("2"), of("4"), of("2x2"));
    assert!(one != two && two != four && one != four);
    assert!(groups != one && groups != two && groups != four);
    assert!(of("1x4") == four && of("4x1") == four);
}

#[test]
fn lanes_must_divide_a_step() {
    let config = tiny("mistral-7b");
    for (lanes, micro_batches) in [(3, 4), (0, 2), (8, 4)] {
        let options = with_lanes(Precision::F32, lanes);
        let error = training_task(&config, &options, micro_batches).expect_err("not evenly");
        assert!(matches!(error, TrainError::Option { option: "lanes", .. }), "{error}");
    }
    let options = with_lanes(Precision::F32, 2);
    let mut trainer = ReferenceTrainer::new(&config, options).expect("a valid model");
    let error = trainer.accumulate(&batches(&config, 3, 0)).expect_err("not evenly");
    assert!(error.to_string().contains("2 do not divide its 3"), "{error}");
}

#[test]
fn updates_in_the_backward_pass_need_one_lane() {
    let config = tiny("mistral-7b");
    let mut options = with_lanes(Precision::F32, 2);
    options.optimizer.max_norm = None;
    let task = training_task(&config, &options, 2).expect("a valid model");
    let profile = reference();
    let mut decisions = random_decisions(&task, 1);
    decisions.update = UpdateTime::InBackward;
    let refused = Lowering::new(&task, &profile).expect("a lowering").lower(&decisions);
    let forced = Forced { update: Some(UpdateTime::InBackward), ..Forced::default() };
    let planned = plan(&task, &profile, Budget::new(1 << 32, 1 << 32), &forced);
    for error in [refused.expect_err("two lanes"), planned.expect_err("two lanes")] {
        assert!(matches!(error, PlanError::Decisions { .. }), "{error}");
        assert!(error.to_string().contains("use one lane"), "{error}");
    }
}
