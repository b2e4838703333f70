//! Handles gradients that overwrite a tensor that is no longer needed.

use crate::graph::{Node, Phase};
use crate::{Graph, Op, TensorId, UnitOutput};

/// Inserts a copy before each backward node that would overwrite a tensor which is still needed: by
/// a later node, by the node itself in another role, by the owner of an outside tensor, or as one
/// of `results`. A transformer has no such node.
pub(crate) fn copy_what_is_still_needed(graph: &mut Graph, results: &[TensorId]) {
    let nodes = graph.nodes().to_vec();
    let mut last_read = vec![0; graph.tensors().len()];
    for (index, node) in nodes.iter().enumerate() {
        for (_, operand) in node.op.operands() {
            last_read[operand.index()] = index;
        }
    }
    let mut rewritten = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        let taken = match node.phase {
            Phase::Backward | Phase::Recompute => taken_over(&node.op),
            Phase::Forward => None,
        };
        let needed = |tensor: TensorId| {
            let roles = node.op.operands().iter().filter(|&&(_, id)| id == tensor).count();
            graph.producer(tensor).is_none()
                || last_read[tensor.index()] > index
                || roles > 1
                || results.contains(&tensor)
        };
        let Some((role, original)) = taken.filter(|&(_, tensor)| needed(tensor)) else {
            rewritten.push(node.clone());
            continue;
        };
        let name = format!("{}.copy", graph.tensor(original).name);
        let copy = graph.duplicate(original, name.clone());
        let shape = graph.tensor(original).shape.clone();
        rewritten.push(Node {
            name,
            op: Op::Reshape { x: original, shape },
            outputs: vec![copy],
            phase: node.phase,
        });
        let op = node.op.clone().map(|name, id| if name == role { copy } else { id });
        rewritten.push(Node { op, ..node.clone() });
    }
    if rewritten.len() > nodes.len() {
        graph.replace_nodes(rewritten);
    }
}

/// Makes each gradient that a convolution adds to another overwrite it, if nothing else reads that
/// one. The two then share memory from the start, which for the gradient of a block's input is not
/// in the work area. `results` are read after the graph has run.
pub(crate) fn sum_in_place(graph: &mut Graph, results: &[TensorId]) {
    let mut nodes = graph.nodes().to_vec();
    let mut reads = vec![0; graph.tensors().len()];
    for (_, operand) in nodes.iter().flat_map(|node| node.op.operands()) {
        reads[operand.index()] += 1;
    }
    // A tensor that overwrites another may lie in memory from outside, which is not for the sum.
    let is_own = |tensor: TensorId| {
        let made = graph.producer(tensor).map(|node| &graph.nodes()[node]);
        made.is_some_and(|node| {
            let place = node.outputs.iter().position(|&output| output == tensor);
            let overwrites = node.op.in_place().iter().any(|&(_, index)| Some(index) == place);
            node.phase == Phase::Backward && !overwrites
        })
    };
    for node in &mut nodes {
        if let Op::Conv2dInputGrad { addend, accumulator, .. } = &mut node.op
            && addend.is_some_and(|other| {
                reads[other.index()] == 1 && is_own(other) && !results.contains(&other)
            })
        {
            *accumulator = addend.take();
        }
    }
    graph.replace_nodes(nodes);
}

/// The operand, with its name, that an op overwrites because it is no longer needed, as opposed to
/// updating it.
fn taken_over(op: &Op<TensorId>) -> Option<(&'static str, TensorId)> {
    match *op {
        Op::ActivationGrad { x, .. } | Op::BatchNormGrad { x, .. } => Some(("x", x)),
        Op::MaxPoolGrad { x, window, .. } if !window.overlaps() => Some(("x", x)),
        // Nothing else reads `dy` of the second op, because it is only used in that case.
        Op::SwiGluGrad { gate_up, .. } | Op::SwiGluGradAndOutput { gate_up, .. } => {
            Some(("gate_up", gate_up))
        }
        Op::SwiGluCodedGrad { dy, output: UnitOutput::Compute, .. } => Some(("dy", dy)),
        _ => None,
    }
}
