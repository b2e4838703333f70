//! What `storm plan` is called with.

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
    after_help = "With a config file, the plan is that of `storm train CONFIG` on this machine, or on --hardware. Flags \
                  override the file."
)]
pub(crate) struct PlanArgs {
    /// The config file of a run: model, step, precision and memory are taken from it.
    pub(super) config: Option<PathBuf>,
    /// A preset (see `storm model list`), a Hugging Face directory, or the name of a model on the hub,
    /// `OWNER/MODEL`: only config.json is read.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Adapters beside frozen weights, as in a config file: `rank=16, targets="all-linear"`.
    #[arg(long)]
    pub(super) lora: Option<LoraArg>,
    /// How the weights beside adapters are stored; bf16 if not given.
    #[arg(long, value_enum)]
    pub(super) base: Option<BaseArg>,
    /// Sequences per micro-batch.
    #[arg(long, value_parser = positive, conflicts_with = "tokens_per_step")]
    pub(super) batch: Option<usize>,
    /// Micro-batches per step; 1 if not given.
    #[arg(long, value_parser = positive, conflicts_with = "tokens_per_step")]
    pub(super) accumulate: Option<usize>,
    /// Tokens of a step instead of --batch and --accumulate, which are then chosen for speed.
    #[arg(long, value_parser = positive)]
    pub(super) tokens_per_step: Option<usize>,
    /// Tokens per sequence; 1024 if there is no config file.
    #[arg(long, value_parser = positive)]
    pub(super) seq: Option<usize>,
    /// Storage of parameters, gradients and optimizer state; bf16-stochastic if not given.
    #[arg(long, value_enum)]
    pub(super) precision: Option<PrecisionArg>,
    /// How both moments of the optimizer are stored; full if not given.
    #[arg(long, value_enum)]
    pub(super) moments: Option<MomentsArg>,
    /// How activations wait for the backward pass; none if not given.
    #[arg(long, value_enum)]
    pub(super) activation_codec: Option<CodecArg>,
    /// Rows of logits that exist at a time; 2048 if not given.
    #[arg(long, value_parser = positive)]
    pub(super) chunk_rows: Option<usize>,
    /// Device memory of the process, everything included: 16GiB, 12GB, 500MiB. If not given, that of
    /// the card less a little.
    #[arg(long, value_parser = size::parse)]
    pub(super) vram: Option<u64>,
    /// Host memory for what does not stay on the device. If not given, what this machine or its
    /// control group has available less a little.
    #[arg(long, value_parser = size::parse)]
    pub(super) ram: Option<u64>,
    /// A folder on a local disk for optimizer state and frozen weights that host memory cannot hold. It is measured,
    /// and nothing stays there.
    #[arg(long, value_name = "FOLDER")]
    pub(super) disk: Option<PathBuf>,
    /// How much of that disk may be used: 200GB. If not given, what is free less a tenth. Without --disk, a drive
    /// that reads 3.4 GB/s and writes 2.0 GB/s is assumed, or that of the hardware's profile.
    #[arg(long, value_parser = size::parse)]
    pub(super) disk_space: Option<u64>,
    /// With --disk-space and without --disk: this many such drives that share the work, 64 at most; 1 if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    #[arg(requires = "disk_space", conflicts_with = "disk")]
    pub(super) disk_drives: Option<u8>,
    /// What the drive is rated for, in bytes written (TBW): 1200TB.
    #[arg(long, value_parser = size::parse)]
    pub(super) disk_endurance: Option<u64>,
    #[arg(long, value_name = "NAME|FILE", help = hardware::help())]
    pub(super) hardware: Option<String>,
    /// What steps do while a checkpoint is written; auto if not given.
    #[arg(long, value_enum)]
    pub(super) save_mode: Option<SaveModeArg>,
    /// Also plan the step with activations and with moments in 8 bits, and say what each would gain. Takes as long again for
    /// each.
    #[arg(long)]
    pub(super) what_if: bool,
    /// One object of JSON instead of tables.
    #[arg(long)]
    pub(super) json: bool,
    /// Write the simulated step to this file, for Chrome's about:tracing or ui.perfetto.dev.
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

    /// Of how many drives a disk is on paper.
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
