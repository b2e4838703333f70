//! A program that reads no tokens: its inputs are measurements and the kind of each, its output is
//! a class.

use crate::support::{Random, options, tiny};
use half::bf16;
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::{ActivationFunction, DType, Program, SectionBuilder, Stage};
use storm_model::initialization;
use storm_plan::{HardwareProfile, Lowering, check, random_decisions};
use storm_train::{
    NamedInputs, Precision, ReferenceTrainer, TrainOptions, Trainer, Values, task_of_program,
};

const FEATURES: usize = 6;
const KINDS: usize = 3;
const CLASSES: usize = 4;
const WIDTH: usize = 16;
const MICRO_BATCHES: usize = 2;

fn program(options: &TrainOptions) -> Program {
    let TrainOptions { batch, sequence, .. } = *options;
    let dtype = options.precision.compute();
    let mut first = SectionBuilder::new("first", batch, sequence, dtype);
    let kinds = first.embedding("kind", KINDS, WIDTH).unwrap();
    let features = first.input_of("features", [batch, sequence, FEATURES], dtype);
    let hidden = first.linear_onto("first", features, kinds).unwrap();
    let first = first.hand_on(hidden);
    let (mut layer, hidden) = SectionBuilder::after(&first, "layer").unwrap();
    let up = layer.linear("up", hidden, 2 * WIDTH).unwrap();
    let active = layer.activation("silu", up, ActivationFunction::Silu).unwrap();
    let hidden = layer.linear_onto("down", active, hidden).unwrap();
    let layer = layer.hand_on(hidden);
    let (head, hidden) = SectionBuilder::after(&layer, "head").unwrap();
    let head = head.loss(hidden, CLASSES, 8).unwrap();
    let stages =
        vec![Stage::once("first", 0), Stage::repeated("layers", 1, 3), Stage::once("head", 2)];
    Program::new(vec![first, layer, head], stages).unwrap()
}

/// The class depends on the signs of two features and on the kind.
fn micro_batch(options: &TrainOptions, random: &mut Random) -> NamedInputs {
    let rows = options.batch * options.sequence;
    let features: Vec<f32> =
        (0..rows * FEATURES).map(|_| random.unit() as f32 * 4.0 - 2.0).collect();
    let kinds: Vec<i32> = (0..rows).map(|_| random.below(KINDS) as i32).collect();
    let class = |row: usize| {
        let sign = |feature: usize| usize::from(features[row * FEATURES + feature] > 0.0);
        let kind = kinds[row] as usize;
        (2 * sign(kind) + sign(3)) as i32
    };
    let targets: Vec<i32> = (0..rows).map(class).collect();
    let features: Values = match options.precision.compute() {
        DType::BF16 => features.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>().into(),
        _ => features.into(),
    };
    NamedInputs::new(rows).with("features", features).with("kind", kinds).with("targets", targets)
}

fn step(options: &TrainOptions, step: u64) -> Vec<NamedInputs> {
    let mut random = Random(step);
    (0..MICRO_BATCHES).map(|_| micro_batch(options, &mut random)).collect()
}

#[test]
fn programs_of_other_inputs_are_exact_under_random_plans() {
    let config = tiny("mistral-7b");
    let profile = HardwareProfile::builtin("reference").unwrap();
    for precision in [Precision::F32, Precision::Bf16Stochastic] {
        let options = options(precision);
        let program = program(&options);
        let mut resident =
            ReferenceTrainer::of_program(&config, options.clone(), program.clone()).unwrap();
        let expected: Vec<_> =
            (0..40).map(|at| resident.step(&step(&options, at), 0.02).unwrap()).collect();
        assert!(expected[39].loss < 0.7 * expected[0].loss, "it should learn: {expected:?}");

        let task = task_of_program(&program, &options, MICRO_BATCHES).unwrap();
        let lowering = Lowering::new(&task, &profile).unwrap();
        for variant in 0..4 {
            let decisions = random_decisions(&task, variant);
            let plan = lowering.lower_with_evaluation(&decisions).unwrap();
            let budget = plan.bytes;
            let plan = Arc::new(check(plan, budget).unwrap());
            let device = CpuPlanOptions { chaos_seed: Some(variant), ..CpuPlanOptions::default() };
            let start = |name: &str| initialization(&config, name);
            let mut trainer: Trainer<CpuPlanDevice> =
                Trainer::of_program(&program, options.clone(), plan, device, start).unwrap();
            for (at, expected) in expected.iter().enumerate().take(5) {
                let batches = step(&options, at as u64);
                let evaluated = trainer.evaluate(&batches).unwrap().loss;
                let found = trainer.step(&batches, 0.02).unwrap();
                assert_eq!(found, *expected, "{precision:?}, step {at} of {decisions:?}");
                assert_eq!(evaluated.to_bits(), found.loss.to_bits());
            }
        }
    }
}

#[test]
fn a_micro_batch_that_does_not_fit_changes_nothing() {
    let (config, options) = (tiny("mistral-7b"), options(Precision::F32));
    let mut trainer =
        ReferenceTrainer::of_program(&config, options.clone(), program(&options)).unwrap();
    let before = trainer.read("first.weight").unwrap();
    let mut refused = |change: &dyn Fn(NamedInputs) -> NamedInputs| {
        let [first, second]: [NamedInputs; 2] = step(&options, 1).try_into().unwrap();
        trainer.step(&[first, change(second)], 0.1).unwrap_err().to_string()
    };
    let rows = options.batch * options.sequence;
    let error = refused(&|batch| batch.with("features", vec![1i32; rows * FEATURES]));
    assert_eq!(error, "batch: `features` is i32; the model reads f32");
    let error = refused(&|batch| batch.with("features", vec![1f32; rows]));
    assert_eq!(error, "batch: `features` has 18 entries, not 108");
    let error = refused(&|batch| batch.with("kind", vec![3; rows]));
    assert_eq!(error, "batch: `kind` has 3 at entry 0; the model knows 0 to 2");
    let error = refused(&|_| NamedInputs::new(rows).with("targets", vec![0; rows]));
    assert_eq!(error, "batch: has no `kind`, which the model reads");
    assert_eq!(trainer.read("first.weight").unwrap(), before);
}
