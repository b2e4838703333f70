//! A plan's memory in each tier and its copies per step, by kind of tensor.

use crate::plan::{InstructionId, Plan, Work};
use crate::queue::PerQueue;
use crate::tier::PerTier;
use serde::Serialize;

/// Kinds of tensors in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorKind {
    /// Parameters.
    Weights,
    /// Their gradients.
    Gradients,
    /// Their moments and master weights.
    OptimizerState,
    /// Tensors that blocks save for their backward pass.
    Activations,
    /// Tensors that blocks receive from the blocks before them, and their gradients.
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

    /// The name in reports.
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

/// Memory of one kind in every tier, and its copies per step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The kind.
    pub kind: TensorKind,
    /// Its memory in each tier.
    pub bytes: PerTier<u64>,
    /// Bytes of it that each queue copies per step.
    pub copied_bytes: PerQueue<u64>,
}

impl Plan {
    /// The plan's memory and copies by kind, in the order of [`TensorKind::ALL`]. They add up to all memory and all
    /// copies.
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
