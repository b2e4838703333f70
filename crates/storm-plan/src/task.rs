//! What is to be planned, before any decision: a model and, for training, its optimizer.

use crate::collective::RankPlace;
use std::collections::BTreeSet;
use storm_graph::{Graph, Op, Phase, Program, ProgramParameter, Section, TensorId};
use storm_graph::{OBSERVED_PIECE_ALIGNMENT, PIECE_ALIGNMENT};

/// Several micro-batches of a program, forward only or as a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// The undifferentiated model, for evaluation and for tasks without training.
    pub forward: Program,
    /// What a training step adds; none for a forward-only task.
    pub training: Option<TrainingGraphs>,
    /// How many micro-batches a step has, on this rank.
    pub micro_batches: usize,
    /// Into how many lanes these are divided, in order and evenly. The gradient of a lane is accumulated by itself; that of a
    /// step is the f32 sum of the lanes of all ranks in their order, rounded once. With one lane, it is the gradient of the lane.
    pub lanes: usize,
    /// How many groups in a row the lanes of all ranks form. The lanes of a group are added in f32 in their order, then the sums of
    /// the groups. With one group, lanes are added as they come.
    pub lane_groups: usize,
    /// Which of the ranks that share the step this is for. Each has as many lanes: rank `r` of `n` has lanes `r`, `r + n`, ….
    pub rank: RankPlace,
    /// Inputs of micro-batches that a training step fetches from a data source, by name. The host writes
    /// all others, and all inputs of an evaluation and of a task without training.
    pub data: BTreeSet<String>,
}

/// Forward and backward of some micro-batches, norm, clipping, update.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingGraphs {
    /// The first micro-batch of a step: gradients are written.
    pub start: Program,
    /// The others: gradients are added to. The same forward nodes as `start`.
    pub proceed: Program,
    /// The norm of all gradients (`NAME.grad` with full names, one sum of squares each) and the clip
    /// scale.
    pub norm: Graph,
    /// How each trainable parameter is updated, once for all blocks of its stage.
    pub updates: Vec<UpdateRule>,
}

/// The update of one parameter as a graph with a single node. Its sources are named after the parameter, without
/// a block: `NAME`, `NAME.grad`, `NAME.first_moment`, …; scalars have names of their own.
#[derive(Clone, Debug, PartialEq)]
pub struct UpdateRule {
    /// Whose.
    pub parameter: ProgramParameter,
    /// One node, elementwise.
    pub graph: Graph,
}

/// Saved tensors of a block that are decided on together: the outputs of one node, except for the fused residual
/// sum, from which the rest of its norm can be recomputed.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedUnit {
    /// Name of its first tensor: `mlp.gate_up`.
    pub name: String,
    /// In the graph of the template.
    pub tensors: Vec<TensorId>,
    /// Of all of them.
    pub size_bytes: usize,
}

impl Task {
    /// The program whose forward pass a step runs: differentiated if the task trains.
    pub fn program(&self) -> &Program {
        self.training.as_ref().map_or(&self.forward, |training| &training.proceed)
    }

    /// How many micro-batches a lane has.
    pub fn lane_micro_batches(&self) -> usize {
        self.micro_batches / self.lanes.max(1)
    }

    /// How many lanes of all ranks are a group.
    pub fn group_lanes(&self) -> usize {
        self.lanes * self.rank.ranks as usize / self.lane_groups.max(1)
    }

    /// Whether the sum of a group lasts from one lane of this rank to the next. That of the first one is the sum of groups so far.
    pub(crate) fn keeps_group_sums(&self) -> bool {
        let ranks = self.rank.ranks as usize;
        self.lane_groups > 1 && !ranks.is_multiple_of(self.group_lanes().max(1))
    }

    /// Whether the gradient of a step is the sum of several lanes, of this rank or of others.
    pub fn sums_lanes(&self) -> bool {
        self.lanes > 1 || self.rank.is_shared()
    }

    /// Pieces of parameters begin at multiples of this many elements.
    pub fn piece_alignment(&self) -> usize {
        let updates = self.training.iter().flat_map(|training| &training.updates);
        let mut ops = updates.flat_map(|rule| rule.graph.nodes()).map(|node| &node.op);
        match ops.any(|op| matches!(op, Op::AdamW { observed: Some(_), .. })) {
            true => OBSERVED_PIECE_ALIGNMENT,
            false => PIECE_ALIGNMENT,
        }
    }

    /// Whether gradients are scaled down by their norm, which is known at the end of a step.
    pub fn clips(&self) -> bool {
        let norm = self.training.iter().flat_map(|training| training.norm.nodes());
        let mut ops = norm.map(|node| &node.op);
        ops.any(|op| matches!(op, Op::ClipScale { max_norm, .. } if max_norm.is_finite()))
    }

    /// Why blocks cannot be updated in the backward pass of groups of this size; none if they can.
    pub(crate) fn in_backward_problem(&self, group: usize) -> Option<String> {
        if self.clips() {
            return Some(
                "updates in the backward pass come before the norm of all gradients is known: turn clipping off"
                    .to_owned(),
            );
        }
        let lanes = self.lanes * self.rank.ranks as usize;
        if lanes > 1 {
            return Some(format!(
                "updates in the backward pass come before all {lanes} lanes of a step are summed: use one lane"
            ));
        }
        let count = self.micro_batches;
        (group != count).then(|| {
            format!("updates in the backward pass need all {count} micro-batches of a step in one group, not {group}")
        })
    }

    /// What the backward pass of a stage's blocks reads from their forward pass, besides what the blocks before
    /// pass on. The last stage has none, since its backward pass follows its forward pass immediately.
    pub fn saved_units(&self, stage: usize) -> Vec<SavedUnit> {
        let program = self.program();
        let is_last = stage + 1 == program.stages().len();
        match is_last || !program.is_reached(stage) {
            true => Vec::new(),
            false => saved_units(program.section(stage)),
        }
    }
}

fn saved_units(section: &Section) -> Vec<SavedUnit> {
    let graph = &section.graph;
    let outlives = |id: &TensorId| {
        section.carried_out.iter().any(|carried| carried.tensor == *id)
            || section.exports.iter().any(|(_, export)| export == id)
    };
    let mut saved = graph.saved();
    // What is computed from parameters alone is the same in every micro-batch, and parameters are available: it
    // is recomputed.
    saved.retain(|&id| !outlives(&id) && !graph.is_of_parameters(id));
    let mut units: Vec<SavedUnit> = Vec::new();
    for node in graph.nodes().iter().filter(|node| node.phase == Phase::Forward) {
        let mut made: Vec<TensorId> =
            node.outputs.iter().copied().filter(|id| saved.contains(id)).collect();
        let sum = match node.op {
            Op::Norm { delta: Some(_), .. } => node.outputs.last().copied(),
            _ => None,
        };
        let sum = sum.filter(|sum| made.contains(sum));
        made.retain(|&id| Some(id) != sum);
        for tensors in [made, sum.into_iter().collect()] {
            let Some(&first) = tensors.first() else { continue };
            units.push(SavedUnit {
                name: graph.tensor(first).name.clone(),
                size_bytes: tensors.iter().map(|&id| graph.tensor(id).size_bytes()).sum(),
                tensors,
            });
        }
    }
    units
}
