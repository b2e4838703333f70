//! Random plans with random delays, compared with everything resident.

use crate::random_plans::Case;
use crate::support::{batches, options, planned, resident, tiny};
use storm_device::cpu::{Bf16Products, CpuPlanDevice, CpuPlanOptions};
use storm_model::ModelConfig;
use storm_plan::{
    Budget, Forced, HardwareProfile, Placement, Planned, TensorKind, Tier, UpdateTime, plan,
    random_decisions,
};
use storm_train::{Moments, Precision, TrainError, TrainOptions, Trainer, training_task};

const FAMILIES: [&str; 5] = ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"];

pub(crate) fn reference() -> HardwareProfile {
    HardwareProfile::builtin("reference").expect("built in")
}

/// Plans per family. More with `STORM_LONG_TESTS=1`.
fn plan_count() -> u64 {
    if std::env::var_os("STORM_LONG_TESTS").is_some() { 2000 } else { 120 }
}

fn random_plans_are_exact(name: &str) {
    random_plans_of_config_are_exact(name, &tiny(name), plan_count());
}

pub(crate) fn random_plans_of_config_are_exact(name: &str, config: &ModelConfig, count: u64) {
    random_plans_of_options_are_exact(name, config, options, count);
}

pub(crate) fn random_plans_of_options_are_exact(
    name: &str,
    config: &ModelConfig,
    options: impl Fn(Precision) -> TrainOptions,
    count: u64,
) {
    let profile = reference();
    let int8 = match config.adapters {
        None => Moments::Int8,
        // Adapters are f32, which has no 8-bit moments.
        Some(_) => Moments::Full,
    };
    for (part, (precision, moments, micro_batches)) in [
        (Precision::Bf16Stochastic, Moments::Full, 4),
        (Precision::Bf16Master, int8, 2),
        (Precision::F32, Moments::Full, 3),
        (Precision::Bf16Stochastic, int8, 1),
    ]
    .into_iter()
    .enumerate()
    {
        let mut options = options(precision);
        options.optimizer.moments = moments;
        // Sums over updates are state like any other.
        options.optimizer.observes = part == 1;
        let case =
            Case { name, config, options: &options, micro_batches, products: Bf16Products::Fma };
        let seeds = (0..count / 4).map(|seed| seed * 4 + part as u64);
        case.compare(&profile, seeds, random_decisions, |_, _, _, _| {});
    }
}

#[test]
fn gpt2() {
    random_plans_are_exact("gpt2");
}

#[test]
fn llama() {
    random_plans_are_exact("llama-3.2-1b");
}

#[test]
fn mistral() {
    random_plans_are_exact("mistral-7b");
}

#[test]
fn qwen2() {
    random_plans_are_exact("qwen2.5-0.5b");
}

#[test]
fn qwen3() {
    random_plans_are_exact("qwen3-0.6b");
}

/// Matrices updated in several pieces, each of whole groups.
#[test]
fn moments_in_8_bits_in_pieces() {
    let mut config = tiny("llama-3.2-1b");
    (config.hidden_size, config.head_dim, config.intermediate_size) = (64, 16, 160);
    let mut options = options(Precision::Bf16Stochastic);
    options.optimizer.moments = Moments::Int8;
    let case = Case {
        name: "pieces",
        config: &config,
        options: &options,
        micro_batches: 2,
        products: Bf16Products::Fma,
    };
    let mut cut = 0;
    case.compare(&reference(), 0..12, random_decisions, |_, _, plan, _| {
        let mut moments =
            plan.lasting.iter().filter(|l| l.tensor.name.ends_with("gate_up.weight.first_moment"));
        cut += usize::from(moments.all(|moment| moment.pieces.len() > 1));
    });
    assert!(cut >= 3, "{cut} plans have moments in several pieces");
}

/// Updates in the backward pass and at other times, with tied and untied heads.
#[test]
fn updates_in_the_backward_pass_are_exact() {
    let profile = reference();
    let mut found_in_backward = 0;
    for (name, moments) in
        [("llama-3.2-1b", Moments::Int8), ("gpt2", Moments::Full), ("mistral-7b", Moments::Full)]
    {
        for micro_batches in [1, 3] {
            let config = tiny(name);
            let mut options = options(Precision::Bf16Stochastic);
            options.optimizer.moments = moments;
            options.optimizer.max_norm = None;
            let case = Case {
                name,
                config: &config,
                options: &options,
                micro_batches,
                products: Bf16Products::Fma,
            };
            case.compare(&profile, 0..16, random_decisions, |_, decisions, _, _| {
                let in_backward = decisions.update == UpdateTime::InBackward;
                found_in_backward += usize::from(in_backward);
            });
        }
    }
    assert!(found_in_backward > 30, "{found_in_backward}");
}

/// Gradients take no host memory, and the planner's own plan is exact.
#[test]
fn the_planner_updates_in_the_backward_pass_if_told_so() {
    let profile = HardwareProfile { overhead_bytes: 0, ..reference() };
    let config = tiny("llama-3.2-1b");
    let mut options = options(Precision::Bf16Stochastic);
    options.optimizer.max_norm = None;
    let expected = resident(&config, &options, 2);
    let task = training_task(&config, &options, 2).expect("a valid model");
    let forced = |update| Forced {
        update: Some(update),
        weights: Some(Placement::Streamed),
        gradients: Some(Placement::Streamed),
        states: Some(Placement::Streamed),
        ..Forced::default()
    };
    let ample = Budget::new(1 << 40, 1 << 40);
    let planned_at = |update| plan(&task, &profile, ample, &forced(update)).expect("a plan");
    let (end, backward) = (planned_at(UpdateTime::EndOfStep), planned_at(UpdateTime::InBackward));
    let of_layers = |planned: &Planned| -> u64 {
        let holdings = planned.plan.holdings();
        let gradients = holdings.iter().find(|holding| holding.kind == TensorKind::Gradients);
        gradients.expect("there are gradients").bytes[Tier::HOST]
    };
    assert!(of_layers(&end) > 2 * of_layers(&backward), "{} bytes", of_layers(&backward));
    let found = planned(&config, &options, backward.plan, Some(1));
    assert_eq!(found, expected);

    options.optimizer.max_norm = Some(1.0);
    let clipped = training_task(&config, &options, 2).expect("a valid model");
    let error =
        plan(&clipped, &profile, ample, &forced(UpdateTime::InBackward)).expect_err("clips");
    assert!(error.to_string().contains("turn clipping off"), "{error}");
    let two = Forced { group: Some(1), ..forced(UpdateTime::InBackward) };
    let error = plan(&task, &profile, ample, &two).expect_err("two groups");
    assert!(error.to_string().contains("in one group"), "{error}");
}

/// A non-finite gradient cancels nothing there, so the trainer cannot be read or saved afterwards.
#[test]
fn what_is_partly_updated_cannot_be_saved() {
    let profile = HardwareProfile { overhead_bytes: 0, ..reference() };
    let config = tiny("llama-3.2-1b");
    for update in [UpdateTime::EndOfStep, UpdateTime::NextStep, UpdateTime::InBackward] {
        let mut options = options(Precision::Bf16Stochastic);
        options.optimizer.max_norm = None;
        let task = training_task(&config, &options, 1).expect("a valid model");
        let forced = Forced { update: Some(update), ..Forced::default() };
        let budget = Budget::new(1 << 40, 1 << 40);
        let chosen = plan(&task, &profile, budget, &forced).expect("a plan");
        let device = CpuPlanOptions::default();
        let mut trainer: Trainer<CpuPlanDevice> =
            Trainer::new(&config, options, chosen.plan.into(), device).expect("a trainer");
        let name = "layers.1.mlp.down.weight";
        let mut values = trainer.read(name).expect("a parameter");
        values[3] = f32::INFINITY;
        trainer.write(name, &values).expect("a parameter");
        let report = trainer.step(&batches(&config, 1, 0), 0.01).expect("a step");
        assert!(!report.gradient_norm.is_finite());
        let torn = update == UpdateTime::InBackward;
        assert_eq!(trainer.is_partly_updated(), torn, "{update:?}");
        let read = trainer.read("final_norm.weight");
        assert_eq!(matches!(read, Err(TrainError::PartlyUpdated { .. })), torn, "{update:?}");
        let step = trainer.step(&batches(&config, 1, 1), 0.01);
        assert_eq!(matches!(step, Err(TrainError::PartlyUpdated { .. })), torn, "{update:?}");
    }
}

/// The planner's choice, from the smallest budget that works to one that holds everything.
#[test]
fn the_planners_choice_is_exact_at_every_budget() {
    let profile = HardwareProfile { overhead_bytes: 0, ..reference() };
    for name in FAMILIES {
        let config = tiny(name);
        let options = options(Precision::Bf16Stochastic);
        let micro_batches = 2;
        let expected = resident(&config, &options, micro_batches);
        let task = training_task(&config, &options, micro_batches).expect("a valid model");
        let ample = Budget::new(1 << 40, 1 << 40);
        let forced = Forced::default();
        let everything = plan(&task, &profile, ample, &forced).expect("a plan");
        let most = everything.prediction.peak_bytes[Tier::DEVICE];
        let least = everything.vram_min_bytes;
        assert!(least < most / 2, "{name}: {least} of {most} bytes");
        for part in 0..5 {
            let vram_bytes = least + (most - least) * part / 4;
            let budget = ample.with(Tier::DEVICE, vram_bytes);
            let chosen = plan(&task, &profile, budget, &forced).expect("a plan");
            let predicted = chosen.prediction.clone();
            assert!(predicted.peak_bytes[Tier::DEVICE] <= vram_bytes, "{name} at {vram_bytes}");
            let device = CpuPlanOptions::default();
            let trainer: Trainer<CpuPlanDevice> =
                Trainer::new(&config, options.clone(), chosen.plan.clone().into(), device)
                    .expect("a trainer");
            let taken = trainer.memory_taken();
            assert_eq!(taken[Tier::DEVICE] as u64, predicted.peak_bytes[Tier::DEVICE]);
            assert_eq!(taken[Tier::HOST] as u64, predicted.peak_bytes[Tier::HOST]);
            drop(trainer);
            let found = planned(&config, &options, chosen.plan, Some(part));
            assert_eq!(found, expected, "{name} at {vram_bytes} bytes: {:?}", chosen.decisions);
        }
    }
}
