//! What a plan holds in each tier and what a step copies, by kind of tensor.

use crate::plan::{InstructionId, Plan, Work};
use crate::queue::PerQueue;
use crate::tier::PerTier;
use serde::Serialize;

/// Tensors that users think of as one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorKind {
    /// Parameters.
    Weights,
    /// Their gradients.
    Gradients,
    /// Their moments and master weights.
    OptimizerState,
    /// What blocks save for their backward pass.
    Activations,
    /// What blocks receive from the blocks before them, and its gradients.
    LayerInputs,
    /// Temporaries.
    WorkArea,
    /// Batches, tables, scalars and results.
    Inputs,
}

impl TensorKind {
    /// All of them, in the order of reports.
    pub const ALL: [TensorKind; 7] = [
        TensorKind::Weights,
        TensorKind::Gradients,
        TensorKind::OptimizerState,
        TensorKind::Activations,
        TensorKind::LayerInputs,
        TensorKind::WorkArea,
        TensorKind::Inputs,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            TensorKind::Weights => "weights",
            TensorKind::Gradients => "gradients",
            TensorKind::OptimizerState => "optimizer state",
            TensorKind::Activations => "activations",
            TensorKind::LayerInputs => "layer inputs",
            TensorKind::WorkArea => "work area",
            TensorKind::Inputs => "inputs",
        }
    }
}

/// Bytes of one kind in every tier, and what a step copies of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Of what.
    pub kind: TensorKind,
    /// Its memory in each tier.
    pub bytes: PerTier<u64>,
    /// What each queue copies of it, per step.
    pub copied_bytes: PerQueue<u64>,
}

impl Plan {
    /// What the plan holds and copies, in the order of [`TensorKind::ALL`]. The sums are all of its memory
    /// and all of its copies.
    pub fn holdings(&self) -> Vec<Holding> {
        let mut holdings = TensorKind::ALL.map(|kind| Holding {
            kind,
            bytes: PerTier::default(),
            copied_bytes: PerQueue::default(),
        });
        for region in &self.regions {
            holdings[region.kind as usize].bytes[region.tier] += region.bytes as u64;
        }
        for run in &self.step {
            for index in self.segment(run.segment).instructions.clone() {
                let Work::Copy(copy) = &self.instructions[index].work else { continue };
                let queue = self.queue(InstructionId(index as u32));
                holdings[copy.kind as usize].copied_bytes[queue] += (copy.bytes * run.times) as u64;
            }
        }
        holdings.to_vec()
    }
}
