//! Plans of real models: every decision gives a plan that the checker accepts.

use storm_model::{ModelConfig, Packing, preset};
use storm_plan::{HardwareProfile, Lowering, MemoryBudget, Task, random_decisions, verify};
use storm_train::{Precision, TrainOptions, training_task};

fn tiny(name: &str) -> ModelConfig {
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

fn task(config: &ModelConfig, micro_batches: usize) -> Task {
    let options = TrainOptions {
        packing: Packing::Single,
        chunk_rows: 7,
        ..TrainOptions::new(2, 13, Precision::Bf16Stochastic)
    };
    training_task(config, &options, micro_batches).expect("a valid model")
}

#[test]
fn random_decisions_give_sound_plans() {
    let profile = HardwareProfile::builtin("reference").expect("built in");
    for name in ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"] {
        let config = tiny(name);
        for micro_batches in [1, 2, 4, 6] {
            let task = task(&config, micro_batches);
            let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
            for seed in 0..40 {
                let decisions = random_decisions(&task, seed);
                let plan = lowering.lower(&decisions).expect("decisions that work");
                let budget =
                    MemoryBudget { device_bytes: plan.device_bytes, host_bytes: plan.host_bytes };
                if let Err(error) = verify(&plan, budget) {
                    panic!(
                        "{name}, {micro_batches} micro-batches, seed {seed}: {error}\n{decisions:?}"
                    );
                }
            }
        }
    }
}
