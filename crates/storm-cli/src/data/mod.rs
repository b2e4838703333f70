//! `storm data`: datasets on disk.

mod batches;
pub(crate) mod disk_rates;
mod estimate;
mod inspect;
mod model_rate;
mod pack;
mod progress;
mod records;

pub(crate) use progress::{ByteProgress, Show};

use anyhow::Result;
use clap::Subcommand;
use std::io::ErrorKind;
use storm_data::{DataError, WorkerCommand, run_worker};

#[derive(Subcommand)]
pub(crate) enum DataCommand {
    /// Turn text, JSON, tables or images into a dataset: shards that training reads without loading them.
    Pack(pack::PackArgs),
    /// Show what a dataset holds, and check it.
    Inspect(inspect::InspectArgs),
    /// Write the batches that training sees, in their order, for other programs to train on.
    Batches(batches::BatchesArgs),
    /// Say how fast records can be read here, which stage is the slowest, and what memory that takes.
    Estimate(estimate::EstimateArgs),
    /// Run third-party code for another process of this program; started by it alone.
    #[command(hide = true)]
    Worker,
}

pub(crate) fn run(command: &DataCommand) -> Result<()> {
    match command {
        DataCommand::Pack(args) => pack::run(args),
        DataCommand::Inspect(args) => inspect::run(args),
        DataCommand::Batches(args) => batches::run(args),
        DataCommand::Estimate(args) => estimate::run(args),
        DataCommand::Worker => Ok(run_worker()?),
    }
}

/// How this program runs third-party code: in another process of itself.
pub(crate) fn worker() -> Result<WorkerCommand, DataError> {
    WorkerCommand::this_program(["data", "worker"])
}

/// 2 if an option makes no sense, 1 if the machine is at fault, 4 if the data is.
pub(crate) fn code_of(error: &DataError) -> u8 {
    match error {
        DataError::Option { .. } => 2,
        DataError::ReadBlock { .. } | DataError::NoThread(_) => 1,
        DataError::Io { source, .. } => match source.kind() {
            ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::NotADirectory => 4,
            // A device or a FIFO where a plain file should be.
            ErrorKind::InvalidInput => 4,
            _ => 1,
        },
        _ => 4,
    }
}
