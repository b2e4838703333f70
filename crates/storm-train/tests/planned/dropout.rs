//! Dropout of adapters affects steps, and nothing else.

use crate::exactness::random_plans_of_config_are_exact;
use crate::lora::{adapted, patterned};
use crate::support::{batches, options, tiny};
use std::collections::BTreeSet;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::{Op, Program};
use storm_model::{BuildOptions, LoraOptions, ModelConfig, SlidingWindow, Trainable, build};
use storm_plan::{Forced, HardwareProfile, Lowering, Work, check, plan, random_decisions};
use storm_train::{Precision, ReferenceTrainer, Trainer, training_task};

fn with_dropout(mut config: ModelConfig, dropout: f64) -> ModelConfig {
    config.adapters.as_mut().expect("adapters").options.dropout = dropout;
    config
}

fn dropping(name: &str) -> ModelConfig {
    adapted(name, LoraOptions { dropout: 0.3, ..LoraOptions::new(3, 6.0) })
}

#[test]
fn random_plans_with_dropout_are_exact() {
    let count = if std::env::var_os("STORM_LONG_TESTS").is_some() { 1000 } else { 12 };
    for (name, config) in [
        ("gpt2", dropping("gpt2")),
        ("mistral-7b", with_dropout(patterned("mistral-7b"), 0.5)),
        ("qwen3-0.6b", dropping("qwen3-0.6b")),
    ] {
        random_plans_of_config_are_exact(name, &config, count);
    }
}

fn dropouts(program: &Program) -> usize {
    let graphs = program.templates().iter().map(|section| &section.graph);
    graphs
        .flat_map(|graph| graph.nodes())
        .filter(|node| matches!(node.op, Op::Dropout { .. }))
        .count()
}

#[test]
fn only_adapters_that_learn_drop_anything() {
    let config = dropping("qwen2.5-0.5b");
    let training = options(Precision::F32).build_options();
    assert_eq!(dropouts(&build(&config, &training).expect("a program")), 4);
    let none = with_dropout(config.clone(), 0.0);
    assert_eq!(dropouts(&build(&none, &training).expect("a program")), 0);
    let frozen = BuildOptions { trainable: Trainable::Where(|_| false), ..training };
    assert_eq!(dropouts(&build(&config, &frozen).expect("a program")), 0);
}

/// Layers that share a template, in several stages, draw their own masks.
#[test]
fn no_two_layers_share_a_mask() {
    let mut base = tiny("qwen3-0.6b");
    base.layer_count = 6;
    // Every second layer has a window, so that two templates make six stages.
    base.sliding_window = SlidingWindow::of_layers(4, (0..6).map(|layer| layer % 2 == 1));
    let lora = LoraOptions { dropout: 0.3, ..LoraOptions::new(3, 6.0) };
    let adapters = storm_model::Adapters::new(&base, lora).expect("adapters");
    let config = ModelConfig { adapters: Some(adapters), ..base };
    let options = options(Precision::F32);
    let program = build(&config, &options.build_options()).expect("a program");
    assert!(program.stages().len() > 4, "{:?}", program.stages());
    let task = training_task(&config, &options, 1).expect("a valid model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    let plan = lowering.lower(&random_decisions(&task, 3)).expect("decisions that work");
    let mut masks = BTreeSet::new();
    for instruction in &plan.instructions {
        let Work::Compute(compute) = &instruction.work else { continue };
        let node = &plan.graphs[compute.graph.0 as usize].nodes()[compute.node as usize];
        if let Op::Dropout { stream, .. } = node.op {
            masks.insert((compute.layer, stream));
        }
    }
    assert_eq!(masks.len(), 4 * config.layer_count, "{masks:?}");
}

/// The same rows twice in a step get two masks. In another step they get a third.
#[test]
fn no_two_micro_batches_share_a_mask() {
    let config = dropping("mistral-7b");
    let mut trainer =
        ReferenceTrainer::new(&config, options(Precision::F32)).expect("a valid model");
    let one = batches(&config, 1, 0);
    let two = [one[0].clone(), one[0].clone()];
    // B is not zero afterwards, so that masks have an effect.
    trainer.step(&one, 0.05).expect("a step");
    let once = trainer.accumulate(&one).expect("a loss").loss;
    let again = trainer.accumulate(&one).expect("a loss").loss;
    assert_eq!(once.to_bits(), again.to_bits(), "the same step");
    let twice = trainer.accumulate(&two).expect("a loss").loss;
    assert!((twice - once).abs() > 1e-6, "{twice} is {once}");
    trainer.update(0.0).expect("an update that changes nothing");
    let later = trainer.accumulate(&one).expect("a loss").loss;
    assert!((later - once).abs() > 1e-6, "{later} is {once}");
}

fn planned(config: &ModelConfig) -> Trainer<CpuPlanDevice> {
    let options = options(Precision::F32);
    let task = training_task(config, &options, 2).expect("a valid model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let budget = storm_plan::Budget::new(1 << 32, 1 << 32);
    let planned = plan(&task, &profile, budget, &Forced::default()).expect("a plan");
    let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
    Trainer::new(config, options, planned.plan.into(), device).expect("a trainer")
}

/// An evaluation between steps computes the same as the model without dropout.
#[test]
fn evaluations_drop_nothing() {
    let dropping = dropping("qwen2.5-0.5b");
    let [mut with, mut without] =
        [dropping.clone(), with_dropout(dropping.clone(), 0.0)].map(|config| planned(&config));
    let step = batches(&dropping, 2, 0);
    with.step(&step, 0.05).expect("a step");
    with.step(&step, 0.05).expect("a step");
    let names: Vec<String> = with.parameter_names().map(str::to_owned).collect();
    for name in &names {
        let values = with.read(name).expect("a parameter");
        without.write(name, &values).expect("a parameter");
    }
    let [evaluated, plain] =
        [&mut with, &mut without].map(|trainer| trainer.evaluate(&step).expect("a loss").loss);
    assert_eq!(evaluated.to_bits(), plain.to_bits());
    let dropped = with.step(&step, 0.0).expect("a step").loss;
    assert_ne!(dropped.to_bits(), plain.to_bits(), "a step drops something");
}

/// The gradient is that of the loss with the drawn mask, by finite differences.
#[test]
fn the_gradient_is_of_the_masked_loss() {
    let config = dropping("mistral-7b");
    let mut trainer =
        ReferenceTrainer::new(&config, options(Precision::F32)).expect("a valid model");
    let step = batches(&config, 2, 0);
    for turn in 0..2 {
        trainer.step(&step, 0.05).unwrap_or_else(|error| panic!("step {turn}: {error}"));
    }
    trainer.accumulate(&step).expect("gradients");
    let names: Vec<String> = trainer
        .parameter_names()
        .filter(|name| name.contains("lora_"))
        .map(str::to_owned)
        .collect();
    for name in names.iter().step_by(3) {
        let values = trainer.read(name).expect("a parameter");
        let gradient = trainer.read(&format!("{name}.grad")).expect("a gradient");
        let largest = (0..values.len())
            .max_by(|&a, &b| gradient[a].abs().total_cmp(&gradient[b].abs()))
            .expect("an element");
        let mut loss_at = |shift: f32| {
            let mut moved = values.clone();
            moved[largest] += shift;
            trainer.write(name, &moved).expect("a parameter");
            f64::from(trainer.accumulate(&step).expect("gradients").loss)
        };
        let slope = (loss_at(0.01) - loss_at(-0.01)) / 0.02;
        loss_at(0.0);
        let expected = f64::from(gradient[largest]);
        let error = (slope - expected).abs();
        assert!(error < 0.02 * expected.abs() + 2e-4, "{name}: {slope}, not {expected}");
    }
}

#[test]
fn checked_plans_take_the_words_of_each_micro_batch() {
    let config = dropping("gpt2");
    let options = options(Precision::F32);
    let task = training_task(&config, &options, 3).expect("a valid model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    let plan = lowering.lower(&random_decisions(&task, 1)).expect("decisions that work");
    let budget = plan.bytes;
    let plan = check(plan, budget).expect("a sound plan");
    let inputs = plan.inputs.iter().filter(|input| input.tensor.name == storm_model::DROPOUT_INPUT);
    assert!(inputs.clone().count() > 0 && inputs.clone().all(|input| input.micro_batch.is_some()));
}
