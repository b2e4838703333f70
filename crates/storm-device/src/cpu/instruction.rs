use crate::cpu::CpuDevice;
use crate::cpu::kernels::attention::HEAD_DIM_MAX;
use crate::cpu::kernels::gemm::Bf16Products;
use crate::cpu::kernels::layout::MAX_AXES;
use crate::placed::{PlacedNode, unsupported};
use crate::{Device, DeviceError};
use storm_graph::{Graph, Node, Op, TensorId};

/// A node with addresses, ready to run any number of times.
#[derive(Clone, Debug)]
pub struct Instruction {
    pub(super) placed: PlacedNode,
    pub(super) products: Bf16Products,
}

impl Instruction {
    pub(super) fn new(
        capacity: usize,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
        products: Bf16Products,
    ) -> Result<Instruction, DeviceError> {
        check_supported(node)?;
        let placed = PlacedNode::new(capacity, CpuDevice::ALIGNMENT, graph, node, place, layer)?;
        Ok(Instruction { placed, products })
    }

    /// The op's name.
    pub fn op_name(&self) -> &'static str {
        self.placed.op.name()
    }

    pub(super) fn fits(&self, capacity: usize) -> bool {
        self.placed.end <= capacity
    }
}

/// Kernel limits that the shape rules do not check.
fn check_supported(node: &Node) -> Result<(), DeviceError> {
    match &node.op {
        Op::Transpose { axes, .. } if axes.len() > MAX_AXES => {
            Err(unsupported(node, format!("it has more than {MAX_AXES} axes")))
        }
        Op::Attention { heads, .. }
        | Op::AttentionGrad { heads, .. }
        | Op::CachedAttention { heads, .. }
            if heads.head_dim > HEAD_DIM_MAX =>
        {
            let width = heads.head_dim;
            let reason = format!("heads are {width} wide, and at most {HEAD_DIM_MAX} is possible");
            Err(unsupported(node, reason))
        }
        _ => Ok(()),
    }
}
