use crate::{DType, Shape};
use std::fmt;

/// A value in a [`Graph`](crate::Graph): assigned once, by one node or from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub(crate) u32);

impl TensorId {
    /// Position in [`Graph::tensors`](crate::Graph::tensors).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// What a tensor is for. The planner decides by class where a tensor lives and when it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorClass {
    /// Data of the batch and per-step scalars; comes from the host.
    Input,
    /// A weight. A frozen one has no gradient and no optimizer state.
    Parameter(Training),
    /// The gradient of a parameter, accumulated over the micro-batches of a step.
    Gradient,
    /// Moments and master weights.
    OptimizerState,
    /// What a layer keeps from one run of its program to the next: keys and values of a text so far.
    Cache,
    /// Computed by a node and read by others, activation gradients included.
    Activation,
    /// Working memory of the one node that lists it as an output; no node reads it.
    Scratch,
}

/// Whether a parameter learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Training {
    /// It has a gradient and is updated.
    Trainable,
    /// It never changes, and nothing is computed for it.
    Frozen,
    /// It has no gradient: the forward pass of a training step changes it, once per micro-batch and in order. A
    /// running mean, for example. Neither a recomputation nor an evaluation changes it.
    Running,
}

/// A tensor's description; its data lives on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Used in errors, traces and plans.
    pub name: String,
    /// Extents, row-major.
    pub shape: Shape,
    /// Storage of one element.
    pub dtype: DType,
    /// What it is for.
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
