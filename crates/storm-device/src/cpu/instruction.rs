use crate::DeviceError;
use crate::cpu::CpuDevice;
use crate::cpu::kernels::attention::HEAD_DIM_MAX;
use crate::cpu::kernels::layout::MAX_AXES;
use std::ops::Range;
use storm_graph::{DType, Graph, Node, Op, Shape, TensorId};

/// A tensor at an address.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct View {
    pub(super) offset: usize,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
}

impl View {
    fn bytes(&self) -> Range<usize> {
        self.offset..self.offset + self.shape.elements() * self.dtype.size_bytes()
    }
}

/// A node with addresses, ready to run any number of times.
#[derive(Clone, Debug)]
pub struct Instruction {
    pub(super) op: Op<View>,
    pub(super) outputs: Vec<View>,
    pub(super) layer: u16,
    /// What the kernel derives from the op's attributes alone, worked out beforehand.
    pub(super) constants: Vec<f32>,
    name: String,
    end: usize,
}

impl Instruction {
    pub(super) fn new(
        capacity: usize,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<Instruction, DeviceError> {
        let mut end_of_all = 0;
        let mut views = Vec::new();
        for id in node.op.operands().into_iter().map(|(_, id)| id).chain(node.outputs.clone()) {
            let (tensor, offset) = (graph.tensor(id), place(id));
            let end = offset.saturating_add(tensor.size_bytes());
            if end > capacity {
                let tensor = tensor.name.clone();
                return Err(DeviceError::OutOfBounds { tensor, offset, end, capacity });
            }
            if !offset.is_multiple_of(CpuDevice::ALIGNMENT) {
                return Err(DeviceError::Misaligned {
                    tensor: tensor.name.clone(),
                    offset,
                    alignment: CpuDevice::ALIGNMENT,
                });
            }
            end_of_all = end_of_all.max(end);
            views.push((id, View { offset, shape: tensor.shape.clone(), dtype: tensor.dtype }));
        }
        check_overlaps(graph, node, &views)?;

        let view = |id: TensorId| {
            views.iter().find(|(known, _)| *known == id).expect("collected above").1.clone()
        };
        check_supported(node, &views)?;
        let constants = match &node.op {
            Op::RotaryTable { head_dim, frequencies, .. } => {
                frequencies.inverse_wavelengths(*head_dim)
            }
            _ => Vec::new(),
        };
        Ok(Instruction {
            op: node.op.clone().map(|_, id| view(id)),
            outputs: node.outputs.iter().map(|&id| view(id)).collect(),
            layer,
            constants,
            name: node.name.clone(),
            end: end_of_all,
        })
    }

    /// The node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The op's name.
    pub fn op_name(&self) -> &'static str {
        self.op.name()
    }

    pub(super) fn fits(&self, capacity: usize) -> bool {
        self.end <= capacity
    }
}

/// Limits of the kernels that the shape rules do not know.
fn check_supported(node: &Node, views: &[(TensorId, View)]) -> Result<(), DeviceError> {
    let reason = match &node.op {
        Op::Transpose { axes, .. } if axes.len() > MAX_AXES => {
            format!("it has more than {MAX_AXES} axes")
        }
        Op::Attention { heads, .. } | Op::AttentionGrad { heads, .. }
            if heads.head_dim > HEAD_DIM_MAX =>
        {
            format!("heads are {} wide, and at most {HEAD_DIM_MAX} is possible", heads.head_dim)
        }
        _ if views.iter().any(|(_, view)| view.shape.rank() > 1 && view.shape.width() == 0) => {
            "a tensor has a width of zero".to_owned()
        }
        _ => return Ok(()),
    };
    Err(DeviceError::Unsupported { op: node.op.name(), node: node.name.clone(), reason })
}

/// An output may share bytes with the operand that it overwrites, all of them, and with nothing
/// else. The kernels rely on it for the soundness of their slices.
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
    // An operand that is overwritten must not also be read under another role.
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
