use crate::{CheckpointError, StepReport, TrainError};
use std::io;
use std::path::{Path, PathBuf};
use storm_data::DataError;

/// Why a run failed.
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
        /// The step.
        step: u64,
        /// The loss and the gradient norm of the step.
        report: StepReport,
        /// The first bad tensor.
        culprit: String,
        /// Whether the backward pass had already applied gradients.
        partly_updated: bool,
        /// The last good checkpoint.
        checkpoint: Option<PathBuf>,
    },
    /// There is no held-out data to evaluate on.
    #[error("the held-out data has no target that counts; hold more of the data out, or none")]
    NothingHeldOut,
    /// There is no held-out data to test on.
    #[error(
        "the held-out rows of the test have no target that counts; hold more of the data out, or leave out test"
    )]
    NothingToTest,
    /// Data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The data position in a checkpoint is invalid.
    #[error(
        "the checkpoint's place in the data cannot be read: {problem}; resume from another one"
    )]
    Position {
        /// What is wrong.
        problem: String,
    },
    /// A file, such as the metrics, cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file, such as metrics or a report, cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl RunError {
    /// Wraps an error of reading a file.
    pub fn read(path: &Path) -> impl FnOnce(io::Error) -> RunError {
        let path = path.to_owned();
        move |source| RunError::Read { path, source }
    }

    /// Wraps an error of writing a file.
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
