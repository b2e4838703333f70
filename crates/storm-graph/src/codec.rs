//! Activations stored in 8 bits for the backward pass.
//!
//! The forward pass of a gated unit is unchanged but also produces a code of its operand. The
//! backward pass reads only that code: it recomputes the unit's output from the decoded values, so
//! that the results do not depend on what was kept.

use crate::fuse::{must_keep_order, touches};
use crate::graph::{Node, Phase};
use crate::overwrite::copy_what_is_still_needed;
use crate::{
    ActivationCodec, DType, Graph, Op, QuantizedFormat, QuantizedRow, Tensor, TensorClass,
    TensorId, UnitOutput,
};

/// Rewrites a differentiated graph so that the gradients of gated units read codes. Returns the
/// number of rewritten units. A unit is unchanged if the backward pass also reads its operand
/// elsewhere. `results`, which are read after the graph has run, are never overwritten.
pub fn encode_units(graph: &mut Graph, results: &[TensorId]) -> usize {
    let gradients: Vec<TensorId> = graph
        .nodes()
        .iter()
        .filter(|node| matches!(node.op, Op::SwiGluGrad { codec: ActivationCodec::None, .. }))
        .map(|node| node.outputs[0])
        .collect();
    let coded = gradients.into_iter().filter(|&gradient| encode_unit(graph, gradient)).count();
    copy_what_is_still_needed(graph, results);
    coded
}

/// Makes the node that produces a gradient read a code. Returns whether it could.
fn encode_unit(graph: &mut Graph, gradient: TensorId) -> bool {
    let Some(at) = graph.producer(gradient) else { return false };
    let mut nodes = graph.nodes().to_vec();
    let Op::SwiGluGrad { dy, gate_up, function, .. } = nodes[at].op else { return false };
    let is_unit = |node: &Node| {
        let same = Op::SwiGlu { gate_up, function };
        node.phase == Phase::Forward && node.op == same
    };
    let Some(unit) = nodes.iter().position(is_unit) else { return false };
    let made = nodes[unit].outputs[0];
    let code = add_code(graph, made);
    nodes[unit].op = Op::SwiGluCoded { gate_up, function };
    nodes[unit].outputs.push(code);

    let late = readers_that_can_move(&nodes, at, made);
    let reads_later = |node: &Node| node.phase != Phase::Forward && touches(node, made);
    let is_read = !late.is_empty() || nodes[at + 1..].iter().any(reads_later);
    let output = if is_read { UnitOutput::Compute } else { UnitOutput::Skip };
    nodes[at].op = Op::SwiGluCodedGrad { dy, code, function, output };
    if is_read {
        let again = graph.duplicate(made, format!("{}.output", nodes[at].name));
        nodes[at].outputs.push(again);
        let reads = late.iter().copied().chain(at + 1..nodes.len()).collect::<Vec<usize>>();
        for index in reads {
            let op = nodes[index].op.clone();
            nodes[index].op = op.map(|_, id| if id == made { again } else { id });
        }
    }
    let mut ordered: Vec<Node> = Vec::with_capacity(nodes.len());
    ordered.extend((0..=at).filter(|index| !late.contains(index)).map(|i| nodes[i].clone()));
    ordered.extend(late.iter().map(|&index| nodes[index].clone()));
    ordered.extend_from_slice(&nodes[at + 1..]);
    graph.replace_nodes(ordered);
    true
}

/// Adds the tensor of each unit's code to a graph before differentiation, so that forward tensors
/// have the same IDs however the graph is differentiated.
pub(crate) fn reserve_codes(graph: &mut Graph) {
    let units: Vec<TensorId> = graph
        .nodes()
        .iter()
        .filter(|node| matches!(node.op, Op::SwiGlu { .. }))
        .map(|node| node.outputs[0])
        .collect();
    for made in units {
        let code = code_of(graph, made);
        graph.source(code.name, code.shape, code.dtype, code.class);
    }
}

/// The code tensor of the unit that produces `made`: the reserved one, or a new one.
fn add_code(graph: &mut Graph, made: TensorId) -> TensorId {
    let code = code_of(graph, made);
    let is_reserved = |&id: &TensorId| graph.producer(id).is_none() && *graph.tensor(id) == code;
    let reserved = graph.ids().find(is_reserved);
    reserved.unwrap_or_else(|| graph.source(code.name, code.shape, code.dtype, code.class))
}

fn code_of(graph: &Graph, made: TensorId) -> Tensor {
    let Tensor { name, shape, .. } = graph.tensor(made);
    let shape =
        shape.with_width(2 * QuantizedRow::new(QuantizedFormat::Int8, shape.width()).bytes());
    let (name, class) = (format!("{name}.code"), TensorClass::Activation);
    Tensor { name, shape, dtype: DType::U8, class }
}

/// Backward nodes before the one at `end` that read `tensor` and can be moved after it, in order.
fn readers_that_can_move(nodes: &[Node], end: usize, tensor: TensorId) -> Vec<usize> {
    let is_reader = |node: &Node| node.phase != Phase::Forward && touches(node, tensor);
    let mut late: Vec<usize> = (0..end).filter(|&index| is_reader(&nodes[index])).collect();
    loop {
        let stays = |index: usize| {
            let mut after = (index + 1..=end).filter(|other| !late.contains(other));
            after.any(|other| must_keep_order(&nodes[index], &nodes[other]))
        };
        let (held, free): (Vec<usize>, Vec<usize>) = late.iter().partition(|&&index| stays(index));
        late = free;
        if held.is_empty() {
            return late;
        }
    }
}

/// If the backward pass would produce a code only for the next kernel, makes that kernel round the
/// values itself. The gradient then overwrites the recomputed operand, as without a codec. Also
/// removes codes that are never read.
pub(crate) fn drop_codes(graph: &mut Graph) {
    let makes_code = |node: &Node| matches!(node.op, Op::SwiGluCoded { .. });
    if !graph.nodes().iter().any(makes_code) {
        return;
    }
    let mut nodes = graph.nodes().to_vec();
    let readers = |nodes: &[Node], tensor: TensorId| {
        nodes.iter().filter(|node| node.op.operands().iter().any(|&(_, id)| id == tensor)).count()
    };
    let mut changed = false;
    for index in 0..nodes.len() {
        let Op::SwiGluCodedGrad { dy, code, function, output } = nodes[index].op else { continue };
        let Some(maker) = graph.producer(code).map(|maker| &nodes[maker]) else { continue };
        let Node { phase: Phase::Recompute, op: Op::SwiGluCoded { gate_up, .. }, .. } = *maker
        else {
            continue;
        };
        let codec = ActivationCodec::Int8;
        nodes[index].op = match output {
            UnitOutput::Compute => Op::SwiGluGradAndOutput { dy, gate_up, function, codec },
            UnitOutput::Skip => Op::SwiGluGrad { dy, gate_up, function, codec },
        };
        changed = true;
    }
    let mut kept = Vec::with_capacity(nodes.len());
    for node in &nodes {
        let Op::SwiGluCoded { gate_up, function } = node.op else {
            kept.push(node.clone());
            continue;
        };
        let (made, code) = (node.outputs[0], node.outputs[1]);
        if readers(&nodes, code) > 0 {
            kept.push(node.clone());
            continue;
        }
        changed = true;
        if node.phase == Phase::Forward || readers(&nodes, made) > 0 {
            let op = Op::SwiGlu { gate_up, function };
            kept.push(Node { op, outputs: vec![made], ..node.clone() });
        }
    }
    if changed {
        graph.replace_nodes(kept);
    }
}
