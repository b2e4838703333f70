//! What `storm plan` is called with.

use crate::precision::PrecisionArg;
use crate::size;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use storm_plan::{Forced, Placement, Storage, UpdateTime};

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// A preset (see `storm model list`) or a Hugging Face directory, of which only config.json is
    /// read.
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
    /// A built-in card, the file of a profile that `storm probe` wrote, or `list`. If not given, h200
    /// where it is built in, else reference.
    #[arg(long)]
    pub(super) hardware: Option<String>,
    /// One object of JSON instead of tables.
    #[arg(long)]
    pub(super) json: bool,
    /// Write the simulated step to this file, for Chrome's about:tracing or ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(super) forced: ForcedArgs,
}

/// What the planner may not decide.
#[derive(Args)]
#[command(next_help_heading = "Decisions that are otherwise the planner's")]
pub(crate) struct ForcedArgs {
    /// What layers save for their backward pass.
    #[arg(long, value_enum)]
    pub(crate) activations: Option<ActivationsArg>,
    /// The inputs of layers.
    #[arg(long, value_enum)]
    pub(crate) layer_inputs: Option<PlacementArg>,
    /// Store the input of every n-th layer only, and run the layers between again.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) checkpoint_every: Option<usize>,
    /// Parameters of layers.
    #[arg(long, value_enum)]
    pub(crate) weights: Option<PlacementArg>,
    /// Gradients of layers.
    #[arg(long, value_enum)]
    pub(crate) gradients: Option<PlacementArg>,
    /// Optimizer state of layers.
    #[arg(long, value_enum)]
    pub(crate) optimizer_state: Option<PlacementArg>,
    /// When gradients are applied.
    #[arg(long, value_enum)]
    pub(crate) update: Option<UpdateArg>,
    /// Micro-batches that go through a layer together, so that streamed weights move once for all of
    /// them.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) group: Option<usize>,
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ActivationsArg {
    /// They stay on the device.
    Keep,
    /// They are made again.
    Recompute,
    /// They wait in host memory.
    Offload,
    /// They are offloaded or made again, whichever is faster.
    NotKept,
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PlacementArg {
    /// On the device.
    Resident,
    /// In host memory, coming in as needed.
    Streamed,
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UpdateArg {
    /// At the end of the step.
    EndOfStep,
    /// In the next step, each layer just before its first use.
    NextStep,
}

impl ForcedArgs {
    pub(crate) fn forced(&self) -> Forced {
        let placement = |placement: PlacementArg| match placement {
            PlacementArg::Resident => Placement::Resident,
            PlacementArg::Streamed => Placement::Streamed,
        };
        Forced {
            activations: self.activations.and_then(|activations| match activations {
                ActivationsArg::Keep => Some(Storage::Keep),
                ActivationsArg::Recompute => Some(Storage::Recompute),
                ActivationsArg::Offload => Some(Storage::Offload),
                ActivationsArg::NotKept => None,
            }),
            nothing_kept: matches!(self.activations, Some(ActivationsArg::NotKept)),
            layer_inputs: self.layer_inputs.map(placement),
            checkpoint_every: self.checkpoint_every,
            weights: self.weights.map(placement),
            gradients: self.gradients.map(placement),
            states: self.optimizer_state.map(placement),
            update: self.update.map(|update| match update {
                UpdateArg::EndOfStep => UpdateTime::EndOfStep,
                UpdateArg::NextStep => UpdateTime::NextStep,
            }),
            group: self.group,
        }
    }

    /// `--weights resident --group 4`: as the user wrote it, for messages.
    pub(crate) fn words(&self) -> String {
        fn value<T: ValueEnum>(flag: &str, value: Option<T>) -> Option<String> {
            let value = value?.to_possible_value()?;
            Some(format!("{flag} {}", value.get_name()))
        }
        let number =
            |flag: &str, value: Option<usize>| value.map(|value| format!("{flag} {value}"));
        let flags = [
            value("--activations", self.activations),
            value("--layer-inputs", self.layer_inputs),
            number("--checkpoint-every", self.checkpoint_every),
            value("--weights", self.weights),
            value("--gradients", self.gradients),
            value("--optimizer-state", self.optimizer_state),
            value("--update", self.update),
            number("--group", self.group),
        ];
        flags.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }
}

/// Sizes that no run has are refused before they are multiplied with each other.
const COUNT_MAX: usize = 1 << 30;

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=COUNT_MAX) => Ok(count),
        Ok(_) => Err(format!("must be between 1 and {COUNT_MAX}")),
        Err(_) => Err("must be a whole number".to_owned()),
    }
}
