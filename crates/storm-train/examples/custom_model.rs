//! A model that no preset knows, trained in a third of the memory that it would take.
//!
//! Its layers are parallel: attention and MLP read the same norm, and both add to the residual stream.

use std::sync::Arc;
use storm_device::cpu::{Bf16Products, CpuPlanDevice, CpuPlanOptions, probe_cpu};
use storm_graph::{
    ActivationFunction, DType, GraphError, HeadLayout, Program, SectionBuilder, Stage,
};
use storm_model::Initialization;
use storm_plan::{Budget, Forced, Tier, plan};
use storm_train::{Batch, Precision, TrainOptions, Trainer, task_of_program};

const BATCH: usize = 8;
const SEQUENCE: usize = 32;
const VOCABULARY: usize = 64;
const WIDTH: usize = 64;
const HEADS: HeadLayout = HeadLayout { query_heads: 4, key_value_heads: 4, head_dim: 16 };

fn parallel_transformer() -> Result<Program, GraphError> {
    let mut embedding = SectionBuilder::new("embedding", BATCH, SEQUENCE, DType::F32);
    let hidden = embedding.embedding("tokens", VOCABULARY, WIDTH)?; // (B, T, C)
    let embedding = embedding.hand_on(hidden);

    let (mut layer, hidden) = SectionBuilder::after(&embedding, "layer")?;
    let normed = layer.rms_norm("norm", hidden, 1e-5)?; // (B, T, C)
    let qkv = layer.linear("qkv", normed, 3 * WIDTH)?; // (B, T, 3 C)
    let attended = layer.causal_attention("attention", qkv, HEADS)?; // (B, T, C)
    let up = layer.linear("mlp.up", normed, 4 * WIDTH)?; // (B, T, 4 C)
    let active = layer.activation("mlp.silu", up, ActivationFunction::Silu)?;
    let hidden = layer.linear_onto("attention.out", attended, hidden)?; // (B, T, C)
    let hidden = layer.linear_onto("mlp.down", active, hidden)?; // (B, T, C)
    let layer = layer.hand_on(hidden);

    let (mut head, hidden) = SectionBuilder::after(&layer, "head")?;
    let normed = head.rms_norm("final.norm", hidden, 1e-5)?; // (B, T, C)
    let head = head.loss(normed, VOCABULARY, 128)?;
    let stages =
        vec![Stage::once("embedding", 0), Stage::repeated("layers", 1, 6), Stage::once("head", 2)];
    Program::new(vec![embedding, layer, head], stages)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let program = parallel_transformer()?;
    let options = TrainOptions::new(BATCH, SEQUENCE, Precision::F32);
    let task = task_of_program(&program, &options, 1)?; // one micro-batch per step

    // With memory to spare the planner keeps everything; then it gets a third of what that took.
    let profile = probe_cpu(1 << 30, None, Bf16Products::Fma)?;
    let spare = Budget::new(1 << 30, 1 << 30);
    let resident =
        plan(&task, &profile, spare, &Forced::default())?.prediction.peak_bytes[Tier::DEVICE];
    let budget = spare.with(Tier::DEVICE, resident / 3);
    let planned = plan(&task, &profile, budget, &Forced::default())?;
    let peak = planned.prediction.peak_bytes[Tier::DEVICE];
    println!("{} KiB of device memory instead of {}", peak >> 10, resident >> 10);

    let start = |name: &str| match name.ends_with("norm.weight") {
        true => Initialization::Constant(1.0),
        false => Initialization::Normal { deviation: 0.05 },
    };
    let (plan, device) = (Arc::new(planned.plan), CpuPlanOptions::default());
    let mut trainer = Trainer::<CpuPlanDevice>::of_program(&program, options, plan, device, start)?;

    // Each row counts up by a stride of its own: two tokens say what comes next.
    let rows = |ahead: usize| -> Vec<i32> {
        let token = |at: usize| (at % SEQUENCE + ahead) * (1 + at / SEQUENCE) % VOCABULARY;
        (0..BATCH * SEQUENCE).map(|at| token(at) as i32).collect()
    };
    let batch = Batch::new(rows(0), rows(1), SEQUENCE);
    let mut losses = Vec::new();
    for step in 0..60 {
        losses.push(trainer.step(std::slice::from_ref(&batch), 3e-3)?.loss);
        if step % 10 == 0 {
            println!("step {step:2}  loss {:.4}", losses[step]);
        }
    }
    assert!(losses[59] < losses[0] / 4.0, "it should learn: {losses:?}");
    Ok(())
}
