//! What a plan holds where and what a step moves, by kind of tensor.

use crate::plan::{Copy, Direction, Plan, Region, Work};
use crate::tier::{PerTier, Tier};
use serde::Serialize;

/// Tensors that people think of as one thing.
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
    /// What blocks take from those before them, and its gradients.
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

/// Bytes of one kind in every tier, and what a step moves of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Of what.
    pub kind: TensorKind,
    /// Where it lies, all the time.
    pub bytes: PerTier<u64>,
    /// Into the device, per step.
    pub h2d_bytes: u64,
    /// Out of the device, per step.
    pub d2h_bytes: u64,
}

impl Plan {
    /// What the plan holds and moves, in the order of [`TensorKind::ALL`]. These add up to all of its memory
    /// and all of its copies.
    pub fn holdings(&self) -> Vec<Holding> {
        let mut holdings = TensorKind::ALL.map(|kind| Holding {
            kind,
            bytes: PerTier::default(),
            h2d_bytes: 0,
            d2h_bytes: 0,
        });
        for region in &self.regions {
            holdings[region.kind as usize].bytes[region.tier] += region.bytes as u64;
        }
        let mut host: Vec<&Region> = self.regions.iter().filter(|r| r.tier == Tier::HOST).collect();
        host.sort_by_key(|region| region.start);
        for run in &self.step {
            let instructions = self.segment(run.segment).instructions.clone();
            for instruction in &self.instructions[instructions] {
                let Work::Copy(copy) = &instruction.work else { continue };
                let Some(kind) = kind_of_copy(&host, copy) else { continue };
                let bytes = (copy.bytes * run.times) as u64;
                let holding = &mut holdings[kind as usize];
                match copy.direction {
                    Direction::ToDevice => holding.h2d_bytes += bytes,
                    Direction::ToHost => holding.d2h_bytes += bytes,
                }
            }
        }
        holdings.to_vec()
    }
}

/// Told by the host's side: on the device what moves goes through rings that several may share.
fn kind_of_copy(host: &[&Region], copy: &Copy) -> Option<TensorKind> {
    let after = host.partition_point(|region| region.start <= copy.host);
    after.checked_sub(1).map(|region| host[region].kind)
}
