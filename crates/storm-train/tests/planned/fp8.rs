//! Projections that multiply 8-bit floats: every plan gives the same bits, and losses are close to
//! bf16.

use crate::exactness::reference;
use crate::support::{Random, options, planned, resident, sized_batches, tiny};
use std::collections::BTreeMap;
use std::ops::Range;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::{ActivationCodec, Op, QuantizedFormat};
use storm_model::{Adapters, BaseFormat, LoraOptions, ModelConfig, Targets};
use storm_plan::{Budget, Forced, Lowering, Storage, Task, Tier, check, plan, random_decisions};
use storm_train::{
    Batch, Checkpoints, Disk, Moments, Precision, Progress, ReferenceTrainer, TrainOptions,
    Trainer, TrainingState, training_task,
};
use tempfile::TempDir;

/// Tokens of a micro-batch are a multiple of 16.
const BATCH: usize = 2;
const SEQUENCE: usize = 8;

fn fp8() -> TrainOptions {
    TrainOptions { batch: BATCH, sequence: SEQUENCE, ..options(Precision::Fp8) }
}

/// Widths that are multiples of 16, except for the output of attention in Qwen3, whose projection
/// stays in bf16.
fn wide(config: ModelConfig) -> ModelConfig {
    ModelConfig { intermediate_size: 48, ..config }
}

fn nodes(task: &Task, wanted: fn(&Op<storm_graph::TensorId>) -> bool) -> usize {
    let training = task.training.as_ref().expect("it learns");
    let sections = training.start.templates().iter();
    sections.flat_map(|section| section.graph.nodes()).filter(|node| wanted(&node.op)).count()
}

fn random_plans_are_exact(name: &str, config: &ModelConfig, options: &TrainOptions, count: u64) {
    let count = if std::env::var_os("STORM_LONG_TESTS").is_some() { 1000 } else { count };
    let profile = reference();
    for micro_batches in [4, 1] {
        let expected = resident(config, options, micro_batches);
        let task = training_task(config, options, micro_batches).expect("a valid model");
        assert!(nodes(&task, |op| matches!(op, Op::Fp8Linear { .. })) > 0, "{name}");
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..count {
            let decisions = random_decisions(&task, seed);
            let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
            let budget = plan.bytes;
            let plan = check(plan, budget)
                .unwrap_or_else(|error| panic!("{name} seed {seed}: {error}\n{decisions:?}"));
            let found = planned(config, options, plan, Some(seed));
            assert_eq!(found, expected, "{name} seed {seed}: {decisions:?}");
        }
    }
}

#[test]
fn random_plans_are_exact_in_fp8() {
    for name in ["gpt2", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b"] {
        random_plans_are_exact(name, &wide(tiny(name)), &fp8(), 16);
    }
}

#[test]
fn random_plans_with_small_states_are_exact_in_fp8() {
    let config = wide(tiny("qwen2.5-0.5b"));
    let mut options = fp8();
    options.optimizer.moments = Moments::Int8;
    random_plans_are_exact("moments in 8 bits", &config, &options, 6);
    let options = TrainOptions { activation_codec: ActivationCodec::Int8, ..fp8() };
    random_plans_are_exact("activations in 8 bits", &config, &options, 12);
}

/// Adapters on a frozen base, in the compute precision and in 8 bits. Adapters themselves stay in
/// bf16.
#[test]
fn random_plans_of_adapters_are_exact_in_fp8() {
    let some = LoraOptions {
        targets: Targets::Pattern(r".*layers\.[12]\.(self_attn\.[qv]_proj|mlp\..*)".to_owned()),
        modules_to_save: vec!["input_layernorm".to_owned()],
        ..LoraOptions::new(3, 4.0)
    };
    for (name, options) in [("qwen3-0.6b", LoraOptions::new(3, 6.0)), ("mistral-7b", some)] {
        let base = wide(tiny(name));
        let adapters = Adapters::new(&base, options).expect("adapters that fit");
        let config = ModelConfig { adapters: Some(adapters), ..base };
        random_plans_are_exact("adapters", &config, &fp8(), 6);
        let config = ModelConfig { base: BaseFormat::Quantized(QuantizedFormat::Int8), ..config };
        random_plans_are_exact("adapters beside int8", &config, &fp8(), 6);
    }
}

/// The planner's choice, from the smallest budget that works to one that holds everything, and with
/// all saved tensors kept, offloaded and recomputed.
#[test]
fn the_planners_choice_is_exact_in_fp8() {
    let profile = reference();
    let (config, options) = (wide(tiny("llama-3.2-1b")), fp8());
    let expected = resident(&config, &options, 2);
    let task = training_task(&config, &options, 2).expect("a valid model");
    let ample = Budget::new(1 << 40, 1 << 40);
    let everything = plan(&task, &profile, ample, &Forced::default()).expect("a plan");
    let most = everything.prediction.peak_bytes[Tier::DEVICE];
    let least = everything.vram_min_bytes;
    for part in 0..4 {
        let budget = ample.with(Tier::DEVICE, least + (most - least) * part / 3);
        let chosen = plan(&task, &profile, budget, &Forced::default()).expect("a plan");
        let found = planned(&config, &options, chosen.plan, Some(part));
        assert_eq!(found, expected, "{:?}", chosen.decisions);
    }
    for storage in [Storage::Keep, Storage::Offload, Storage::Recompute] {
        let forced = Forced { activations: Some(storage), ..Forced::default() };
        let chosen = plan(&task, &profile, ample, &forced).expect("a plan");
        let found = planned(&config, &options, chosen.plan, Some(1));
        assert_eq!(found, expected, "{storage:?}");
    }
}

/// All projections of layers, and nothing else. A product whose shapes do not fit is unchanged.
#[test]
fn projections_of_layers_are_in_fp8_where_shapes_fit() {
    let count = |name: &str, options: &TrainOptions| {
        let task = training_task(wide(tiny(name)), options, 1).expect("a valid model");
        let fp8 = nodes(&task, |op| matches!(op, Op::Fp8Linear { .. }));
        let weights = nodes(&task, |op| matches!(op, Op::Fp8WeightGrad { .. }));
        let others = nodes(&task, |op| {
            let gradient = matches!(op, Op::LinearInputGrad { .. } | Op::LinearWeightGrad { .. });
            gradient || matches!(op, Op::Linear { .. })
        });
        [fp8, weights, others]
    };
    assert_eq!(count("llama-3.2-1b", &fp8()), [8, 4, 0]);
    // Attention outputs rows of 24.
    assert_eq!(count("qwen3-0.6b", &fp8()), [6, 3, 3]);
    assert_eq!(count("llama-3.2-1b", &TrainOptions { sequence: 9, ..fp8() }), [0, 0, 12]);
    assert_eq!(count("llama-3.2-1b", &options(Precision::Bf16Stochastic)), [0, 0, 12]);
}

/// Saved activations take half of the memory.
#[test]
fn less_is_saved_in_fp8() {
    let config = wide(tiny("llama-3.2-1b"));
    let task = training_task(&config, &fp8(), 1).expect("a valid model");
    let units = task.saved_units(1);
    let size = |name: &str| units.iter().find(|unit| unit.name == name).map(|unit| unit.size_bytes);
    let rows = BATCH * SEQUENCE;
    assert_eq!(size("mlp.down.x.columns"), Some((48 + 1) * rows), "{units:?}");
    assert_eq!(size("mlp.swiglu"), None, "{units:?}");
}

/// Text of a learnable language: each token determines which few may follow it.
fn sentences(random: &mut Random, vocabulary: usize) -> Batch {
    let rows = BATCH * SEQUENCE;
    let (mut tokens, mut targets, mut token) = (Vec::new(), Vec::new(), random.below(vocabulary));
    for _ in 0..rows {
        tokens.push(token as i32);
        token = (token * 5 + [1, 1, 1, 7][random.below(4)]) % vocabulary;
        targets.push(token as i32);
    }
    Batch::new(tokens, targets, SEQUENCE)
}

/// The first loss and the first gradients are close to those of bf16 but differ. After training,
/// the loss is within 2 %.
#[test]
fn losses_are_close_to_those_of_bf16() {
    let config = wide(tiny("llama-3.2-1b"));
    let mut gaps = Vec::new();
    for seed in 0..3 {
        let mut losses = Vec::new();
        for precision in [Precision::Bf16Stochastic, Precision::Fp8] {
            let options = TrainOptions { precision, seed, ..fp8() };
            let mut trainer = ReferenceTrainer::new(&config, options).expect("a model");
            let mut random = Random(seed + 100);
            let steps = (0..240).map(|step| {
                let batches = [(); 4].map(|()| sentences(&mut random, config.vocab_size));
                let rate = 0.01 * (1.0 - step as f32 / 240.0);
                trainer.step(&batches, rate).expect("a step")
            });
            losses.push(steps.collect::<Vec<_>>());
        }
        let [plain, fp8] = &losses[..] else { panic!("two runs") };
        for (what, near) in [
            ("loss", [plain[0].loss, fp8[0].loss]),
            ("norm", [plain[0].gradient_norm, fp8[0].gradient_norm]),
        ] {
            let gap = f64::from(near[1]) / f64::from(near[0]) - 1.0;
            assert!(gap != 0.0 && gap.abs() < 0.03, "{what}: {near:?}");
        }
        let [plain, fp8] = [plain, fp8].map(|run| {
            let last = run[200..].iter().map(|report| f64::from(report.loss));
            last.sum::<f64>() / 40.0
        });
        assert!(plain < 2.0, "nothing is learned: {plain}");
        gaps.push(fp8 / plain - 1.0);
    }
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    assert!(mean.abs() < 0.02, "{gaps:?}");
}

/// fp8 carries no state from step to step, so a run resumes from its checkpoint as if it had never
/// stopped.
#[test]
fn a_resumed_run_is_exact_in_fp8() {
    let (config, options) = (wide(tiny("qwen2.5-0.5b")), fp8());
    let task = training_task(&config, &options, 2).expect("a valid model");
    let decisions = random_decisions(&task, 3);
    let trainer = || {
        let profile = reference();
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        let plan = lowering.lower(&decisions).expect("decisions that work");
        let budget = plan.bytes;
        let plan = check(plan, budget).expect("a safe plan");
        let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
        Trainer::<CpuPlanDevice>::new(&config, options.clone(), plan.into(), device)
            .expect("a trainer")
    };
    let train = |trainer: &mut Trainer<CpuPlanDevice>, steps: Range<usize>| {
        let step = |step| {
            let batches = sized_batches(&config, [BATCH, SEQUENCE], 2, step);
            let report = trainer.step(&batches, 0.01).expect("a step");
            (report.loss.to_bits(), report.gradient_norm.to_bits())
        };
        steps.map(step).collect::<Vec<_>>()
    };
    let expected = train(&mut trainer(), 0..5);
    let folder = TempDir::new().expect("a folder");
    let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
    let mut first = trainer();
    let mut found = train(&mut first, 0..3);
    let progress = Progress {
        step: 3,
        updates: first.updates(),
        units: 0,
        data: serde_json::Value::Null,
        best: None,
        evaluations_without_gain: 0,
        settings: BTreeMap::new(),
        device: "cpu".to_owned(),
        predict: None,
    };
    checkpoints.save(&mut first, &progress).expect("a checkpoint");
    let mut second = trainer();
    let tensors = TrainingState::tensors(&second);
    let newest = checkpoints.newest(&tensors, |_, error| panic!("{error}")).expect("a folder");
    newest.expect("a checkpoint").restore(&mut second).expect("a restore");
    found.extend(train(&mut second, 3..5));
    assert_eq!(found, expected);
}

/// A non-finite weight makes loss and norm NaN, and the update changes nothing.
#[test]
fn an_overflow_cancels_the_step() {
    let config = wide(tiny("llama-3.2-1b"));
    let mut trainer = ReferenceTrainer::new(&config, fp8()).expect("a model");
    let name = "layers.1.mlp.down.weight";
    let mut weights = trainer.read(name).expect("a weight");
    weights[3] = f32::INFINITY;
    trainer.write(name, &weights).expect("a weight");
    let before = trainer.read("layers.0.attention.qkv.weight").expect("a weight");
    let mut random = Random(7);
    let report = trainer.step(&[sentences(&mut random, config.vocab_size)], 0.01).expect("a step");
    assert!(report.loss.is_nan() && !report.gradient_norm.is_finite(), "{report:?}");
    assert_eq!(trainer.read("layers.0.attention.qkv.weight").expect("a weight"), before);
}
