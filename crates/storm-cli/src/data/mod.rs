//! `storm data`: datasets on disk.

mod batches;
pub(crate) mod disk_rates;
mod estimate;
mod inspect;
mod model_rate;
mod pack;
mod progress;
mod records;

pub(crate) use pack::{CodecArg, pack_showing};
pub(crate) use progress::{ByteProgress, Show};
pub(crate) use records::pack_records_showing;

use anyhow::Result;
use clap::Subcommand;
use std::io::ErrorKind;
use storm_data::{DataError, WorkerCommand, run_worker};

#[derive(Subcommand)]
pub(crate) enum DataCommand {
    /// Convert text, JSON, tables or images to a dataset on disk, which training streams from there.
    Pack(pack::PackArgs),
    /// Show what a dataset holds; --verify checks its checksums.
    Inspect(inspect::InspectArgs),
    /// Write the batches that training reads, in order, to a file for other programs.
    Batches(batches::BatchesArgs),
    /// Estimate how fast this machine can read a dataset, which stage is the slowest, and what memory it takes.
    Estimate(estimate::EstimateArgs),
    /// Run third-party code in a separate process; only STORM itself starts this.
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
