use crate::{CheckpointError, StepReport, TrainError};
use std::io;
use std::path::{Path, PathBuf};
use storm_data::DataError;

/// Why a run ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// From the step, the device or a checkpoint.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A non-finite number.
    #[error(
        "step {step}: the loss is {} and the gradient norm {}: {culprit}. {} {} Try a \
         lower learning-rate, more warmup, or another precision",
        report.loss,
        report.gradient_norm,
        updated(*partly_updated),
        advice(checkpoint.as_deref())
    )]
    NotFinite {
        /// In which step.
        step: u64,
        /// What it yielded.
        report: StepReport,
        /// The first bad tensor.
        culprit: String,
        /// Whether the backward pass had applied gradients by then.
        partly_updated: bool,
        /// The last good checkpoint.
        checkpoint: Option<PathBuf>,
    },
    /// There is nothing to evaluate on.
    #[error("the held-out data has no target that counts; hold more of the data out, or none")]
    NothingHeldOut,
    /// Data cannot be had.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint's place in the data makes no sense.
    #[error(
        "the checkpoint's place in the data cannot be read: {problem}; resume from another one"
    )]
    Position {
        /// What is wrong.
        problem: String,
    },
    /// Metrics cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Where from.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Metrics, reports or progress cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// Where to.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl RunError {
    /// A file that cannot be read.
    pub fn read(path: &Path) -> impl FnOnce(io::Error) -> RunError {
        let path = path.to_owned();
        move |source| RunError::Read { path, source }
    }

    /// A file that cannot be written.
    pub fn write(path: &Path) -> impl FnOnce(io::Error) -> RunError {
        let path = path.to_owned();
        move |source| RunError::Write { path, source }
    }
}

impl From<CheckpointError> for RunError {
    fn from(error: CheckpointError) -> RunError {
        RunError::Train(error.into())
    }
}

fn updated(partly: bool) -> &'static str {
    match partly {
        true => "Layers behind it were updated already, so the weights are lost.",
        false => "Nothing was updated.",
    }
}

fn advice(checkpoint: Option<&Path>) -> String {
    match checkpoint {
        Some(path) => format!("The last good checkpoint is {}.", path.display()),
        None => "There is no checkpoint yet.".to_owned(),
    }
}
