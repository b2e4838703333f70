//! Device memory for issuing short kernels together.
//!
//! A device may issue kernels as CUDA graphs, see [`Stretch`](crate::Stretch), which matters where kernels are so short
//! that the host issues them later than the device could run them. A graph takes device memory for each of its kernels.

use crate::{HardwareProfile, Task};
use storm_graph::{Program, Tensor};

/// What a kernel in a graph takes of the device's memory: as measured on an H200, see docs/benchmarks.md.
pub const GRAPH_KERNEL_BYTES: u64 = 16 << 10;

/// Above this mean duration of kernels the host is never late.
pub const SHORT_KERNEL_SECONDS: f64 = 50e-6;

/// Nodes that are several kernels are few.
const KERNELS_OF_NODE: f64 = 1.25;

/// A step has at most three kinds of micro-batches: the first, the last, and those in between.
const KINDS_MAX: usize = 3;

/// How much of a budget to leave to graphs; nothing if kernels are long, or the device is no card.
pub(crate) fn graph_bytes(task: &Task, profile: &HardwareProfile) -> u64 {
    // A card holds memory for its context; the CPU device does not.
    if profile.overhead_bytes == 0 {
        return 0;
    }
    let (nodes, seconds) = nodes_of(task.program(), profile);
    if seconds > SHORT_KERNEL_SECONDS * nodes as f64 {
        return 0;
    }
    let kernels = KERNELS_OF_NODE * (nodes * task.micro_batches.min(KINDS_MAX)) as f64;
    kernels as u64 * GRAPH_KERNEL_BYTES
}

/// How many nodes a micro-batch runs, and how long they take.
fn nodes_of(program: &Program, profile: &HardwareProfile) -> (usize, f64) {
    let (mut nodes, mut seconds) = (0, 0.0);
    for (index, stage) in program.stages().iter().enumerate() {
        let graph = &program.section(index).graph;
        for node in graph.nodes() {
            let op = node.op.clone().map(|_, id| graph.tensor(id));
            let outputs: Vec<&Tensor> = node.outputs.iter().map(|&id| graph.tensor(id)).collect();
            seconds += stage.repeat as f64 * profile.op_seconds(&op, &outputs);
            nodes += stage.repeat;
        }
    }
    (nodes, seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budget, Forced, PerTier, Planned, Tier, plan};
    use std::collections::BTreeSet;
    use storm_graph::{ActivationFunction, DType, SectionBuilder, Stage};

    fn h200() -> HardwareProfile {
        HardwareProfile::builtin("h200").expect("built in")
    }

    /// A few layers over `batch` sequences.
    fn task(batch: usize, width: usize, micro_batches: usize) -> Task {
        let mut embedding = SectionBuilder::new("embedding", batch, 32, DType::BF16);
        let hidden = embedding.embedding("tokens", 100, width).unwrap();
        let embedding = embedding.hand_on(hidden);
        let (mut layer, hidden) = SectionBuilder::after(&embedding, "layer").unwrap();
        let normed = layer.rms_norm("norm", hidden, 1e-5).unwrap();
        let up = layer.linear("up", normed, 4 * width).unwrap();
        let active = layer.activation("silu", up, ActivationFunction::Silu).unwrap();
        let hidden = layer.linear_onto("down", active, hidden).unwrap();
        let layer = layer.hand_on(hidden);
        let (head, hidden) = SectionBuilder::after(&layer, "head").unwrap();
        let head = head.loss(hidden, 100, 64).unwrap();
        let stages = vec![
            Stage::once("embedding", 0),
            Stage::repeated("layers", 1, 8),
            Stage::once("head", 2),
        ];
        let forward = Program::new(vec![embedding, layer, head], stages).unwrap();
        Task {
            forward,
            training: None,
            micro_batches,
            lanes: 1,
            lane_groups: 1,
            rank: crate::RankPlace::default(),
            data: BTreeSet::new(),
        }
    }

    #[test]
    fn only_short_kernels_of_a_card_are_issued_as_graphs() {
        let bytes = |micro_batches| graph_bytes(&task(2, 64, micro_batches), &h200());
        assert!(bytes(1) >= 8 * 4 * GRAPH_KERNEL_BYTES, "{}", bytes(1));
        assert!(bytes(2).abs_diff(2 * bytes(1)) <= GRAPH_KERNEL_BYTES);
        assert_eq!(bytes(100), bytes(3));
        assert_eq!(graph_bytes(&task(4096, 4096, 1), &h200()), 0, "kernels are long");
        let cpu = HardwareProfile { overhead_bytes: 0, ..h200() };
        assert_eq!(graph_bytes(&task(2, 64, 1), &cpu), 0, "the CPU has no graphs");
    }

    #[test]
    fn a_plan_leaves_room_for_graphs_if_it_fits_beside_them() {
        let (task, profile) = (task(2, 512, 2), h200());
        let planned = |device: u64| -> Planned {
            let budget: Budget = PerTier::new(device, 1 << 30);
            plan(&task, &profile, budget, &Forced::default()).expect("it fits")
        };
        let device = |planned: &Planned| planned.plan.bytes[Tier::DEVICE] as u64;
        let resident = planned(100 << 30);
        let graphs = graph_bytes(&task, &profile);
        let room =
            |planned: &Planned, budget: u64| budget - profile.overhead_bytes - device(planned);
        // With just as much as everything takes, something makes way for graphs.
        let budget = profile.overhead_bytes + device(&resident);
        let beside = planned(budget);
        assert!(room(&beside, budget) >= graphs, "{} of {graphs}", room(&beside, budget));
        // The smallest budget is as small as without graphs.
        let smallest = planned(resident.vram_min_bytes);
        assert!(room(&smallest, resident.vram_min_bytes) < graphs);
    }
}
