//! Removes forms of 8-bit float codes that are never read.

use crate::{Fp8Form, Graph, Op};

/// Makes nodes produce codes only in the forms that are read. If the backward pass recomputes an
/// activation's codes, the forward pass needs only rows, and the backward pass needs only columns
/// unless it also recomputes the product.
pub(crate) fn drop_unread_forms(graph: &mut Graph) {
    let mut read = vec![false; graph.tensors().len()];
    for node in graph.nodes() {
        for (_, operand) in node.op.operands() {
            read[operand.index()] = true;
        }
    }
    let mut nodes = graph.nodes().to_vec();
    let mut changed = false;
    for node in &mut nodes {
        let Op::ToFp8 { x, form: Fp8Form::Both } = node.op else { continue };
        let is_read = [0, 1].map(|output| read[node.outputs[output].index()]);
        let (form, unread) = match is_read {
            [true, false] => (Fp8Form::Rows, 1),
            [false, true] => (Fp8Form::Columns, 0),
            _ => continue,
        };
        node.op = Op::ToFp8 { x, form };
        node.outputs.remove(unread);
        changed = true;
    }
    if changed {
        graph.replace_nodes(nodes);
    }
}
