//! Device memory for issuing short kernels together.
//!
//! A device may issue kernels as CUDA graphs, see [`Stretch`](crate::Stretch), which matters where kernels are so short
//! that the host issues them later than the device could run them. A graph takes device memory for each of its kernels.

use crate::{HardwareProfile, Task};
use storm_graph::{Program, Tensor};

/// What a kernel in a graph takes of the device's memory, at most.
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
