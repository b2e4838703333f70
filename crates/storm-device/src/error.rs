use crate::MemoryRefused;
use crate::cuda::CudaError;
use crate::disk::DiskProblem;
use crate::placed::tensor_name;
use storm_graph::DType;
use storm_host::HostMemoryRefused;
use storm_plan::{InstructionId, Plan, Tier};

/// Why a device cannot run something.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DeviceError {
    /// Device or host memory could not be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryRefused),
    /// The plan uses a tier that the device does not have.
    #[error("this device has no {tier} memory: plan for its own memory and the host's")]
    NoTier {
        /// The tier.
        tier: Tier,
    },
    /// From the GPU, its driver or its libraries. Refused memory is [`DeviceError::Memory`]
    /// instead.
    #[error(transparent)]
    Cuda(CudaError),
    /// A tensor lies outside the block.
    #[error("`{tensor}` at {offset}..{end} does not fit a block of {capacity} bytes")]
    OutOfBounds {
        /// Name of the tensor.
        tensor: String,
        /// Its first byte.
        offset: usize,
        /// The byte after its last.
        end: usize,
        /// Size of the block.
        capacity: usize,
    },
    /// A tensor's address is not a multiple of the device's alignment.
    #[error("`{tensor}` at {offset} is not aligned to {alignment} bytes")]
    Misaligned {
        /// Name of the tensor.
        tensor: String,
        /// Its first byte.
        offset: usize,
        /// The required alignment.
        alignment: usize,
    },
    /// An output shares bytes with an operand or another output of its instruction.
    #[error("{op} `{node}`: output `{output}` overlaps `{other}`")]
    Overlap {
        /// The op's name.
        op: &'static str,
        /// The node's name.
        node: String,
        /// The output.
        output: String,
        /// The tensor it overlaps.
        other: String,
    },
    /// An in-place output is not at its operand's address.
    #[error("{op} `{node}`: `{output}` must lie exactly over `{operand}`, which it overwrites")]
    NotInPlace {
        /// The op's name.
        op: &'static str,
        /// The node's name.
        node: String,
        /// The output.
        output: String,
        /// The operand it overwrites.
        operand: String,
    },
    /// The device has no kernel for this.
    #[error("{op} `{node}` is not supported here: {reason}")]
    Unsupported {
        /// The op's name.
        op: &'static str,
        /// The node's name.
        node: String,
        /// What is missing.
        reason: String,
    },
    /// An instruction of a plan failed. Nothing more runs on its device.
    #[error(
        "{instruction} failed in the {queue} queue, tensor `{tensor}`: {reason}; all queues have \
         stopped"
    )]
    Instruction {
        /// A description of the instruction.
        instruction: String,
        /// Its queue.
        queue: String,
        /// The tensor it computes or copies.
        tensor: String,
        /// The cause.
        reason: String,
    },
    /// A segment of a plan was issued out of order.
    #[error(
        "segment `{segment}` was issued where `{expected}` is next: a plan is safe in the order \
         of its step only; a step that was broken off cannot be taken up again"
    )]
    OutOfTurn {
        /// The segment that was issued.
        segment: &'static str,
        /// The plan's next segment.
        expected: &'static str,
    },
    /// The plan fetches data, but the device has no data source.
    #[error(
        "the plan fetches data, and the device was given no source: set one before the first step"
    )]
    NoSupply,
    /// The plan is for several ranks, but the device is not connected to others.
    #[error(
        "the plan is for one of several ranks, and the device is not connected to the others as that one"
    )]
    NoRanks,
    /// Host data of the wrong size.
    #[error("{given_bytes} bytes do not fit `{tensor}`, which has {tensor_bytes}")]
    WrongSize {
        /// Name of the tensor.
        tensor: String,
        /// The tensor's size.
        tensor_bytes: usize,
        /// The size of the data.
        given_bytes: usize,
    },
    /// The disk failed. If that happens in a step, nothing more runs on the device.
    #[error("the disk tier: {reason}")]
    Disk {
        /// The kind of failure.
        problem: DiskProblem,
        /// What went wrong, and what to do.
        reason: String,
    },
    /// The operating system refused to start a thread.
    #[error(
        "cannot start threads: {reason}; allow more processes (ulimit -u) or ask for fewer threads"
    )]
    Thread {
        /// The system's error.
        reason: String,
    },
    /// Host data of the wrong type or size.
    #[error("{given} elements of {given_dtype} do not fit `{tensor}`: {elements} of {dtype}")]
    HostData {
        /// Name of the tensor.
        tensor: String,
        /// Its element count.
        elements: usize,
        /// Its dtype.
        dtype: DType,
        /// The given number of elements.
        given: usize,
        /// The given dtype.
        given_dtype: DType,
    },
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> DeviceError {
        match error {
            CudaError::Memory(refused) => DeviceError::Memory(refused),
            error => DeviceError::Cuda(error),
        }
    }
}

impl From<HostMemoryRefused> for DeviceError {
    fn from(refused: HostMemoryRefused) -> DeviceError {
        DeviceError::Memory(refused.into())
    }
}

impl DeviceError {
    /// The error for a failed instruction of the plan.
    pub(crate) fn instruction(
        plan: &Plan,
        id: InstructionId,
        failed: impl Into<Failed>,
    ) -> DeviceError {
        let reason = match failed.into() {
            Failed::Other(reason) => reason,
            Failed::Disk(problem, reason) => {
                let reason = format!("{}: {reason}", plan.describe(id));
                return DeviceError::Disk { problem, reason };
            }
        };
        let instruction = plan.instruction(id);
        DeviceError::Instruction {
            instruction: plan.describe(id),
            queue: plan.links.queue_name(plan.queue(id)),
            tensor: tensor_name(plan, &instruction.work),
            reason,
        }
    }
}

/// The cause of a failed instruction.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The disk failed.
    Disk(DiskProblem, String),
    /// Anything else.
    Other(String),
}

impl From<String> for Failed {
    fn from(reason: String) -> Failed {
        Failed::Other(reason)
    }
}
