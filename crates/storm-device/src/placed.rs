//! A node with addresses, which every device turns into an instruction.

use crate::DeviceError;
use std::ops::Range;
use storm_graph::{DType, Graph, Node, Op, Shape, Tensor, TensorId};
use storm_plan::{Compute, Plan, Work};

/// A tensor at an offset in device memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct View {
    pub(crate) offset: usize,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
}

impl View {
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.offset..self.offset + self.shape.elements() * self.dtype.size_bytes()
    }
}

/// A node whose tensors are all placed: in bounds, aligned, and with outputs that overlap only the
/// operand they overwrite. Kernels rely on this for soundness.
#[derive(Clone, Debug)]
pub(crate) struct PlacedNode {
    pub(crate) op: Op<View>,
    pub(crate) outputs: Vec<View>,
    pub(crate) layer: u16,
    pub(crate) name: String,
    /// The byte after the last that the node touches.
    pub(crate) end: usize,
}

impl PlacedNode {
    pub(crate) fn new(
        capacity: usize,
        alignment: usize,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<PlacedNode, DeviceError> {
        let mut end_of_all = 0;
        let mut views = Vec::new();
        for id in node.op.operands().into_iter().map(|(_, id)| id).chain(node.outputs.clone()) {
            let (tensor, offset) = (graph.tensor(id), place(id));
            let end = offset.saturating_add(tensor.size_bytes());
            if end > capacity {
                let tensor = tensor.name.clone();
                return Err(DeviceError::OutOfBounds { tensor, offset, end, capacity });
            }
            if !offset.is_multiple_of(alignment) {
                let tensor = tensor.name.clone();
                return Err(DeviceError::Misaligned { tensor, offset, alignment });
            }
            end_of_all = end_of_all.max(end);
            views.push((id, View { offset, shape: tensor.shape.clone(), dtype: tensor.dtype }));
        }
        check_overlaps(graph, node, &views)?;
        if views.iter().any(|(_, view)| view.shape.rank() > 1 && view.shape.width() == 0) {
            return Err(unsupported(node, "a tensor has a width of zero".to_owned()));
        }
        let view = |id: TensorId| {
            views.iter().find(|(known, _)| *known == id).expect("collected above").1.clone()
        };
        Ok(PlacedNode {
            op: node.op.clone().map(|_, id| view(id)),
            outputs: node.outputs.iter().map(|&id| view(id)).collect(),
            layer,
            name: node.name.clone(),
            end: end_of_all,
        })
    }
}

/// The graph and node of a compute instruction, and the place of each tensor.
pub(crate) fn node_of<'a>(
    plan: &'a Plan,
    compute: &'a Compute,
) -> (&'a Graph, &'a Node, impl Fn(TensorId) -> usize + use<'a>) {
    let graph = &plan.graphs[compute.graph.0 as usize];
    let node = &graph.nodes()[compute.node as usize];
    let operands: Vec<TensorId> = node.op.operands().into_iter().map(|(_, id)| id).collect();
    let place = move |id: TensorId| {
        let position = operands.iter().chain(&node.outputs).position(|&known| known == id);
        compute.places[position.expect("an operand or an output of the node")]
    };
    (graph, node, place)
}

/// The tensor that an instruction computes, copies or fetches; the first if there are several.
pub(crate) fn tensor_name(plan: &Plan, work: &Work) -> String {
    let first = match work {
        Work::Compute(compute) => compute.writes.first().map(|operand| operand.value),
        Work::Copy(copy) => copy.values.first().map(|operand| operand.value),
        Work::Fetch(fetch) => plan.fetched(fetch).next().map(|input| input.value),
        Work::ReadAhead(_) => return "data of the next step".to_owned(),
        Work::Collective(collective) => {
            let operands = collective.pieces.iter().flat_map(|piece| piece.operands());
            operands.map(|operand| operand.value).next()
        }
    };
    first.map_or(String::new(), |value| plan.value(value).name.clone())
}

/// Checks that host data has exactly the size of a tensor.
pub(crate) fn check_size(tensor: &Tensor, given_bytes: usize) -> Result<(), DeviceError> {
    let tensor_bytes = tensor.size_bytes();
    if tensor_bytes == given_bytes {
        return Ok(());
    }
    Err(DeviceError::WrongSize { tensor: tensor.name.clone(), tensor_bytes, given_bytes })
}

/// The error for a node that a device has no kernel for.
pub(crate) fn unsupported(node: &Node, reason: String) -> DeviceError {
    DeviceError::Unsupported { op: node.op.name(), node: node.name.clone(), reason }
}

/// An output must cover exactly the operand that it overwrites, and overlap nothing else. The
/// slices in the kernels are sound only because of this.
fn check_overlaps(
    graph: &Graph,
    node: &Node,
    views: &[(TensorId, View)],
) -> Result<(), DeviceError> {
    let (op, name) = (node.op.name(), || node.name.clone());
    let tensor_name = |id: TensorId| graph.tensor(id).name.clone();
    let operands = views.len() - node.outputs.len();
    let in_place = node.op.in_place();
    for (place, (output, view)) in views.iter().enumerate().skip(operands) {
        let overwritten = in_place
            .iter()
            .find(|&&(_, index)| node.outputs.get(index) == Some(output))
            .map(|&(operand, _)| operand);
        for (other_place, (other, other_view)) in views.iter().enumerate() {
            let (a, b) = (view.bytes(), other_view.bytes());
            let overlap = a.start < b.end && b.start < a.end;
            if overwritten == Some(*other) && other_place < operands {
                if a != b {
                    return Err(DeviceError::NotInPlace {
                        op,
                        node: name(),
                        output: tensor_name(*output),
                        operand: tensor_name(*other),
                    });
                }
            } else if overlap && other_place != place {
                return Err(DeviceError::Overlap {
                    op,
                    node: name(),
                    output: tensor_name(*output),
                    other: tensor_name(*other),
                });
            }
        }
    }
    // An overwritten operand must not also be read in another role.
    for (operand, _) in &in_place {
        let uses = views[..operands].iter().filter(|(id, _)| id == operand).count();
        if uses > 1 {
            return Err(DeviceError::Overlap {
                op,
                node: name(),
                output: tensor_name(*operand),
                other: tensor_name(*operand),
            });
        }
    }
    Ok(())
}
