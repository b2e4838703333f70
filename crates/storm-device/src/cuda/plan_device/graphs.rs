//! CUDA graphs: stretches of the compute queue that the host issues with one call.
//!
//! Issuing a kernel costs the host several microseconds, and issuing a graph of hundreds of kernels
//! not much more. Graphs are made where kernels are so short that the host would otherwise be late.
//! They take device memory, so a budget may leave room for only some of them or none. Kernels
//! without a graph are issued one by one, with the same bits.

use super::super::context::Stream;
use super::super::graph::Graph;
use super::joined::joined;
use super::program::{Program, queue_action};
use super::{GraphUse, Tools, check_budget};
use crate::DeviceError;
use crate::placed::node_of;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use storm_graph::Tensor;
use storm_plan::{
    GRAPH_KERNEL_BYTES, InstructionId, Plan, SHORT_KERNEL_SECONDS, SegmentId, Stretch, Work,
};

/// A graph of fewer kernels saves nothing.
const KERNELS_MIN: usize = 4;

/// Rates above those of any card with a built-in profile (arithmetic in bf16), for a lower bound of
/// durations.
const FLOPS_MAX: f64 = 1e15;
const BANDWIDTH_MAX: f64 = 5e12;

/// How an instruction of the compute queue is issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Issue {
    /// By itself, without a graph.
    Alone,
    /// In a graph.
    InGraph {
        /// The graph, if this instruction is its first.
        launches: Option<u32>,
        /// Whether it is the last.
        ends: bool,
    },
}

/// The graphs of a plan.
#[derive(Debug)]
pub(super) struct Graphs {
    graphs: Vec<Graph>,
    /// By instruction.
    issues: Vec<Issue>,
    kernels: usize,
}

impl Graphs {
    /// No graphs.
    pub(super) fn none(plan: &Plan) -> Graphs {
        let issues = vec![Issue::Alone; plan.instructions.len()];
        Graphs { graphs: Vec::new(), issues, kernels: 0 }
    }

    /// Makes the graphs that save time and for which there is memory, and runs each once.
    /// Overwrites the block.
    pub(super) fn new(
        plan: &Plan,
        program: &Program,
        tools: &Tools,
        stream: &Stream,
        use_of: GraphUse,
        vram_bytes: Option<u64>,
    ) -> Result<Graphs, DeviceError> {
        let mut graphs = Graphs::none(plan);
        let wanted = wanted(plan, use_of, |id| program.actions(id).len());
        if wanted.is_empty() {
            return Ok(graphs);
        }
        let mut kernels_left = match vram_bytes {
            Some(budget) => {
                let room = budget.saturating_sub(tools.context.memory_in_use()?.bytes);
                usize::try_from(room / GRAPH_KERNEL_BYTES).unwrap_or(usize::MAX)
            }
            None => usize::MAX,
        };
        for stretch in wanted {
            let actions = joined(plan, &stretch.instructions, |id| program.actions(id));
            let kernels = actions.len();
            if kernels > kernels_left {
                continue;
            }
            let what = || "recording a graph".to_owned();
            let graph = Graph::record(stream, || {
                // SAFETY: nothing runs during the capture. The caller of `Graph::queue` guarantees
                // what running the graph requires.
                actions.iter().try_for_each(|action| unsafe {
                    queue_action(action, stream, &tools.gemm, what)
                })
            })?;
            // Runs once, on any contents of the block, because the first run loads code and may
            // allocate.
            // SAFETY: the addresses are in the block, which nothing else uses yet.
            unsafe { graph.queue(stream)? };
            kernels_left -= kernels;
            graphs.add(&stretch, graph, kernels);
        }
        stream.synchronize("making graphs")?;
        // The driver may take more memory for graphs than was estimated.
        match check_budget(tools, program, vram_bytes) {
            Ok(()) => Ok(graphs),
            Err(_) => Ok(Graphs::none(plan)),
        }
    }

    fn add(&mut self, stretch: &Stretch, graph: Graph, kernels: usize) {
        let index = self.graphs.len() as u32;
        let ids = &stretch.instructions;
        for (position, id) in ids.iter().enumerate() {
            self.issues[id.index()] = Issue::InGraph {
                launches: (position == 0).then_some(index),
                ends: position + 1 == ids.len(),
            };
        }
        self.graphs.push(graph);
        self.kernels += kernels;
    }

    /// The number of graphs, and the number of their kernels.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.graphs.len(), self.kernels)
    }

    /// How an instruction is issued.
    pub(super) fn issue(&self, id: InstructionId) -> Issue {
        self.issues[id.index()]
    }

    /// A graph by its index.
    pub(super) fn graph(&self, index: u32) -> &Graph {
        &self.graphs[index as usize]
    }
}

/// The stretches of which to make graphs, largest first.
fn wanted(plan: &Plan, use_of: GraphUse, kernels: impl Fn(InstructionId) -> usize) -> Vec<Stretch> {
    let kernels_min = match use_of {
        GraphUse::WhereShort => KERNELS_MIN,
        GraphUse::Everywhere => 1,
        GraphUse::Never => return Vec::new(),
    };
    let of_step = plan.step.iter().filter(|run| run.times > 0).map(|run| run.segment);
    let segments: BTreeSet<SegmentId> = of_step.chain(plan.evaluation).collect();
    let mut found = Vec::new();
    for segment in segments {
        let stretches = plan.stretches(segment);
        let ids = || stretches.iter().flat_map(|stretch| &stretch.instructions);
        let seconds: f64 = ids().map(|&id| seconds_min(plan, id)).sum();
        let count: usize = ids().map(|&id| kernels(id)).sum();
        if use_of == GraphUse::Everywhere || seconds <= SHORT_KERNEL_SECONDS * count as f64 {
            found.extend(stretches);
        }
    }
    let of_stretch =
        |stretch: &Stretch| stretch.instructions.iter().map(|&id| kernels(id)).sum::<usize>();
    found.retain(|stretch| of_stretch(stretch) >= kernels_min);
    found.sort_by_key(|stretch| Reverse(of_stretch(stretch)));
    found
}

/// A lower bound of the time that an instruction computes.
fn seconds_min(plan: &Plan, id: InstructionId) -> f64 {
    let Work::Compute(compute) = &plan.instruction(id).work else { return 0.0 };
    let (graph, node, _) = node_of(plan, compute);
    let op = node.op.clone().map(|_, id| graph.tensor(id));
    let outputs: Vec<&Tensor> = node.outputs.iter().map(|&id| graph.tensor(id)).collect();
    op.matrix_flops() as f64 / FLOPS_MAX + op.moved_bytes(&outputs) as f64 / BANDWIDTH_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_testing::tiny_plan;

    fn sizes(stretches: &[Stretch]) -> Vec<usize> {
        stretches.iter().map(|stretch| stretch.instructions.len()).collect()
    }

    #[test]
    fn large_stretches_come_first_and_small_ones_not_at_all() {
        let plan = tiny_plan(2);
        let everywhere = wanted(&plan, GraphUse::Everywhere, |_| 1);
        let all = sizes(&everywhere);
        assert!(all.is_sorted_by(|a, b| a >= b), "{all:?}");
        let of_step = 3;
        let kernels: usize = (0..of_step)
            .flat_map(|segment| plan.stretches(SegmentId(segment)))
            .map(|stretch| stretch.instructions.len())
            .sum();
        assert_eq!(all.iter().sum::<usize>(), kernels);
        assert!(wanted(&plan, GraphUse::Never, |_| 1).is_empty());
        // 80 kB at a time: kernels are short.
        let short = wanted(&plan, GraphUse::WhereShort, |_| KERNELS_MIN);
        assert_eq!(short.len(), everywhere.len());
        assert!(
            sizes(&wanted(&plan, GraphUse::WhereShort, |_| 1)).iter().all(|&n| n >= KERNELS_MIN)
        );
    }
}
