//! Decisions that are otherwise the planner's, as people write them.

use crate::size::positive;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use storm_plan::{Forced, OnDisk, Placement, Storage, UpdateTime};

/// What the planner may not decide.
#[derive(Args, Default)]
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
    /// What is on disk, however much host memory there is; needs --disk.
    #[arg(long, value_enum)]
    pub(crate) on_disk: Option<OnDiskArg>,
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
    /// They are recomputed.
    Recompute,
    /// They wait in host memory.
    Offload,
    /// They are offloaded or recomputed, whichever is faster.
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
pub(crate) enum OnDiskArg {
    /// The second moments of what is not on the device.
    SecondMoments,
    /// Both moments.
    Moments,
    /// The frozen weights that are not on the device, such as those beside adapters.
    FrozenWeights,
    /// Moments and frozen weights.
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UpdateArg {
    /// At the end of the step.
    EndOfStep,
    /// In the next step, each layer just before its first use.
    NextStep,
    /// In the backward pass, each layer as soon as its gradients are complete: none are stored. Needs clip = 0, and all
    /// micro-batches of a step go through a layer together. A gradient that is not finite ends the run, and nothing of that step is saved.
    InBackward,
}

impl ForcedArgs {
    /// As `--activations not-kept`.
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

    /// The norm that gradients are clipped to by commands without an option for it: none where the update comes before the norm.
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
