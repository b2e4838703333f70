//! Codes of 8-bit floats in a form that nothing reads.

use crate::{Fp8Form, Graph, Op};

/// Lets nodes make codes only in the form that is read. Where the backward pass makes the codes of an activation again, the
/// forward pass needs them in rows only; and the backward pass in columns only, unless it makes the product again, too.
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
