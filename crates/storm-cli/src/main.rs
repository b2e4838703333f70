//! The `storm` command line.

#[macro_use]
mod streams;

mod base;
mod bench;
mod chat;
mod codec;
mod cpu_products;
mod data;
mod decoder;
mod disk;
mod disk_tier;
mod doctor;
mod drive_wear;
mod eval;
mod export;
mod forced;
mod hardware;
mod host_memory;
mod image_source;
mod init;
mod joined;
mod lengths;
mod loading;
mod lora;
mod machines;
mod manual;
mod memory_limits;
mod merge;
mod model;
mod model_tokenizer;
mod option_table;
mod plan;
mod precision;
mod predict;
mod probe;
mod progress;
mod report;
mod run_page;
mod sample;
mod save_mode;
mod size;
mod source;
mod train;
mod tuning;
mod verify;
mod writing;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use hardware::BadProfile;
use source::NoModel;
use std::process::ExitCode;
use storm_data::DataError;
use storm_device::DeviceError;
use storm_exec::ExecError;
use storm_files::StageError;
use storm_host::ScratchError;
use storm_hub::HubError;
use storm_model::ModelError;
use storm_plan::{PlanError, ProfileError};
use storm_train::{CheckpointError, RunError, TrainError};
use train::BadConfig;

/// Trains neural networks that do not fit in GPU memory.
#[derive(Parser)]
#[command(
    name = "storm",
    version,
    propagate_version = true,
    after_help = "Exit codes: 0 done, 1 failure, 2 usage, 3 does not fit the memory budget, 4 bad input (an unusable file or name)."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Ask a few questions and write a commented config for `storm train`.
    Init(init::InitArgs),
    /// Train a model within a memory budget, from a config file, from flags, or from both.
    Train(Box<train::TrainArgs>),
    /// Generate text with a model, on the GPU if there is a usable one, else on the CPU.
    Sample(sample::SampleArgs),
    /// Chat with a model, using its chat template, on the GPU if there is a usable one, else on the CPU.
    Chat(chat::ChatArgs),
    /// Measure the loss of a model on a dataset, and its perplexity or accuracy.
    Eval(eval::EvalArgs),
    /// Rebuild the report page of a run from its metrics, also while the run is going or after it was killed.
    Report(report::ReportArgs),
    /// List the presets; show the shape and memory needs of a model.
    #[command(subcommand)]
    Model(model::ModelCommand),
    /// Check a model and write it as a Hugging Face directory: a checkpoint of a run, or another dtype or shard size.
    Export(export::ExportArgs),
    /// Merge a LoRA adapter into its base weights and write the model as a Hugging Face directory.
    Merge(merge::MergeArgs),
    /// Pack datasets of text or pictures, inspect them, and estimate how fast they can be read.
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Plan a training step within a memory budget and predict its memory, copies and speed. Needs no GPU.
    Plan(plan::PlanArgs),
    /// Benchmark training, text generation and checkpoints, or compare the losses of runs.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Measure the GPU, or the CPU with `--device cpu`, and the disk, and write a hardware profile for the planner.
    Probe(probe::ProbeArgs),
    /// Check what this machine can use, what is missing, and how to fix it.
    Doctor(doctor::DoctorArgs),
    /// Check that a GPU computes what the CPU computes, that no plan changes a bit, and that training under a budget
    /// performs as claimed. Needs a GPU, except for `--data --device cpu`.
    ///
    /// Without --ops, --models, --plans, --queues, --claims or --data, every check but --data runs.
    Verify(verify::VerifyArgs),
    /// Print a completion script for a shell.
    Completions(manual::CompletionsArgs),
    /// Write the manual pages to a folder.
    Man(manual::ManArgs),
    /// Print every command and option as JSON.
    #[command(hide = true)]
    OptionTable,
}

fn main() -> ExitCode {
    let matches = train::with_defaults(Cli::command()).try_get_matches();
    let cli = matches.and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = cli.unwrap_or_else(|error| leave(&error));
    let result = start_threads().and_then(|()| run(cli.command));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(print_error(&error)),
    }
}

/// Prints what went wrong and returns the exit code.
fn print_error(error: &anyhow::Error) -> u8 {
    eprintln!("error: {}", message(error));
    code_of(error)
}

/// Starts the threads that everything shares. Left to its first use, a system without threads to give would end
/// in a panic.
fn start_threads() -> Result<()> {
    rayon::ThreadPoolBuilder::new().build_global().map_err(|error| {
        let reason = error.to_string();
        DeviceError::Thread { reason }.into()
    })
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Init(args) => init::run(&args),
        Command::Train(args) => train::run(*args),
        Command::Sample(args) => sample::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Model(command) => model::run(&command),
        Command::Export(args) => export::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::Data(command) => data::run(&command),
        Command::Plan(args) => plan::run(&args),
        Command::Bench(command) => bench::run(&command),
        Command::Probe(args) => probe::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Completions(args) => {
            manual::completions(&args, train::with_defaults(Cli::command()));
            Ok(())
        }
        Command::Man(args) => manual::man(&args, train::with_defaults(Cli::command())),
        Command::OptionTable => {
            option_table::print(&Cli::command());
            Ok(())
        }
    }
}

/// Ends the program as the parser would: with help, or with what is wrong with the arguments.
fn leave(error: &clap::Error) -> ! {
    let is_plain = |argument: std::ffi::OsString| {
        let argument = argument.to_string_lossy();
        streams::plain(&argument) == argument
    };
    if std::env::args_os().all(is_plain) {
        error.exit();
    }
    // The message repeats arguments: without colours, so that it holds no escapes but theirs.
    let text = error.render().to_string();
    match error.use_stderr() {
        true => eprintln!("{}", text.trim_end()),
        false => println!("{}", text.trim_end()),
    }
    std::process::exit(error.exit_code());
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

/// A call that cannot be understood, for what the parser does not see.
#[derive(Debug)]
struct UsageError(String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// A call that takes more memory than it is given, beside any plan.
#[derive(Debug)]
struct OverBudget(String);

impl std::fmt::Display for OverBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for OverBudget {}

/// 2 if the call makes no sense, 3 if the budget is too small, 4 if the user's files or names are at
/// fault, 1 otherwise.
fn code_of(error: &anyhow::Error) -> u8 {
    error.chain().find_map(code_of_cause).unwrap_or(1)
}

fn code_of_cause(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if let Some(error) = cause.downcast_ref::<TrainError>() {
        return match error {
            TrainError::Model(_)
            | TrainError::Batch { .. }
            | TrainError::NonFiniteParameter { .. } => Some(4),
            TrainError::Option { .. } => Some(2),
            TrainError::Exec(ExecError::Device(DeviceError::Memory(_))) => Some(3),
            TrainError::Plan(error) => code_of_cause(error),
            TrainError::Checkpoint(error) => code_of_cause(error),
            _ => None,
        };
    }
    match cause.downcast_ref() {
        Some(RunError::Train(error)) => return code_of_cause(error),
        Some(RunError::Data(error)) => return code_of_cause(error),
        _ => {}
    }
    if let Some(error) = cause.downcast_ref::<CheckpointError>() {
        let is_input =
            !matches!(error, CheckpointError::DiskFull { .. } | CheckpointError::Io { .. });
        return is_input.then_some(4);
    }
    if let Some(error) = cause.downcast_ref::<HubError>() {
        let is_machine = matches!(
            error,
            HubError::Network { .. }
                | HubError::DiskFull { .. }
                | HubError::Io { .. }
                | HubError::Busy { .. }
        );
        return (!is_machine).then_some(4);
    }
    if let Some(StageError::Refused { .. }) = cause.downcast_ref() {
        return Some(4);
    }
    if let Some(ScratchError::Full { .. }) = cause.downcast_ref() {
        return Some(3);
    }
    if let Some(error) = cause.downcast_ref::<DataError>() {
        return Some(data::code_of(error));
    }
    match cause.downcast_ref() {
        Some(PlanError::TooSmall(_)) => return Some(3),
        _ if cause.is::<OverBudget>() => return Some(3),
        Some(PlanError::Decisions { .. }) => return Some(2),
        _ => {}
    }
    let is_input = cause.is::<ModelError>()
        || cause.is::<ProfileError>()
        || cause.is::<BadProfile>()
        || cause.is::<NoModel>()
        || cause.is::<BadConfig>();
    match (cause.is::<UsageError>(), is_input) {
        (true, _) => Some(2),
        (_, true) => Some(4),
        _ => None,
    }
}
