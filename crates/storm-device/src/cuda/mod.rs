//! The CUDA devices: GPU memory, streams, and kernels compiled for the card present. [`CudaDevice`]
//! runs one instruction after another; [`CudaPlanDevice`] runs checked plans on queues.

mod cache;
mod compile;
mod context;
mod delay;
mod diagnosis;
mod dispatch;
mod environment;
mod error;
mod event;
mod foreign;
mod gather;
mod gemm;
mod graph;
mod join;
mod libraries;
mod memory;
mod modules;
mod part;
mod parts;
mod pinned;
mod plan;
mod plan_device;
mod power;
mod probe;
mod ranks;
mod refused;
mod transfer;

use crate::placed::PlacedNode;
use crate::{Device, DeviceError, Scalar};
pub use cache::cache_folder;
pub use compile::{KernelCache, KernelSource, compile};
pub use context::Card;
use context::{Allocation, Context, Start, Stream};
use cudarc::driver::result;
pub use diagnosis::{CardDiagnosis, CudaDiagnosis, diagnose};
pub use dispatch::{AttentionBlock, all_kernels, attention_blocks};
pub use error::CudaError;
pub(crate) use foreign::{CudaCopies, CudaMark, CudaSlab, CudaStall};
use gemm::Gemm;
pub use gemm::OwnProduct;
pub use libraries::require_nvrtc;
pub use memory::{Counted, MemoryHolder, MemoryInUse};
use modules::Kernels;
pub(crate) use pinned::PinnedMemory;
use plan::{Action, Planner};
pub use plan_device::{
    CudaKept, CudaPlanDevice, CudaPlanOptions, GraphUse, Preparing, SECOND_DEVICE_BYTES,
};
pub use power::PowerReading;
pub use probe::{CopyPoint, Probe, ProbeEffort, probe};
pub use ranks::{CudaLink, CudaRanks, OpenCard, find_card, visible_cards};
use std::sync::Arc;
use storm_graph::{Graph, Node, TensorId};

/// A GPU with a block of its memory.
#[derive(Debug)]
pub struct CudaDevice {
    // Dropped in this order: first the work, then what it uses.
    stream: Stream,
    memory: Allocation,
    gemm: Gemm,
    kernels: Kernels,
    context: Arc<Context>,
    /// Waits after every instruction, so that an error is attributed to the one that caused it.
    synchronous: bool,
    /// When kernels that wait inside the kernel may start.
    start: Start,
}

/// A node as kernel launches and matrix products with addresses.
#[derive(Clone, Debug)]
pub struct CudaInstruction {
    actions: Vec<Action>,
    name: String,
    op_name: &'static str,
    end: usize,
}

impl CudaDevice {
    /// Opens GPU number `ordinal` and takes `capacity_bytes` of its memory.
    ///
    /// # Errors
    /// No driver, no card, a library is missing, or the memory is not free.
    pub fn new(ordinal: usize, capacity_bytes: usize) -> Result<CudaDevice, DeviceError> {
        CudaDevice::in_context(Context::open(ordinal)?, capacity_bytes)
    }

    fn in_context(context: Arc<Context>, capacity_bytes: usize) -> Result<CudaDevice, DeviceError> {
        let kernels = Kernels::new(context.card.clone())?;
        let gemm = Gemm::new(&context)?;
        let stream = Stream::new(&context)?;
        let memory = context.allocate(capacity_bytes)?;
        let synchronous = std::env::var_os("STORM_CUDA_SYNC").is_some_and(|value| value == "1");
        // Older cards lack the instruction that waits.
        let start = if context.card.capability >= (9, 0) { Start::Early } else { Start::InOrder };
        let in_order = std::env::var_os("STORM_CUDA_IN_ORDER").is_some_and(|value| value == "1");
        let start = if in_order { Start::InOrder } else { start };
        Ok(CudaDevice { stream, memory, gemm, kernels, context, synchronous, start })
    }

    /// The card.
    pub fn card(&self) -> &Card {
        &self.context.card
    }

    /// GPU memory that this process holds: the block, workspaces, code and the context.
    ///
    /// # Errors
    /// From the driver.
    pub fn memory_in_use(&self) -> Result<MemoryInUse, DeviceError> {
        Ok(self.context.memory_in_use()?)
    }

    /// GPU memory that is free.
    ///
    /// # Errors
    /// From the driver.
    pub fn memory_free_bytes(&self) -> Result<u64, DeviceError> {
        let (free, _) = self.context.memory_info()?;
        Ok(free as u64)
    }

    /// Compares STORM's own matrix products, which may run instead of the library's, with those.
    ///
    /// # Errors
    /// From the driver or the library.
    pub fn check_own_products(&self) -> Result<Vec<OwnProduct>, DeviceError> {
        self.gemm.check_own(&self.kernels)
    }

    fn check_range<T: Scalar>(&self, offset: usize, elements: usize) -> Result<(), DeviceError> {
        let capacity = self.memory.bytes();
        let end = elements.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        match end {
            Some(end) if end <= capacity => Ok(()),
            end => Err(DeviceError::OutOfBounds {
                tensor: "host data".to_owned(),
                offset,
                end: end.unwrap_or(usize::MAX),
                capacity,
            }),
        }
    }
}

impl Device for CudaDevice {
    type Instruction = CudaInstruction;

    const ALIGNMENT: usize = 256;

    fn capacity_bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn prepare(
        &self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<CudaInstruction, DeviceError> {
        let placed =
            PlacedNode::new(self.capacity_bytes(), Self::ALIGNMENT, graph, node, place, layer)?;
        let base = self.memory.start();
        let actions = Planner::plan(&placed, &self.kernels, &self.gemm, base)?;
        let (name, op_name, end) = (placed.name, placed.op.name(), placed.end);
        Ok(CudaInstruction { actions, name, op_name, end })
    }

    fn run(&mut self, instruction: &CudaInstruction) -> Result<(), DeviceError> {
        assert!(instruction.end <= self.capacity_bytes(), "prepared for a larger device");
        let what = || format!("{} `{}`", instruction.op_name, instruction.name);
        for action in &instruction.actions {
            match action {
                // SAFETY: the planner made the arguments for this kernel, from views that
                // `PlacedNode` checked. One stream runs everything, and the memory outlives it.
                Action::Launch(launch) => unsafe { launch.queue(&self.stream, self.start, what)? },
                // SAFETY: as above; `&mut self` keeps other threads out.
                Action::Gemm(call) => unsafe { self.gemm.queue(call, &self.stream)? },
            }
        }
        if self.synchronous {
            self.stream.synchronize(&what())?;
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(self.stream.synchronize("waiting for the GPU")?)
    }

    fn write<T: Scalar>(&mut self, offset: usize, values: &[T]) -> Result<(), DeviceError> {
        self.check_range::<T>(offset, values.len())?;
        let to = self.memory.start() + offset as u64;
        // Copies in this stream, because it does not wait for copies in other streams.
        // SAFETY: in bounds; `values` stays borrowed until the wait below.
        unsafe { result::memcpy_htod_async(to, values, self.stream.handle()) }
            .map_err(CudaError::driver("copying to the GPU"))?;
        Ok(self.stream.synchronize("copying to the GPU")?)
    }

    fn read<T: Scalar>(&self, offset: usize, values: &mut [T]) -> Result<(), DeviceError> {
        self.check_range::<T>(offset, values.len())?;
        let from = self.memory.start() + offset as u64;
        // SAFETY: in bounds, and any bits are a `Scalar`; `values` stays borrowed until the wait.
        unsafe { result::memcpy_dtoh_async(values, from, self.stream.handle()) }
            .map_err(CudaError::driver("copying from the GPU"))?;
        Ok(self.stream.synchronize("copying from the GPU")?)
    }

    fn op_name(instruction: &CudaInstruction) -> &'static str {
        instruction.op_name
    }
}
