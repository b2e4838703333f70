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
    /// Time a 10M-parameter GPT on the CPU: 6 layers, width 384, context 256, batch 8.
    Cpu(cpu::CpuArgs),
    /// Time training steps of a preset on random tokens, with everything in device memory or under a budget.
    Train(train::TrainBenchArgs),
    /// Time a preset under several memory budgets: a table and a plot of speed against memory.
    Curve(curve::CurveArgs),
    /// Measure what a checkpoint every `--steps` steps costs: rounds of that many steps with and without one.
    Checkpoint(checkpoint::CheckpointBenchArgs),
    /// Time text generation by a preset with random weights, with everything in device memory or streamed under a
    /// budget.
    Generate(generate::GenerateBenchArgs),
    /// Compare the losses of a config with and without a change of options, over several seeds.
    Loss(loss::LossArgs),
    /// Compare weight prediction with plain training: tuned, with controls, over several seeds, all overheads included.
    Predict(predict::PredictBenchArgs),
    /// Time one attention op on a GPU, forward and backward.
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
