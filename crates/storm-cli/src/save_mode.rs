//! The save mode of checkpoints.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Whether training continues while a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SaveModeArg {
    /// Continue if the plan leaves enough host memory for a snapshot, else pause.
    Auto,
    /// Continue; the plan gets less host memory, by the size of a snapshot.
    Background,
    /// Pause until the checkpoint is on disk.
    Pause,
}
