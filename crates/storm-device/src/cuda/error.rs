use crate::MemoryRefused;
use cudarc::cublaslt::result::CublasError;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;
use storm_ranks::nccl::NcclError;

/// Why a GPU cannot be used, or stopped working, and what to do about it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "no NVIDIA driver was found (libcuda.so.1): install the driver of your distribution and check \
         that `nvidia-smi` lists the card; in a container, start it with GPU access. The CPU device \
         needs none of this"
    )]
    NoDriver,
    /// The driver works, but there is no such card.
    #[error("the NVIDIA driver sees {count} GPUs, and number {wanted} was asked for")]
    NoDevice {
        /// The number of GPUs.
        count: usize,
        /// The requested number, from 0.
        wanted: usize,
    },
    /// The driver does not know the CUDA version that STORM is built for.
    #[error("the NVIDIA driver supports CUDA {found}, and STORM needs {needed}: update the driver")]
    DriverTooOld {
        /// What the driver supports.
        found: String,
        /// What is needed.
        needed: &'static str,
    },
    /// The card is older than the kernels allow.
    #[error("{name} has compute capability {major}.{minor}; STORM needs 8.0 (Ampere) or newer")]
    CardTooOld {
        /// The card.
        name: String,
        /// Major number of its compute capability.
        major: i32,
        /// Minor number of its compute capability.
        minor: i32,
    },
    /// A CUDA library is missing.
    #[error(
        "{library} was not found; install the CUDA toolkit 13, or only what STORM needs: \
         `pip install nvidia-cuda-nvrtc nvidia-cublas` (found in the active Python environment), or \
         set STORM_CUDA_LIBRARIES to the absolute path of the folder that has it"
    )]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
    },
    /// A kernel does not compile.
    #[error("kernel source {source_name} does not compile for {architecture}:\n{log}")]
    Compile {
        /// The file.
        source_name: &'static str,
        /// Its architecture, such as `sm_90`.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// A module lacks a kernel: a bug in STORM.
    #[error("kernel `{kernel}` is not in {source_name}")]
    NoKernel {
        /// The kernel.
        kernel: String,
        /// The file.
        source_name: &'static str,
    },
    /// Card or host memory could not be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryRefused),
    /// Bytes copied to the card came back changed.
    #[error(
        "{bytes} bytes that were copied to the GPU came back changed: the card, its memory or its \
         connection is faulty"
    )]
    CopyChanged {
        /// The number of bytes copied.
        bytes: usize,
    },
    /// A call failed, or a kernel that ran before it.
    #[error(
        "{what} failed: {code:?}. An error inside a kernel shows up at a later call; \
             run again with STORM_CUDA_SYNC=1 to find the instruction"
    )]
    Driver {
        /// The call; with STORM_CUDA_SYNC=1, the instruction.
        what: String,
        /// The driver's code.
        code: CUresult,
    },
    /// A message from a rank arrived changed.
    #[error(
        "what rank {rank} sent to this one arrived changed: the connection between the cards is faulty"
    )]
    MessageChanged {
        /// The rank.
        rank: u32,
    },
    /// An error of NCCL.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// cuBLASLt refused a matrix product.
    #[error("cuBLASLt: {what}: {status}")]
    Blas {
        /// What was being done.
        what: String,
        /// The library's status.
        status: String,
    },
}

impl CudaError {
    // Formats `what` only on an error: calls that issue work must not allocate.

    pub(crate) fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
        move |DriverError(code)| CudaError::Driver { what: what.into(), code }
    }

    pub(crate) fn blas(what: impl Into<String>) -> impl FnOnce(CublasError) -> CudaError {
        move |error| CudaError::Blas { what: what.into(), status: format!("{:?}", error.0) }
    }
}
