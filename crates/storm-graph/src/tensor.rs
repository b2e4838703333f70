use crate::{DType, Shape};
use std::fmt;

/// The ID of a value in a [`Graph`](crate::Graph): assigned once, by one node or from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub(crate) u32);

impl TensorId {
    /// Index into [`Graph::tensors`](crate::Graph::tensors).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// The role of a tensor. The planner decides by class where a tensor is stored and when it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorClass {
    /// Batch data and per-step scalars from the host.
    Input,
    /// A weight. A frozen weight has no gradient and no optimizer state.
    Parameter(Training),
    /// The gradient of a parameter, accumulated over the micro-batches of a step.
    Gradient,
    /// Moments and master weights.
    OptimizerState,
    /// State that a layer keeps between runs of its program: the keys and values of the text so
    /// far.
    Cache,
    /// Computed by a node and read by others. Includes activation gradients.
    Activation,
    /// Working memory of the node that lists it as an output. No node reads it.
    Scratch,
}

/// Whether a parameter is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Training {
    /// It has a gradient and is updated.
    Trainable,
    /// It never changes, and nothing is computed for it.
    Frozen,
    /// It has no gradient: the forward pass of a training step changes it, once per micro-batch and
    /// in order. An example is a running mean. Recomputation and evaluation do not change it.
    Running,
}

/// A tensor's description. Its data is on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Name for errors, traces and plans.
    pub name: String,
    /// Extents, row-major.
    pub shape: Shape,
    /// Storage of one element.
    pub dtype: DType,
    /// The role.
    pub class: TensorClass,
}

impl Tensor {
    /// Bytes of the data.
    pub fn size_bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size_bytes()
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.dtype, self.shape)
    }
}
