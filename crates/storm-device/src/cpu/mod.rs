//! The CPU devices: a block of memory with a hard cap, and kernels that run in rayon's pool.
//! [`CpuDevice`] runs one instruction after another. [`CpuPlanDevice`] runs checked plans on
//! queues.

mod dispatch;
mod instruction;
pub mod kernels;
mod memory;
mod probe;
mod queues;
mod threads;

use crate::{Device, DeviceError, Scalar};
use dispatch::execute;
pub use instruction::Instruction;
pub use kernels::gemm::Bf16Products;
use memory::Memory;
pub use probe::probe_cpu;
pub use queues::{CpuPlanDevice, CpuPlanOptions, Fault, FaultKind};
use storm_graph::{Graph, Node, TensorId};
use storm_plan::Tier;
pub use threads::{THREAD_BYTES, THREADS_MAX};

/// A device whose memory is a separate block of host memory.
///
/// ```
/// use storm_device::Device;
/// use storm_device::cpu::CpuDevice;
/// use storm_graph::{DType, Graph, Op};
///
/// let mut graph = Graph::new();
/// let x = graph.input("x", [3], DType::F32);
/// graph.apply("twice", Op::Scale { x, factor: 2.0 })?;
///
/// let mut device = CpuDevice::new(4096)?;
/// let place = |id: storm_graph::TensorId| id.index() * 64;
/// let twice = device.prepare(&graph, &graph.nodes()[0], place, 0)?;
/// device.write(0, &[1.0f32, 2.0, 3.0])?;
/// device.run(&twice)?;
/// let mut result = [0.0f32; 3];
/// device.read(64, &mut result)?;
/// assert_eq!(result, [2.0, 4.0, 6.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CpuDevice {
    memory: Memory,
    products: Bf16Products,
}

impl CpuDevice {
    /// A device with this much zeroed memory, and never more. Also allocates the kernels' fixed
    /// per-thread buffers, so that kernel calls need not allocate them later.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub fn new(capacity_bytes: usize) -> Result<CpuDevice, DeviceError> {
        CpuDevice::with_products(capacity_bytes, Bf16Products::Fma)
    }

    /// [`CpuDevice::new`], with this definition of sums of bf16 products.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub fn with_products(
        capacity_bytes: usize,
        products: Bf16Products,
    ) -> Result<CpuDevice, DeviceError> {
        kernels::warm_up();
        Ok(CpuDevice { memory: Memory::new(Tier::DEVICE, capacity_bytes)?, products })
    }
}

impl Device for CpuDevice {
    type Instruction = Instruction;

    const ALIGNMENT: usize = 64;

    fn capacity_bytes(&self) -> usize {
        self.memory.capacity_bytes()
    }

    fn prepare(
        &self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<Instruction, DeviceError> {
        Instruction::new(self.capacity_bytes(), graph, node, place, layer, self.products)
    }

    /// Runs one instruction to completion. Allocates nothing.
    ///
    /// # Panics
    /// If the instruction was prepared for a larger device, or an id in its data is out of range.
    fn run(&mut self, instruction: &Instruction) -> Result<(), DeviceError> {
        assert!(instruction.fits(self.capacity_bytes()), "prepared for a larger device");
        execute(instruction, &self.memory.frame());
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn write<T: Scalar>(&mut self, offset: usize, values: &[T]) -> Result<(), DeviceError> {
        self.memory.host_slice_mut(offset, values.len())?.copy_from_slice(values);
        Ok(())
    }

    fn read<T: Scalar>(&self, offset: usize, values: &mut [T]) -> Result<(), DeviceError> {
        values.copy_from_slice(self.memory.host_slice(offset, values.len())?);
        Ok(())
    }

    fn op_name(instruction: &Instruction) -> &'static str {
        instruction.op_name()
    }
}
