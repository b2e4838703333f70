//! `storm bench`: training speed and loss, measured.

mod attention;
mod budgeted;
mod checkpoint;
mod clocked;
mod cpu;
mod curve;
mod energy;
mod generate;
mod loss;
mod op_times;
mod outputs;
mod planned;
mod predict;
mod run_args;
mod train;

use anyhow::Result;
use clap::Subcommand;
pub(crate) use planned::{Benched, Measured, PlannedRun};
pub(crate) use run_args::RunArgs;

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// A 10M-parameter GPT on the CPU: 6 layers, 384 wide, context 256, batch 8.
    Cpu(cpu::CpuArgs),
    /// A real model on random tokens, with everything in device memory or under a budget.
    Train(train::TrainBenchArgs),
    /// A real model under one budget after another: a table and a picture of speed against memory.
    Curve(curve::CurveArgs),
    /// What a checkpoint every `--steps` steps costs a run: rounds of so many steps with and without.
    Checkpoint(checkpoint::CheckpointBenchArgs),
    /// Text by a model with random weights, token by token: everything in device memory, or streamed under a budget.
    Generate(generate::GenerateBenchArgs),
    /// What a change of options does to the loss: a config with and without it, over several seeds.
    Loss(loss::LossArgs),
    /// What predictions gain over plain training: tuned, with controls, over several seeds and with all overheads.
    Predict(predict::PredictBenchArgs),
    /// One attention op, forward and backward, on a GPU.
    Attention(attention::AttentionBenchArgs),
}

pub(crate) fn run(command: &BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Cpu(args) => cpu::run(args),
        BenchCommand::Train(args) => train::run(args),
        BenchCommand::Curve(args) => curve::run(args),
        BenchCommand::Checkpoint(args) => checkpoint::run(args),
        BenchCommand::Generate(args) => generate::run(args),
        BenchCommand::Loss(args) => loss::run(args),
        BenchCommand::Predict(args) => predict::run(args),
        BenchCommand::Attention(args) => attention::run(args),
    }
}
