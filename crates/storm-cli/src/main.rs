//! The `storm` command line.

mod bench;
mod bench_attention;
mod bench_planned;
mod bench_train;
mod clocked;
mod export;
mod model;
mod op_times;
mod probe;
mod size;
mod verify;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use storm_model::ModelError;
use storm_train::TrainError;

/// Trains neural networks that do not fit in GPU memory.
#[derive(Parser)]
#[command(
    name = "storm",
    version,
    propagate_version = true,
    after_help = "Exit codes: 0 done, 1 failure, 2 usage, 4 bad input (a file or name that cannot be used)."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Look at models: presets by name, or Hugging Face directories.
    #[command(subcommand)]
    Model(model::ModelCommand),
    /// Check a Hugging Face directory and write it anew: other dtype, other shard size.
    Export(export::ExportArgs),
    /// Measure training speed.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Measure what this machine's GPU can do, and write it down for the planner. Needs a GPU.
    Probe(probe::ProbeArgs),
    /// Prove that a device computes what the CPU device computes. Needs a GPU.
    Verify(verify::VerifyArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Model(command) => model::run(&command),
        Command::Export(args) => export::run(&args),
        Command::Bench(command) => bench::run(&command),
        Command::Probe(args) => probe::run(&args),
        Command::Verify(args) => verify::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", message(&error));
            exit_code(&error)
        }
    }
}

/// The error and its causes; a cause that the message before it already states is left out.
fn message(error: &anyhow::Error) -> String {
    let mut message = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if message.is_empty() {
            message = cause;
        } else if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}

/// 4 if the user's files or names are at fault, 1 otherwise.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    let bad_input = error.chain().any(|cause| {
        cause.is::<ModelError>()
            || matches!(cause.downcast_ref(), Some(TrainError::Model(_) | TrainError::Batch { .. }))
    });
    ExitCode::from(if bad_input { 4 } else { 1 })
}
