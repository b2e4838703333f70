//! Recomputation, in the backward pass, of tensors that are not kept.

use crate::codec::drop_codes;
use crate::fp8_forms::drop_unread_forms;
use crate::fuse::fuse_with_gradients;
use crate::graph::{Node, Phase};
use crate::overwrite::copy_what_is_still_needed;
use crate::{Graph, Op, TensorId};

/// Rewrites a differentiated graph so that the backward pass reads only those saved tensors for
/// which `is_kept` returns true. It recomputes the others from the nearest kept ones, just before
/// their first use. The same ops on the same operands give the same bits.
///
/// Tensors from outside (parameters, inputs, carried tensors) are always available. If the sum of a
/// fused residual norm is kept, the norm is recomputed from the sum. `results` are the tensors that
/// are read after the graph has run.
pub fn recompute(graph: &mut Graph, results: &[TensorId], is_kept: impl Fn(TensorId) -> bool) {
    let nodes = graph.nodes().to_vec();
    let mut again = Again { replacement: vec![None; graph.tensors().len()] };
    let mut rewritten: Vec<Node> = Vec::with_capacity(nodes.len());
    for node in &nodes {
        if node.phase != Phase::Forward {
            for (_, operand) in node.op.operands() {
                again.ensure(graph, &nodes, operand, &is_kept, &mut rewritten);
            }
        }
        let op = match node.phase {
            Phase::Forward => node.op.clone(),
            Phase::Backward | Phase::Recompute => again.rewrite(&node.op),
        };
        rewritten.push(Node { op, ..node.clone() });
    }
    graph.replace_nodes(rewritten);
    drop_codes(graph);
    drop_unread_forms(graph);
    fuse_with_gradients(graph, results);
    // Recomputed tensors may be read after the backward pass has overwritten the original.
    copy_what_is_still_needed(graph, &[]);
}

struct Again {
    /// For a forward tensor that was not kept, the tensor that the backward pass reads instead.
    replacement: Vec<Option<TensorId>>,
}

impl Again {
    /// Emits the nodes needed to make `wanted` available in the backward pass.
    fn ensure(
        &mut self,
        graph: &mut Graph,
        nodes: &[Node],
        wanted: TensorId,
        is_kept: &impl Fn(TensorId) -> bool,
        emitted: &mut Vec<Node>,
    ) {
        // An explicit stack, because a chain of dropped tensors may be as long as the graph.
        let mut stack = vec![wanted];
        while let Some(&tensor) = stack.last() {
            let at_hand = |id: TensorId, again: &Again| {
                !graph.is_made_forward(id) || is_kept(id) || again.replacement[id.index()].is_some()
            };
            if at_hand(tensor, self) {
                stack.pop();
                continue;
            }
            let producer = graph.producer(tensor).expect("made forward");
            let node = &nodes[producer];
            let (op, made) = redo(node, is_kept);
            let missing: Vec<TensorId> = op
                .operands()
                .into_iter()
                .map(|(_, operand)| operand)
                .filter(|&operand| !at_hand(operand, self))
                .collect();
            if !missing.is_empty() {
                stack.extend(missing);
                continue;
            }
            let op = self.rewrite(&op);
            let outputs: Vec<TensorId> = node.outputs[..made]
                .iter()
                .map(|&output| {
                    let name = format!("{}.again", graph.tensor(output).name);
                    let copy = graph.duplicate(output, name);
                    self.replacement.push(None);
                    if !is_kept(output) {
                        self.replacement[output.index()] = Some(copy);
                    }
                    copy
                })
                .collect();
            emitted.push(Node {
                name: format!("{}.again", node.name),
                op,
                outputs,
                phase: Phase::Recompute,
            });
        }
    }

    fn rewrite(&self, op: &Op<TensorId>) -> Op<TensorId> {
        op.clone().map(|_, id| self.replacement[id.index()].unwrap_or(id))
    }
}

/// The op that recomputes a node's outputs, and how many of them: the node's own op, or a plain
/// norm of the kept sum, which yields all outputs but the sum (the last).
fn redo(node: &Node, is_kept: &impl Fn(TensorId) -> bool) -> (Op<TensorId>, usize) {
    let outputs = node.outputs.len();
    if let Op::Norm { delta: Some(_), weight, bias, kind, epsilon, .. } = node.op {
        let sum = node.outputs[outputs - 1];
        if is_kept(sum) {
            let op = Op::Norm { x: sum, delta: None, weight, bias, kind, epsilon };
            return (op, outputs - 1);
        }
    }
    (node.op.clone(), outputs)
}
