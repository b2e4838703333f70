use super::host_limits::HostLimit;
use super::memory::{MemoryHolder, MemoryInUse, gibibytes};
use cudarc::cublaslt::result::CublasError;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

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
    /// The driver works, but there is no card, or not that many.
    #[error("the NVIDIA driver sees {count} GPUs, and number {wanted} was asked for")]
    NoDevice {
        /// How many there are.
        count: usize,
        /// Which was asked for, from 0.
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
        /// Its capability.
        major: i32,
        /// Its capability.
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
        /// `sm_90` and the like.
        architecture: String,
        /// What the compiler says.
        log: String,
    },
    /// A module has no such kernel: a defect of STORM.
    #[error("kernel `{kernel}` is not in {source_name}")]
    NoKernel {
        /// The kernel.
        kernel: String,
        /// The file.
        source_name: &'static str,
    },
    /// The memory is not free.
    #[error(
        "the GPU has {} of {} free, and {} are needed; {}",
        gibibytes(*.free_bytes as u64),
        gibibytes(*.total_bytes as u64),
        gibibytes(*.wanted_bytes as u64),
        advice(*.free_bytes, *.total_bytes, *.wanted_bytes, .holders)
    )]
    OutOfMemory {
        /// What was asked for.
        wanted_bytes: usize,
        /// What is free.
        free_bytes: usize,
        /// What the card has.
        total_bytes: usize,
        /// Other processes on the card, largest first; empty if there are none, or if NVML is not
        /// there to name them.
        holders: Vec<MemoryHolder>,
    },
    /// More of the card's memory is in use than was allowed.
    #[error(
        "{} are in use, {}, where {} are allowed: {} are the plan's, the rest is context, code and \
         workspaces; plan for a smaller block or allow more",
        gibibytes(.in_use.bytes),
        .in_use.counted,
        gibibytes(*.budget_bytes),
        gibibytes(*.block_bytes)
    )]
    OverBudget {
        /// What is in use, and how that was counted.
        in_use: MemoryInUse,
        /// What is allowed.
        budget_bytes: u64,
        /// Of what is in use: the plan's block.
        block_bytes: u64,
    },
    /// Host memory for copies cannot be had.
    #[error(
        "{} of page-locked host memory are needed, and cannot be had: {limit}",
        gibibytes(*.wanted_bytes as u64)
    )]
    PinnedMemory {
        /// What was asked for.
        wanted_bytes: usize,
        /// Who refused it.
        limit: HostLimit,
    },
    /// Bytes that went to the card came back changed.
    #[error(
        "{bytes} bytes that were copied to the GPU came back changed: the card, its memory or its \
         connection is faulty"
    )]
    CopyChanged {
        /// How many were copied.
        bytes: usize,
    },
    /// A call failed, or a kernel before it.
    #[error(
        "{what} failed: {code:?}. An error inside a kernel shows up at a later call; \
             run again with STORM_CUDA_SYNC=1 to find the instruction"
    )]
    Driver {
        /// The call, or the instruction with STORM_CUDA_SYNC=1.
        what: String,
        /// The driver's code.
        code: CUresult,
    },
    /// cuBLASLt refused a matrix product.
    #[error("cuBLASLt: {what}: {status}")]
    Blas {
        /// What was being done.
        what: String,
        /// The library's status.
        status: String,
    },
}

fn advice(free: usize, total: usize, wanted: usize, holders: &[MemoryHolder]) -> String {
    if wanted > total {
        return "the card does not have that much: choose a smaller model, batch or budget".into();
    }
    if !holders.is_empty() {
        let names: Vec<String> = holders.iter().map(ToString::to_string).collect();
        return format!("{}: end it or choose a smaller budget", names.join(", "));
    }
    if free < total / 10 * 9 {
        return "another process holds the rest: `nvidia-smi` names it; end it or choose a smaller \
                budget"
            .into();
    }
    "choose a smaller batch or budget".into()
}

impl CudaError {
    // Text is made from `what` only if there is an error: calls that give out work do not allocate.

    pub(crate) fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
        move |DriverError(code)| CudaError::Driver { what: what.into(), code }
    }

    pub(crate) fn blas(what: impl Into<String>) -> impl FnOnce(CublasError) -> CudaError {
        move |error| CudaError::Blas { what: what.into(), status: format!("{:?}", error.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out_of_memory(wanted: usize, free: usize, holders: Vec<MemoryHolder>) -> String {
        let (wanted_bytes, free_bytes, total_bytes) = (wanted << 30, free << 30, 80 << 30);
        CudaError::OutOfMemory { wanted_bytes, free_bytes, total_bytes, holders }.to_string()
    }

    #[test]
    fn who_holds_the_memory() {
        let holder = |process, program: Option<&str>, bytes| MemoryHolder {
            process,
            program: program.map(str::to_owned),
            bytes,
        };
        let holders = vec![holder(41, Some("python"), Some(50 << 30)), holder(42, None, None)];
        assert_eq!(
            out_of_memory(40, 30, holders),
            "the GPU has 30.00 GiB of 80.00 GiB free, and 40.00 GiB are needed; process 41 (python) \
             holds 50.00 GiB, process 42 holds some: end it or choose a smaller budget"
        );
        assert!(out_of_memory(40, 30, Vec::new()).contains("`nvidia-smi` names it"));
        assert!(out_of_memory(79, 78, Vec::new()).contains("choose a smaller batch or budget"));
        assert!(out_of_memory(100, 78, Vec::new()).contains("does not have that much"));
    }

    #[test]
    fn who_passes_the_budget() {
        let in_use = MemoryInUse { bytes: 9 << 30, counted: super::super::Counted::Process };
        let (budget_bytes, block_bytes) = (8 << 30, 7 << 30);
        let error = CudaError::OverBudget { in_use, budget_bytes, block_bytes }.to_string();
        assert_eq!(
            error,
            "9.00 GiB are in use, of this process, by NVML, where 8.00 GiB are allowed: 7.00 GiB are \
             the plan's, the rest is context, code and workspaces; plan for a smaller block or allow \
             more"
        );
    }

    #[test]
    fn which_limit_refuses_host_memory() {
        let error = |limit| CudaError::PinnedMemory { wanted_bytes: 3 << 30, limit }.to_string();
        let locked = error(HostLimit::LockedMemory { limit_bytes: 65536 });
        assert!(locked.starts_with("3.00 GiB of page-locked host memory are needed"), "{locked}");
        assert!(locked.contains("ulimit -l"), "{locked}");
        let group = error(HostLimit::ControlGroup { available_bytes: 5, limit_bytes: 9 });
        assert!(group.contains("5 bytes left of 9"), "{group}");
    }
}
