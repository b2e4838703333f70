//! Arguments of `storm plan`.

use super::ranks::RankArgs;
use crate::base::BaseArg;
use crate::codec::CodecArg;
use crate::disk_tier::DiskArgs;
use crate::forced::ForcedArgs;
use crate::hardware;
use crate::lora::LoraArg;
use crate::precision::{MomentsArg, PrecisionArg};
use crate::save_mode::SaveModeArg;
use crate::size::{self, positive};
use crate::train::{Given, SizeOption};
use clap::Args;
use std::num::NonZeroUsize;
use std::path::PathBuf;

#[derive(Args)]
#[command(
    after_help = "With a config file, this is the plan that `storm train CONFIG` would use on this machine, or \
                  on --hardware. Flags override the file."
)]
pub(crate) struct PlanArgs {
    /// Config file of a run; model, step size, precision and memory come from it.
    pub(super) config: Option<PathBuf>,
    /// A preset (`storm model list`), a Hugging Face directory, or a model on the hub (`OWNER/MODEL`). Only config.json
    /// is read.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Train LoRA adapters beside frozen weights, as in a config file: `rank=16, targets="all-linear"`.
    #[arg(long)]
    pub(super) lora: Option<LoraArg>,
    /// How the frozen weights of a LoRA run are stored. Default: bf16.
    #[arg(long, value_enum)]
    pub(super) base: Option<BaseArg>,
    /// Sequences or pictures per micro-batch. Without a config file, give this or --tokens-per-step.
    #[arg(long, value_parser = positive, conflicts_with = "tokens_per_step")]
    pub(super) batch: Option<usize>,
    /// Micro-batches per step (gradient accumulation). Default: 1.
    #[arg(long, value_parser = positive, conflicts_with = "tokens_per_step")]
    pub(super) accumulate: Option<usize>,
    /// Tokens per step, instead of --batch and --accumulate, which are then chosen for speed.
    #[arg(long, value_parser = positive)]
    pub(super) tokens_per_step: Option<usize>,
    /// Tokens per sequence. Default without a config file: 1024.
    #[arg(long, value_parser = positive)]
    pub(super) seq: Option<usize>,
    /// Number formats of parameters, gradients, optimizer state and matrix products. Default: bf16-stochastic.
    #[arg(long, value_enum)]
    pub(super) precision: Option<PrecisionArg>,
    /// How both moments of the optimizer are stored. Default: full.
    #[arg(long, value_enum)]
    pub(super) moments: Option<MomentsArg>,
    /// How activations are stored until the backward pass. Default: none.
    #[arg(long, value_enum)]
    pub(super) activation_codec: Option<CodecArg>,
    /// Rows (tokens) of logits to compute at a time. Default: 2048.
    #[arg(long, value_parser = positive)]
    pub(super) chunk_rows: Option<usize>,
    /// Device memory that the process may use, including the CUDA context: 16GiB, 12GB, 500MiB. Default: the card's
    /// memory less 2 %.
    #[arg(long, value_parser = size::parse)]
    pub(super) vram: Option<u64>,
    /// Host memory that the run may use: 64GiB. Default: what this machine or its control group has available, less an
    /// eighth but at most 4 GiB.
    #[arg(long, value_parser = size::parse)]
    pub(super) ram: Option<u64>,
    /// Folder on a local disk for optimizer state and frozen weights that do not fit in host memory. The speed of the
    /// disk is measured; no files stay behind.
    #[arg(long, value_name = "FOLDER")]
    pub(super) disk: Option<PathBuf>,
    /// Disk space that the run may use: 200GB. Default: the free space less a tenth. Without --disk, the plan assumes
    /// the drive in the hardware profile, or one that reads 3.4 GB/s and writes 2.0 GB/s.
    #[arg(long, value_parser = size::parse)]
    pub(super) disk_space: Option<u64>,
    /// For --disk-space without --disk: number of such drives that share the work, at most 64. Default: 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    #[arg(requires = "disk_space", conflicts_with = "disk")]
    pub(super) disk_drives: Option<u8>,
    /// Rated endurance of the drive in bytes written (TBW in its data sheet): 1200TB. Default: estimated from what the
    /// drive reports, if it does.
    #[arg(long, value_parser = size::parse)]
    pub(super) disk_endurance: Option<u64>,
    #[arg(long, value_name = "NAME|FILE", help = hardware::help())]
    pub(super) hardware: Option<String>,
    /// Whether training continues while a checkpoint is written. Default: auto.
    #[arg(long, value_enum)]
    pub(super) save_mode: Option<SaveModeArg>,
    /// Also plan the step with 8-bit activations and with 8-bit moments, and print what each would gain. Each takes as
    /// long as the plan itself.
    #[arg(long)]
    pub(super) what_if: bool,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub(super) json: bool,
    /// Write a trace of the simulated step to this file, for ui.perfetto.dev or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(super) ranks: RankArgs,
    #[command(flatten)]
    pub(super) forced: ForcedArgs,
}

impl PlanArgs {
    pub(super) fn disk(&self) -> DiskArgs<'_> {
        DiskArgs {
            folder: self.disk.as_deref(),
            space_bytes: self.disk_space,
            endurance_bytes: self.disk_endurance,
            drives: Some(self.drives()),
        }
    }

    /// Number of drives of an assumed disk.
    pub(super) fn drives(&self) -> u8 {
        self.disk_drives.unwrap_or(1)
    }

    /// The flags as options of a run.
    pub(super) fn given(&self) -> Given {
        let count = |value: Option<usize>| value.and_then(NonZeroUsize::new);
        let ForcedArgs {
            activations,
            layer_inputs,
            checkpoint_every,
            weights,
            gradients,
            optimizer_state,
            on_disk,
            update,
            group,
        } = self.forced;
        Given {
            model: self.model.clone(),
            lora: self.lora.clone(),
            base: self.base,
            batch: count(self.batch),
            accumulate: count(self.accumulate),
            tokens_per_step: count(self.tokens_per_step),
            seq: count(self.seq),
            precision: self.precision,
            moments: self.moments,
            activation_codec: self.activation_codec,
            chunk_rows: count(self.chunk_rows),
            vram: self.vram.map(SizeOption),
            ram: self.ram.map(SizeOption),
            disk: self.disk.clone(),
            disk_space: self.disk_space.map(SizeOption),
            disk_endurance: self.disk_endurance.map(SizeOption),
            hardware: self.hardware.clone(),
            save_mode: self.save_mode,
            activations,
            layer_inputs,
            checkpoint_every: count(checkpoint_every),
            weights,
            gradients,
            optimizer_state,
            on_disk,
            update,
            group: count(group),
            ..Given::default()
        }
    }
}
