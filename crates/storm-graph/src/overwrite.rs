//! Handles gradients that overwrite the tensor that they are a gradient of.

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

/// The operand, with its name, that an op overwrites because it is no longer needed, as opposed to
/// updating it.
fn taken_over(op: &Op<TensorId>) -> Option<(&'static str, TensorId)> {
    match *op {
        Op::ActivationGrad { x, .. } => Some(("x", x)),
        // Nothing else reads `dy` of the second op, because it is only used in that case.
        Op::SwiGluGrad { gate_up, .. } | Op::SwiGluGradAndOutput { gate_up, .. } => {
            Some(("gate_up", gate_up))
        }
        Op::SwiGluCodedGrad { dy, output: UnitOutput::Compute, .. } => Some(("dy", dy)),
        _ => None,
    }
}
