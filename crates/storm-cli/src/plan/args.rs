//! What `storm plan` is called with.

use crate::forced::ForcedArgs;
use crate::hardware;
use crate::precision::PrecisionArg;
use crate::save_mode::SaveModeArg;
use crate::size::{self, positive};
use clap::Args;
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// A preset (see `storm model list`), a Hugging Face directory, or the name of a model on the hub,
    /// `OWNER/MODEL`: only config.json is read.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Sequences per micro-batch.
    #[arg(long, value_parser = positive, conflicts_with = "tokens_per_step")]
    pub(super) batch: Option<usize>,
    /// Micro-batches per step; 1 if not given.
    #[arg(long, value_parser = positive, conflicts_with = "tokens_per_step")]
    pub(super) accumulate: Option<usize>,
    /// Tokens of a step instead of --batch and --accumulate, which are then chosen for speed.
    #[arg(long, value_parser = positive)]
    pub(super) tokens_per_step: Option<usize>,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 1024, value_parser = positive)]
    pub(super) seq: usize,
    /// Storage of parameters, gradients and optimizer state.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Bf16Stochastic)]
    pub(super) precision: PrecisionArg,
    /// Rows of logits that exist at a time.
    #[arg(long, default_value_t = 2048, value_parser = positive)]
    pub(super) chunk_rows: usize,
    /// Device memory of the process, everything included: 16GiB, 12GB, 500MiB. If not given, that of
    /// the card less a little.
    #[arg(long, value_parser = size::parse)]
    pub(super) vram: Option<u64>,
    /// Host memory for what does not stay on the device. If not given, what this machine or its
    /// control group has available less a little.
    #[arg(long, value_parser = size::parse)]
    pub(super) ram: Option<u64>,
    #[arg(long, value_name = "NAME|FILE", help = hardware::help())]
    pub(super) hardware: Option<String>,
    /// What steps do while a checkpoint is written.
    #[arg(long, value_enum, default_value_t = SaveModeArg::Auto)]
    pub(super) save_mode: SaveModeArg,
    /// One object of JSON instead of tables.
    #[arg(long)]
    pub(super) json: bool,
    /// Write the simulated step to this file, for Chrome's about:tracing or ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(super) forced: ForcedArgs,
}
