//! Moments in 8 bits: which parameters have them, what is refused, and that training gives similar
//! losses.

use crate::support::{BATCH, Random, SEQUENCE, options, tiny};
use storm_graph::{AdamWParameters, Training};
use storm_model::{Adapters, BuildOptions, LoraOptions, ModelConfig, Packing, build};
use storm_train::{
    Batch, Moments, OptimizerMethod, Precision, ReferenceTrainer, TrainError, TrainOptions,
    training_task,
};

fn int8(precision: Precision) -> TrainOptions {
    let mut options = options(precision, Packing::Single);
    options.optimizer.moments = Moments::Int8;
    options
}

/// Embeddings, heads and vectors keep floats. Every other matrix is in 8 bits.
#[test]
fn matrices_of_layers_are_in_8_bits() {
    for name in ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen3-0.6b"] {
        let config = tiny(name);
        let compute = Precision::Bf16Stochastic.compute();
        let program = build(&config, &BuildOptions::training(BATCH, SEQUENCE, compute)).unwrap();
        for parameter in program.parameters() {
            assert_eq!(parameter.training, Training::Trainable);
            let format = Moments::Int8.format(Precision::Bf16Stochastic, &parameter);
            let is_layers =
                parameter.name.starts_with("attention.") || parameter.name.starts_with("mlp.");
            let expected = is_layers && parameter.shape.rank() == 2;
            let found = format.dtype() == storm_graph::DType::U8;
            assert_eq!(found, expected, "{name}: {}", parameter.name);
            let full = Moments::Full.format(Precision::Bf16Stochastic, &parameter);
            assert_eq!(full.dtype(), storm_graph::DType::BF16);
        }
    }
}

#[test]
fn what_would_do_nothing_or_has_no_bound_is_refused() {
    let problem = |config: &ModelConfig, options: &TrainOptions| {
        let error = training_task(config, options, 1).expect_err("refused");
        assert!(matches!(error, TrainError::Option { option: "moments", .. }), "{error}");
        error.to_string()
    };
    let config = tiny("llama-3.2-1b");
    assert!(problem(&config, &int8(Precision::F32)).contains("bf16 matrices"));
    let adapters = Some(Adapters::new(&config, LoraOptions::new(2, 4.0)).unwrap());
    let adapted = ModelConfig { adapters, ..config.clone() };
    assert!(
        problem(&adapted, &int8(Precision::Bf16Stochastic)).contains("none of those is trained")
    );
    let mut options = int8(Precision::Bf16Stochastic);
    let OptimizerMethod::AdamW(adamw) = options.optimizer.method else { panic!("the default") };
    options.optimizer.method =
        OptimizerMethod::AdamW(AdamWParameters { beta1: 0.95, beta2: 0.9, ..adamw });
    assert!(problem(&config, &options).contains("beta1² to be less than beta2"));
}

/// Tokens that follow a rule, with some noise.
fn rows(config: &ModelConfig, random: &mut Random) -> Batch {
    let mut tokens = Vec::new();
    for _ in 0..BATCH {
        let mut token = random.below(config.vocab_size);
        for _ in 0..=SEQUENCE {
            tokens.push(token as i32);
            token = match random.below(8) {
                0 => random.below(config.vocab_size),
                _ => (token * 5 + 3) % config.vocab_size,
            };
        }
    }
    let part = |first: usize| {
        let rows = tokens.chunks(SEQUENCE + 1);
        rows.flat_map(|row| row[first..first + SEQUENCE].to_vec()).collect::<Vec<i32>>()
    };
    Batch::new(part(0), part(1), SEQUENCE)
}

/// The mean loss of the last steps, over some seeds.
fn learned(moments: Moments) -> f64 {
    const STEPS: usize = 400;
    const LAST: usize = 150;
    let mut sum = 0.0;
    let seeds = [5, 6, 7];
    for seed in seeds {
        let config = tiny("llama-3.2-1b");
        let mut options = options(Precision::Bf16Stochastic, Packing::Single);
        options.optimizer.moments = moments;
        options.seed = seed;
        let mut trainer = ReferenceTrainer::new(&config, options).expect("a trainer");
        let mut random = Random(seed);
        for step in 0..STEPS {
            let batches = [rows(&config, &mut random), rows(&config, &mut random)];
            let loss = trainer.step(&batches, 3e-3).expect("a step").loss;
            if step >= STEPS - LAST {
                sum += f64::from(loss);
            }
        }
    }
    sum / (LAST * seeds.len()) as f64
}

#[test]
fn training_comes_out_as_with_full_moments() {
    let (full, int8) = (learned(Moments::Full), learned(Moments::Int8));
    assert!(full < 2.5, "nothing was learned: {full}");
    assert!((int8 / full - 1.0).abs() < 0.01, "{int8} with 8 bits, {full} without");
}
