use crate::{DeviceError, Scalar};
use storm_graph::{Graph, Node, TensorId};

/// A block of memory and something that computes on it.
///
/// A node is resolved to addresses once, by [`Device::prepare`]; the instruction then runs any
/// number of times, in the order given, without allocating or looking anything up.
pub trait Device {
    /// A node with addresses.
    type Instruction;

    /// Offsets of tensors are multiples of this.
    const ALIGNMENT: usize;

    /// Size of the block.
    fn capacity_bytes(&self) -> usize;

    /// Resolves a node. `place` gives the byte offset of each tensor; an in-place output has the
    /// offset of the operand it overwrites. `layer` is the node's layer, for random streams; 0
    /// outside of layers.
    ///
    /// # Errors
    /// A tensor is outside the block or misaligned, an output overlaps something it must not, or
    /// the device has no kernel for the op.
    fn prepare(
        &self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<Self::Instruction, DeviceError>;

    /// Runs an instruction after all earlier ones. May return before it is done.
    ///
    /// # Errors
    /// From the device. An error inside a kernel may be reported by a later call.
    fn run(&mut self, instruction: &Self::Instruction) -> Result<(), DeviceError>;

    /// Waits until everything is done.
    ///
    /// # Errors
    /// From any earlier instruction.
    fn synchronize(&mut self) -> Result<(), DeviceError>;

    /// Copies from the host, after everything before it.
    ///
    /// # Errors
    /// The destination is outside the block or misaligned.
    fn write<T: Scalar>(&mut self, offset: usize, values: &[T]) -> Result<(), DeviceError>;

    /// Copies to the host, after everything before it.
    ///
    /// # Errors
    /// The source is outside the block or misaligned.
    fn read<T: Scalar>(&self, offset: usize, values: &mut [T]) -> Result<(), DeviceError>;

    /// The op that an instruction runs, for profiles.
    fn op_name(instruction: &Self::Instruction) -> &'static str;
}
