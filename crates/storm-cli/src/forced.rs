//! Flags that override the planner's choices.

use crate::size::positive;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use storm_plan::{Forced, OnDisk, Placement, Storage, UpdateTime};

/// What the planner may not choose itself.
#[derive(Args, Default)]
#[command(next_help_heading = "Planner overrides")]
pub(crate) struct ForcedArgs {
    /// What to do with activations that layers save for the backward pass.
    #[arg(long, value_enum)]
    pub(crate) activations: Option<ActivationsArg>,
    /// Where to keep the inputs of layers until the backward pass.
    #[arg(long, value_enum)]
    pub(crate) layer_inputs: Option<PlacementArg>,
    /// Store the input of every n-th layer only, and recompute the layers in between (activation checkpointing).
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) checkpoint_every: Option<usize>,
    /// Where to keep the parameters of layers.
    #[arg(long, value_enum)]
    pub(crate) weights: Option<PlacementArg>,
    /// Where to keep the gradients of layers.
    #[arg(long, value_enum)]
    pub(crate) gradients: Option<PlacementArg>,
    /// Where to keep the optimizer state of layers.
    #[arg(long, value_enum)]
    pub(crate) optimizer_state: Option<PlacementArg>,
    /// What to keep on disk even if host memory has room for it; needs a disk.
    #[arg(long, value_enum)]
    pub(crate) on_disk: Option<OnDiskArg>,
    /// When to apply gradients.
    #[arg(long, value_enum)]
    pub(crate) update: Option<UpdateArg>,
    /// Micro-batches that go through a layer together, so that streamed weights are copied once for all of them.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) group: Option<usize>,
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ActivationsArg {
    /// Keep them on the device.
    Keep,
    /// Recompute them in the backward pass.
    Recompute,
    /// Offload them to host memory.
    Offload,
    /// Offload or recompute each of them, whichever is faster.
    NotKept,
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PlacementArg {
    /// On the device.
    Resident,
    /// In host memory; copied to the device when needed.
    Streamed,
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnDiskArg {
    /// Second moments, except those on the device.
    SecondMoments,
    /// Both moments, except those on the device.
    Moments,
    /// Frozen weights, such as the base of adapters, except those on the device.
    FrozenWeights,
    /// Both moments and frozen weights, except those on the device.
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UpdateArg {
    /// At the end of the step.
    EndOfStep,
    /// In the next step, to each layer just before its first use.
    NextStep,
    /// In the backward pass, to each layer as soon as its gradients are complete, so that none are stored. Needs clip =
    /// 0, and all micro-batches of a step go through a layer together. A non-finite gradient ends the run, and nothing
    /// of that step is saved.
    InBackward,
}

impl ForcedArgs {
    /// The same as `--activations not-kept`.
    pub(crate) fn nothing_kept() -> ForcedArgs {
        ForcedArgs { activations: Some(ActivationsArg::NotKept), ..ForcedArgs::default() }
    }

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
            on_disk: self.on_disk.map(|what| match what {
                OnDiskArg::SecondMoments => OnDisk::SecondMoments,
                OnDiskArg::Moments => OnDisk::Moments,
                OnDiskArg::FrozenWeights => OnDisk::FrozenWeights,
                OnDiskArg::All => OnDisk::All,
            }),
            update: self.update.map(|update| match update {
                UpdateArg::EndOfStep => UpdateTime::EndOfStep,
                UpdateArg::NextStep => UpdateTime::NextStep,
                UpdateArg::InBackward => UpdateTime::InBackward,
            }),
            group: self.group,
        }
    }

    /// The gradient clipping norm for commands without an option for it. With updates in the backward pass there is no
    /// clipping: the norm is known only afterwards.
    pub(crate) fn max_norm(&self, default: Option<f32>) -> Option<f32> {
        default.filter(|_| self.update != Some(UpdateArg::InBackward))
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
            value("--on-disk", self.on_disk),
            value("--update", self.update),
            number("--group", self.group),
        ];
        flags.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }
}
