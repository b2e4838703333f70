//! Tasks shared by the tests.

use storm_model::{Adapters, LoraOptions, ModelConfig, Packing, preset};
use storm_plan::{
    Budget, Forced, HardwareProfile, LinkProfile, PlanError, Planned, Task, Tier, TooSmall, plan,
};
use storm_train::{Precision, TrainOptions, training_task};

/// One preset per family, tied and untied.
pub(crate) const FAMILIES: [&str; 5] =
    ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"];

pub(crate) fn profile(name: &str) -> HardwareProfile {
    HardwareProfile::builtin(name).expect("built in")
}

/// A profile without fixed costs, on which tiny models behave as large ones do on a card.
pub(crate) fn small_card(flops: f64, bus: f64) -> HardwareProfile {
    HardwareProfile {
        name: "small".to_owned(),
        overhead_bytes: 0,
        gemm_flops: flops,
        gemm_f32_flops: flops,
        gemm_fp8_flops: None,
        attention_forward_flops: flops / 2.0,
        attention_backward_flops: flops / 2.0,
        memory_bandwidth: flops / 100.0,
        links: vec![LinkProfile {
            near: Tier::DEVICE,
            far: Tier::HOST,
            to_near_bandwidth: bus,
            to_far_bandwidth: bus,
            duplex_bandwidth: 2.0 * bus,
            latency_seconds: 0.0,
        }],
        kernel_seconds: 0.0,
        launch_seconds: 0.0,
        ..profile("reference")
    }
}

/// The same machine with a disk.
pub(crate) fn with_disk(mut profile: HardwareProfile, read: f64, write: f64) -> HardwareProfile {
    profile.links.push(LinkProfile {
        near: Tier::HOST,
        far: Tier::DISK,
        to_near_bandwidth: read,
        to_far_bandwidth: write,
        duplex_bandwidth: read.max(write) * 1.2,
        latency_seconds: 0.0,
    });
    profile
}

/// A model with adapters and frozen weights.
pub(crate) fn adapted(config: ModelConfig) -> ModelConfig {
    let adapters = Adapters::new(&config, LoraOptions::new(3, 6.0)).expect("adapters that fit");
    ModelConfig { adapters: Some(adapters), ..config }
}

pub(crate) fn tiny(name: &str) -> ModelConfig {
    let mut config = preset(name).expect("a preset");
    config.vocab_size = 53;
    config.hidden_size = 24;
    config.layer_count = 4;
    config.query_heads = 4;
    config.kv_heads = if name == "gpt2" { 4 } else { 2 };
    config.head_dim = if config.family.has_query_key_norm() { 10 } else { 6 };
    config.intermediate_size = 44;
    config.max_positions = 40;
    config
}

pub(crate) fn tiny_options() -> TrainOptions {
    TrainOptions {
        packing: Packing::Single,
        chunk_rows: 7,
        ..TrainOptions::new(2, 13, Precision::Bf16Stochastic)
    }
}

pub(crate) fn tiny_task(config: &ModelConfig, micro_batches: usize) -> Task {
    training_task(config, &tiny_options(), micro_batches).expect("a valid model")
}

/// Options of real models: sequences of 1024, logits 2048 rows at a time.
pub(crate) fn real_options(batch: usize) -> TrainOptions {
    TrainOptions { chunk_rows: 2048, ..TrainOptions::new(batch, 1024, Precision::Bf16Stochastic) }
}

pub(crate) fn real_task(name: &str, batch: usize, micro_batches: usize) -> Task {
    let config = preset(name).expect("a preset");
    training_task(&config, &real_options(batch), micro_batches).expect("a valid model")
}

pub(crate) fn budget(vram_bytes: u64, ram_bytes: u64) -> Budget {
    Budget::new(vram_bytes, ram_bytes)
}

pub(crate) fn gib(count: u64) -> u64 {
    count << 30
}

/// The least memory that works, as the planner reports it.
#[track_caller]
pub(crate) fn least(
    task: &Task,
    profile: &HardwareProfile,
    ram_bytes: u64,
    forced: &Forced,
) -> TooSmall {
    match plan(task, profile, budget(0, ram_bytes), forced) {
        Err(PlanError::TooSmall(least)) => *least,
        other => panic!("no memory at all is too small, but: {other:?}"),
    }
}

#[track_caller]
pub(crate) fn planned(task: &Task, profile: &HardwareProfile, budget: Budget) -> Planned {
    plan(task, profile, budget, &Forced::default()).expect("a plan that fits")
}
