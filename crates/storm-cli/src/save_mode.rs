//! How checkpoints are saved, as people write it.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What steps do while a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SaveModeArg {
    /// They go on if the plan leaves host memory for a snapshot, and else wait.
    Auto,
    /// They go on; the plan gets so much less host memory.
    Background,
    /// They wait.
    Pause,
}
