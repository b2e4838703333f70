//! Fuses recomputation with a gradient in one kernel.

use crate::graph::{Node, Phase};
use crate::{ActivationCodec, Graph, Op, TensorId};

/// If the backward pass recomputes a gated unit's output and also computes the unit's gradient,
/// makes one node do both: it reads their common operand once, and the recomputed output overwrites
/// the incoming gradient. Nodes that read the recomputed tensor earlier move after that node.
/// `results`, which are read after the graph has run, are never overwritten.
pub(crate) fn fuse_with_gradients(graph: &mut Graph, results: &[TensorId]) {
    let mut nodes = graph.nodes().to_vec();
    let mut fused_any = false;
    let mut position = 0;
    while position < nodes.len() {
        match fused(graph, &nodes, position, results) {
            Some(others) => {
                nodes = others;
                fused_any = true;
            }
            None => position += 1,
        }
    }
    if fused_any {
        graph.replace_nodes(nodes);
    }
}

/// The nodes with the one at `position` fused with its gradient. `None` if that is not possible.
fn fused(
    graph: &Graph,
    nodes: &[Node],
    position: usize,
    results: &[TensorId],
) -> Option<Vec<Node>> {
    let Node { phase: Phase::Recompute, op: Op::SwiGlu { gate_up, function }, outputs, .. } =
        &nodes[position]
    else {
        return None;
    };
    let (gate_up, function, output) = (*gate_up, *function, outputs[0]);
    // With a codec, the gradient reads different values than the unit.
    let codec = ActivationCodec::None;
    let is_gradient = |node: &Node| {
        matches!(node.op, Op::SwiGluGrad { gate_up: g, function: f, codec: c, .. }
            if (g, f, c) == (gate_up, function, codec))
    };
    let gradient = position + nodes[position..].iter().position(is_gradient)?;
    let Op::SwiGluGrad { dy, .. } = nodes[gradient].op else { return None };
    let reads_dy = nodes.iter().filter(|node| touches(node, dy)).count();
    // `dy` must be produced in this graph and read only by the gradient.
    if graph.producer(dy).is_none() || reads_dy != 2 || results.contains(&dy) {
        return None;
    }
    let between = &nodes[position + 1..gradient];
    let (late, early) = dependents(between, output);
    for &index in &late {
        let after = between[index + 1..].iter().chain([&nodes[gradient]]);
        let stays = after.enumerate().filter(|(offset, _)| !late.contains(&(index + 1 + offset)));
        if stays.into_iter().any(|(_, other)| must_keep_order(&between[index], other)) {
            return None;
        }
    }
    let mut others = nodes[..position].to_vec();
    others.extend(early.iter().map(|&index| between[index].clone()));
    let Node { name, outputs, phase, .. } = nodes[gradient].clone();
    let outputs = vec![outputs[0], output];
    others.push(Node {
        name,
        op: Op::SwiGluGradAndOutput { dy, gate_up, function, codec },
        outputs,
        phase,
    });
    others.extend(late.iter().map(|&index| between[index].clone()));
    others.extend_from_slice(&nodes[gradient + 1..]);
    Some(others)
}

/// Partitions nodes into those that depend on a tensor, directly or indirectly, and the others.
fn dependents(nodes: &[Node], tensor: TensorId) -> (Vec<usize>, Vec<usize>) {
    let mut made = vec![tensor];
    (0..nodes.len()).partition(|&index| {
        let depends = made.iter().any(|&tensor| touches(&nodes[index], tensor));
        if depends {
            made.extend(&nodes[index].outputs);
        }
        depends
    })
}

/// Whether a node reads or produces a tensor.
pub(crate) fn touches(node: &Node, tensor: TensorId) -> bool {
    let reads = node.op.operands().into_iter().any(|(_, operand)| operand == tensor);
    reads || node.outputs.contains(&tensor)
}

/// Whether two nodes must keep their order: the later one reads an output of the earlier one, or
/// one of them overwrites a tensor that the other touches.
pub(crate) fn must_keep_order(earlier: &Node, later: &Node) -> bool {
    let overwrites = |one: &Node, other: &Node| {
        one.op.in_place().into_iter().any(|(operand, _)| touches(other, operand))
    };
    earlier.outputs.iter().any(|&output| touches(later, output))
        || overwrites(earlier, later)
        || overwrites(later, earlier)
}
