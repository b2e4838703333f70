//! Batch norm under plans. Batch statistics are recomputed, offloaded or kept with the same bits.
//! Running statistics change once per micro-batch. Evaluations use them and do not change them.

use crate::support::{Random, options, tiny};
use half::bf16;
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::random::PHASE_WORDS;
use storm_graph::{
    BatchNormOptions, DType, MomentumDirection, NormActivation, Program, SectionBuilder,
    SgdParameters, Stage, TensorId,
};
use storm_model::{Initialization, ModelConfig, PHASE_INPUT};
use storm_plan::{HardwareProfile, Lowering, check, random_decisions};
use storm_train::{
    NamedInputs, OptimizerMethod, OptimizerOptions, Precision, ReferenceTrainer, TrainOptions,
    Trainer, Values, task_of_program,
};

const FEATURES: usize = 6;
const CLASSES: usize = 4;
const WIDTH: usize = 16;
const MOMENTUM: f32 = 0.25;
const STEPS: u64 = 4;

fn norm_options(activation: NormActivation) -> BatchNormOptions {
    BatchNormOptions { epsilon: 1e-5, momentum: MOMENTUM, activation }
}

/// A residual network of dense layers: norms with and without addend and ReLU.
fn program(options: &TrainOptions) -> Program {
    let TrainOptions { batch, sequence, .. } = *options;
    let dtype = options.precision.compute();
    let phase =
        |b: &mut SectionBuilder| -> TensorId { b.input_of(PHASE_INPUT, [PHASE_WORDS], DType::I32) };
    let mut first = SectionBuilder::new("first", batch, sequence, dtype);
    let features = first.input_of("features", [batch, sequence, FEATURES], dtype);
    let hidden = first.linear("first", features, WIDTH).unwrap();
    let at = phase(&mut first);
    let relu = norm_options(NormActivation::Relu);
    let hidden = first.batch_norm("first.norm", hidden, at, None, relu).unwrap();
    let first = first.hand_on(hidden);
    let (mut layer, hidden) = SectionBuilder::after(&first, "layer").unwrap();
    let at = phase(&mut layer);
    let up = layer.linear("up", hidden, 2 * WIDTH).unwrap();
    let up = layer.batch_norm("up.norm", up, at, None, relu).unwrap();
    let down = layer.linear("down", up, WIDTH).unwrap();
    let hidden = layer.batch_norm("down.norm", down, at, Some(hidden), relu).unwrap();
    let layer = layer.hand_on(hidden);
    let (mut head, hidden) = SectionBuilder::after(&layer, "head").unwrap();
    let at = phase(&mut head);
    let plain = norm_options(NormActivation::None);
    let hidden = head.batch_norm("head.norm", hidden, at, None, plain).unwrap();
    let head = head.loss(hidden, CLASSES, 8).unwrap();
    let stages =
        vec![Stage::once("first", 0), Stage::repeated("layers", 1, 3), Stage::once("head", 2)];
    Program::new(vec![first, layer, head], stages).unwrap()
}

/// Gradient descent with Nesterov's momentum.
fn descent() -> OptimizerMethod {
    let direction = MomentumDirection::Nesterov;
    OptimizerMethod::Sgd(SgdParameters { momentum: 0.9, direction, weight_decay: 5e-4 })
}

fn adamw() -> OptimizerMethod {
    OptimizerOptions::default().method
}

fn initialization(name: &str) -> Initialization {
    match name {
        _ if name.ends_with("norm.weight") || name.ends_with("running_var") => {
            Initialization::Constant(1.0)
        }
        _ if name.ends_with("norm.bias") || name.ends_with("running_mean") => {
            Initialization::Constant(0.0)
        }
        _ => Initialization::Normal { deviation: 0.3 },
    }
}

fn micro_batch(options: &TrainOptions, random: &mut Random) -> NamedInputs {
    let rows = options.batch * options.sequence;
    let features: Vec<f32> =
        (0..rows * FEATURES).map(|_| random.unit() as f32 * 4.0 - 1.0).collect();
    let sign = |row: usize, feature: usize| i32::from(features[row * FEATURES + feature] > 1.0);
    let targets: Vec<i32> = (0..rows).map(|row| 2 * sign(row, 1) + sign(row, 3)).collect();
    let features: Values = match options.precision.compute() {
        DType::BF16 => features.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>().into(),
        _ => features.into(),
    };
    NamedInputs::new(rows).with("features", features).with("targets", targets)
}

fn step(options: &TrainOptions, micro_batches: usize, step: u64) -> Vec<NamedInputs> {
    let mut random = Random(step + 1);
    (0..micro_batches).map(|_| micro_batch(options, &mut random)).collect()
}

/// Every lasting tensor, as bits.
fn tensors(names: &[String], read: impl FnMut(&str) -> Vec<f32>) -> Vec<Vec<u32>> {
    let values = names.iter().map(String::as_str).map(read);
    values.map(|values| values.iter().map(|x| x.to_bits()).collect()).collect()
}

fn resident(config: &ModelConfig, options: &TrainOptions, program: &Program) -> ReferenceTrainer {
    let mut trainer =
        ReferenceTrainer::of_program(config, options.clone(), program.clone()).unwrap();
    // The reference initializes by the names of language models.
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let mut random = Random(77);
    for name in names {
        let count = trainer.read(&name).unwrap().len();
        let values: Vec<f32> = match initialization(&name) {
            Initialization::Constant(value) => vec![value; count],
            // Exact in bf16, so that a master has the same values.
            _ => (0..count).map(|_| (random.below(64) as f32 - 31.5) / 64.0).collect(),
        };
        trainer.write(&name, &values).unwrap();
    }
    trainer
}

fn planned(
    options: &TrainOptions,
    program: &Program,
    lowering: &Lowering<'_>,
    micro_batches: usize,
    variant: u64,
    values: &[(String, Vec<f32>)],
) -> Trainer<CpuPlanDevice> {
    let task = task_of_program(program, options, micro_batches).unwrap();
    let plan = lowering.lower_with_evaluation(&random_decisions(&task, variant)).unwrap();
    let budget = plan.bytes;
    let plan = Arc::new(check(plan, budget).unwrap());
    let device =
        CpuPlanOptions { threads: Some(1), chaos_seed: Some(variant), ..CpuPlanOptions::default() };
    let mut trainer: Trainer<CpuPlanDevice> =
        Trainer::of_program(program, options.clone(), plan, device, initialization).unwrap();
    for (name, values) in values {
        trainer.write(name, values).unwrap();
    }
    trainer
}

#[test]
fn random_plans_with_batch_norm_are_exact() {
    let config = tiny("mistral-7b");
    let profile = HardwareProfile::builtin("reference").unwrap();
    for precision in [Precision::F32, Precision::Bf16Stochastic, Precision::Bf16Master] {
        for (micro_batches, method) in [(1, descent()), (3, descent()), (2, adamw())] {
            let mut options = options(precision);
            options.optimizer.method = method;
            let program = program(&options);
            let mut expected = resident(&config, &options, &program);
            let mut names: Vec<String> = expected.parameter_names().map(str::to_owned).collect();
            let start: Vec<(String, Vec<f32>)> =
                names.iter().map(|name| (name.clone(), expected.read(name).unwrap())).collect();
            let states = names.clone().into_iter().flat_map(|name| {
                ["momentum", "first_moment", "master"].map(|state| format!("{name}.{state}"))
            });
            names.extend(states.filter(|name| expected.read(name).is_ok()));
            assert_eq!(
                names.iter().any(|name| name.ends_with(".momentum")),
                matches!(method, OptimizerMethod::Sgd(_))
            );
            let reports: Vec<_> = (0..STEPS)
                .map(|at| expected.step(&step(&options, micro_batches, at), 0.02).unwrap())
                .collect();
            let at_end = tensors(&names, |name| expected.read(name).unwrap());

            let task = task_of_program(&program, &options, micro_batches).unwrap();
            let lowering = Lowering::new(&task, &profile).unwrap();
            for variant in 0..6 {
                let about = format!("{precision:?}, {micro_batches} micro-batches, plan {variant}");
                let mut trainer =
                    planned(&options, &program, &lowering, micro_batches, variant, &start);
                for (at, expected) in reports.iter().enumerate() {
                    let batches = step(&options, micro_batches, at as u64);
                    if at % 2 == variant as usize % 2 {
                        let before = tensors(&names, |name| trainer.read(name).unwrap());
                        let once = trainer.evaluate(&batches).unwrap().loss;
                        let again = trainer.evaluate(&batches).unwrap().loss;
                        assert_eq!(once.to_bits(), again.to_bits(), "{about}");
                        let after = tensors(&names, |name| trainer.read(name).unwrap());
                        assert_eq!(before, after, "an evaluation of {about}");
                        assert_ne!(once.to_bits(), expected.loss.to_bits(), "{about}");
                    }
                    let found = trainer.step(&batches, 0.02).unwrap();
                    assert_eq!(found, *expected, "step {at} of {about}");
                }
                let found = tensors(&names, |name| trainer.read(name).unwrap());
                for ((name, found), expected) in names.iter().zip(&found).zip(&at_end) {
                    assert_eq!(found, expected, "{name} of {about}");
                }
            }
        }
    }
}

/// Running statistics are the moving average of each micro-batch's own, with the unbiased variance.
/// They are computed here from the features, which nothing changes.
#[test]
fn running_statistics_change_once_per_micro_batch() {
    let (config, options) = (tiny("mistral-7b"), options(Precision::F32));
    let program = program(&options);
    let profile = HardwareProfile::builtin("reference").unwrap();
    let (micro_batches, rows) = (3, options.batch * options.sequence);
    let reference = resident(&config, &options, &program);
    let names: Vec<String> = reference.parameter_names().map(str::to_owned).collect();
    let start: Vec<(String, Vec<f32>)> =
        names.iter().map(|name| (name.clone(), reference.read(name).unwrap())).collect();
    let weight = reference.read("first.weight").unwrap(); // (WIDTH, FEATURES)
    let (mut mean, mut variance) = ([0.0f64; WIDTH], [1.0f64; WIDTH]);
    // One step only, because the second has another weight.
    let mut random = Random(1);
    for _ in 0..micro_batches {
        let features: Vec<f64> =
            (0..rows * FEATURES).map(|_| f64::from(random.unit() as f32 * 4.0 - 1.0)).collect();
        for channel in 0..WIDTH {
            let weights = &weight[channel * FEATURES..(channel + 1) * FEATURES];
            let values: Vec<f64> = features
                .chunks(FEATURES)
                .map(|row| row.iter().zip(weights).map(|(x, &w)| x * f64::from(w)).sum())
                .collect();
            let own = values.iter().sum::<f64>() / rows as f64;
            let squares = values.iter().map(|x| (x - own) * (x - own)).sum::<f64>();
            let momentum = f64::from(MOMENTUM);
            mean[channel] += momentum * (own - mean[channel]);
            variance[channel] += momentum * (squares / (rows - 1) as f64 - variance[channel]);
        }
    }
    let task = task_of_program(&program, &options, micro_batches).unwrap();
    let lowering = Lowering::new(&task, &profile).unwrap();
    for variant in 0..4 {
        let mut trainer = planned(&options, &program, &lowering, micro_batches, variant, &start);
        let batches = step(&options, micro_batches, 0);
        trainer.step(&batches, 0.02).unwrap();
        trainer.evaluate(&batches).unwrap();
        for (name, wanted) in
            [("first.norm.running_mean", mean), ("first.norm.running_var", variance)]
        {
            for (found, wanted) in trainer.read(name).unwrap().iter().zip(wanted) {
                assert!((f64::from(*found) - wanted).abs() < 1e-5, "{name}: {found}, not {wanted}");
            }
        }
        // An evaluation depends on the statistics. A step does not.
        let evaluated = trainer.evaluate(&batches).unwrap().loss;
        trainer.write("first.norm.running_mean", &[0.7; WIDTH]).unwrap();
        let moved = trainer.evaluate(&batches).unwrap().loss;
        assert!((evaluated - moved).abs() > 1e-4, "{evaluated} is {moved}");
        let mut untouched = planned(&options, &program, &lowering, micro_batches, variant, &start);
        untouched.step(&batches, 0.02).unwrap();
        let next = step(&options, micro_batches, 1);
        assert_eq!(trainer.step(&next, 0.02).unwrap(), untouched.step(&next, 0.02).unwrap());
    }
}
