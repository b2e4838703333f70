//! Activations in 8 bits: every plan gives the same bits, the forward pass gives those of a run
//! without, and losses are close.

use crate::exactness::{random_plans_of_options_are_exact, reference};
use crate::lora::{adapted, patterned};
use crate::support::{BATCH, Random, SEQUENCE, options, planned, resident, tiny};
use storm_graph::{ActivationCodec, ActivationFunction, Op, QuantizedFormat, UnitOutput};
use storm_model::{BaseFormat, LoraOptions, ModelConfig, Targets};
use storm_plan::{Budget, Forced, Storage, Tier, plan};
use storm_train::{Batch, Precision, ReferenceTrainer, TrainOptions, training_task};

/// Wide enough for more than one group of 128.
const WIDE: usize = 150;

fn coded(precision: Precision) -> TrainOptions {
    TrainOptions { activation_codec: ActivationCodec::Int8, ..options(precision) }
}

fn random_plans_are_exact(name: &str, config: &ModelConfig, count: u64) {
    let count = if std::env::var_os("STORM_LONG_TESTS").is_some() { 1000 } else { count };
    random_plans_of_options_are_exact(name, config, coded, count);
}

#[test]
fn random_plans_are_exact_with_a_codec() {
    for name in ["llama-3.2-1b", "qwen3-0.6b"] {
        random_plans_are_exact(name, &tiny(name), 24);
    }
    let wide = ModelConfig { intermediate_size: WIDE, ..tiny("mistral-7b") };
    random_plans_are_exact("mistral-7b", &wide, 16);
}

/// Every activation function of gated units.
#[test]
fn random_plans_of_other_activations_are_exact() {
    for activation in
        [ActivationFunction::Gelu, ActivationFunction::GeluTanh, ActivationFunction::Relu]
    {
        let config = ModelConfig { activation, ..tiny("llama-3.2-1b") };
        random_plans_are_exact(&format!("{activation:?}"), &config, 8);
    }
}

/// Adapters on a frozen base, in the compute precision and in 8 bits.
#[test]
fn random_plans_of_adapters_are_exact_with_a_codec() {
    let all = adapted("qwen3-0.6b", LoraOptions::new(3, 6.0));
    let some = patterned("mistral-7b");
    for config in [all, some] {
        random_plans_are_exact("adapters", &config, 8);
        let config = ModelConfig { base: BaseFormat::Quantized(QuantizedFormat::Int8), ..config };
        random_plans_are_exact("adapters beside int8", &config, 8);
    }
}

/// The planner's choice, from the smallest budget that works to one that holds everything.
#[test]
fn the_planners_choice_is_exact_with_a_codec() {
    let profile = reference();
    let (config, options) = (tiny("qwen2.5-0.5b"), coded(Precision::Bf16Stochastic));
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
}

/// Half of the memory: only the code is saved, neither the operand of a gated unit nor its output.
#[test]
fn less_is_saved() {
    let config = ModelConfig { intermediate_size: 512, ..tiny("llama-3.2-1b") };
    let saved = |options: &TrainOptions| {
        let task = training_task(&config, options, 1).expect("a valid model");
        task.saved_units(1)
    };
    let size = |units: &[storm_plan::SavedUnit], name: &str| {
        units.iter().find(|unit| unit.name == name).map(|unit| unit.size_bytes)
    };
    let plain = saved(&options(Precision::Bf16Stochastic));
    let rows = BATCH * SEQUENCE;
    assert_eq!(size(&plain, "mlp.gate_up"), Some(rows * 2 * 512 * 2));
    assert_eq!(size(&plain, "mlp.swiglu"), Some(rows * 512 * 2));
    let coded = saved(&coded(Precision::Bf16Stochastic));
    assert_eq!(size(&coded, "mlp.gate_up"), None);
    assert_eq!(size(&coded, "mlp.swiglu"), None);
    assert_eq!(size(&coded, "mlp.swiglu.code"), Some(rows * 2 * (512 + 16)));
}

/// If the projection after a unit is frozen and has no adapter, no backward node reads the unit's
/// output, so it is not recomputed.
#[test]
fn outputs_are_made_again_only_where_they_are_read() {
    for (targets, expected) in [("q_proj", UnitOutput::Skip), ("down_proj", UnitOutput::Compute)] {
        let targets = Targets::Names(vec![targets.to_owned()]);
        let config = adapted("qwen3-0.6b", LoraOptions { targets, ..LoraOptions::new(3, 6.0) });
        let task = training_task(&config, &coded(Precision::F32), 1).expect("a valid model");
        let training = task.training.as_ref().expect("it learns");
        let nodes = training.start.templates().iter().flat_map(|section| section.graph.nodes());
        let outputs: Vec<UnitOutput> = nodes
            .filter_map(|node| match node.op {
                Op::SwiGluCodedGrad { output, .. } => Some(output),
                _ => None,
            })
            .collect();
        assert!(!outputs.is_empty() && outputs.iter().all(|&output| output == expected));
    }
}

/// Models without gated units have nothing to compress.
#[test]
fn a_model_without_gated_units_is_refused() {
    let error = training_task(tiny("gpt2"), &coded(Precision::F32), 1).expect_err("no units");
    let error = error.to_string();
    assert!(error.contains("no gated unit"), "{error}");
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

/// The first loss is the same to the bit, gradients are close, and after training the loss is
/// within 0.3 %.
#[test]
fn losses_are_those_of_training_without_a_codec() {
    let config = ModelConfig { intermediate_size: WIDE, ..tiny("llama-3.2-1b") };
    let mut gaps = Vec::new();
    for seed in 0..3 {
        let mut losses = Vec::new();
        for codec in [ActivationCodec::None, ActivationCodec::Int8] {
            let options = TrainOptions {
                activation_codec: codec,
                seed,
                ..options(Precision::Bf16Stochastic)
            };
            let mut trainer = ReferenceTrainer::new(&config, options).expect("a model");
            let mut random = Random(seed + 100);
            let steps = (0..240).map(|step| {
                let batches = [(); 4].map(|()| sentences(&mut random, config.vocab_size));
                let rate = 0.01 * (1.0 - step as f32 / 240.0);
                trainer.step(&batches, rate).expect("a step")
            });
            losses.push(steps.collect::<Vec<_>>());
        }
        let [plain, coded] = &losses[..] else { panic!("two runs") };
        assert_eq!(plain[0].loss.to_bits(), coded[0].loss.to_bits());
        let norms = [plain, coded].map(|run| f64::from(run[0].gradient_norm));
        assert!(norms[0] != norms[1] && (norms[1] / norms[0] - 1.0).abs() < 0.01, "{norms:?}");
        let [plain, coded] = [plain, coded].map(|run| {
            let last = run[200..].iter().map(|report| f64::from(report.loss));
            last.sum::<f64>() / 40.0
        });
        assert!(plain < 2.0, "nothing is learned: {plain}");
        gaps.push(coded / plain - 1.0);
    }
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    assert!(mean.abs() < 0.003, "{gaps:?}");
}

/// Plans that keep, offload, and recompute all codes give the same bits.
#[test]
fn kept_offloaded_and_recomputed_codes_are_the_same() {
    let config = ModelConfig { intermediate_size: WIDE, ..tiny("qwen2.5-0.5b") };
    let options = coded(Precision::Bf16Master);
    let expected = resident(&config, &options, 2);
    let task = training_task(&config, &options, 2).expect("a valid model");
    let budget = Budget::new(1 << 40, 1 << 40);
    for storage in [Storage::Keep, Storage::Offload, Storage::Recompute] {
        let forced = Forced { activations: Some(storage), ..Forced::default() };
        let chosen = plan(&task, &reference(), budget, &forced).expect("a plan");
        let found = planned(&config, &options, chosen.plan, Some(1));
        assert_eq!(found, expected, "{storage:?}");
    }
}
