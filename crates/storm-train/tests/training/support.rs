//! Tiny models of every family, seeded batches, and a fingerprint of a training run.

pub(crate) use storm_graph::random::Random;
use storm_graph::{IGNORE_INDEX, Program};
use storm_host::allocation::AllocationMeter;
use storm_model::{ModelConfig, Packing, build, preset};
use storm_train::{Batch, Precision, ReferenceTrainer, TrainOptions};

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;

pub(crate) const SEQUENCE: usize = 13;
pub(crate) const BATCH: usize = 2;

/// One small odd-shaped model per family.
pub(crate) fn families() -> Vec<ModelConfig> {
    ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"].map(tiny).into()
}

pub(crate) fn tiny(name: &str) -> ModelConfig {
    let mut config = preset(name).expect("a preset");
    config.vocab_size = 53;
    config.hidden_size = 24;
    config.layer_count = 3;
    config.query_heads = 4;
    config.kv_heads = if config.kv_heads == config.query_heads { 4 } else { 2 };
    config.head_dim = if config.family.has_query_key_norm() { 10 } else { 6 };
    config.intermediate_size = 44;
    config.max_positions = 40;
    if name == "gpt2" {
        config.kv_heads = 4;
    }
    config.initializer_range = 0.2;
    config
}

/// Random tokens. About one target in five is ignored.
pub(crate) fn batch(config: &ModelConfig, packing: Packing, seed: u64) -> Batch {
    let mut random = Random(seed);
    let rows = BATCH * SEQUENCE;
    let tokens = (0..rows).map(|_| random.below(config.vocab_size) as i32).collect();
    let targets = (0..rows)
        .map(|_| match random.below(5) {
            0 => IGNORE_INDEX,
            _ => random.below(config.vocab_size) as i32,
        })
        .collect();
    match packing {
        Packing::Single => Batch::new(tokens, targets, SEQUENCE),
        Packing::Segments => {
            let segments = (0..rows).map(|i| (i % SEQUENCE / 5) as i32).collect();
            Batch::packed(tokens, targets, segments, SEQUENCE)
        }
    }
}

pub(crate) fn options(precision: Precision, packing: Packing) -> TrainOptions {
    // A chunk that does not divide the rows.
    TrainOptions {
        packing,
        chunk_rows: 7,
        seed: 5,
        ..TrainOptions::new(BATCH, SEQUENCE, precision)
    }
}

/// Every bit that a run of a few steps produces: losses, norms, gradients, parameters, moments.
pub(crate) fn fingerprint(
    config: &ModelConfig,
    options: &TrainOptions,
    change: impl Fn(&mut Program),
) -> Vec<u32> {
    let program = build(config, &options.build_options()).expect("a valid model");
    let mut trainer =
        ReferenceTrainer::with_passes(config, options.clone(), program, change).expect("a trainer");
    let mut bits = Vec::new();
    for step in 0..3 {
        let batches = [
            batch(config, options.packing, 2 * step),
            batch(config, options.packing, 2 * step + 1),
        ];
        let report = trainer.step(&batches, 1e-2).expect("a step");
        bits.extend([report.loss.to_bits(), report.gradient_norm.to_bits()]);
    }
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    for name in names {
        for suffix in ["", ".grad", ".first_moment", ".second_moment"] {
            let values = trainer.read(&format!("{name}{suffix}")).expect("a tensor");
            bits.extend(values.into_iter().map(f32::to_bits));
        }
    }
    bits
}
