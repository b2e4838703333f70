//! The threads that kernels run on: their maximum number, and the memory that each takes.

use super::kernels::{attention, gemm};
use crate::DeviceError;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Maximum number of threads. No machine has the cores for more, and each takes memory.
pub const THREADS_MAX: usize = 1024;

/// Kernels need little stack. This is the usual default.
const STACK_BYTES: usize = 2 << 20;

/// Host memory of one kernel thread, not counting the plan's blocks: its stack, and its buffers for
/// packing and for blocks of attention.
pub const THREAD_BYTES: u64 =
    (STACK_BYTES + size_of::<f32>() * (gemm::SCRATCH_LEN + attention::SCRATCH_LEN)) as u64;

/// A thread pool for kernels. The default size is that of the caller's rayon pool.
pub(super) fn pool(threads: Option<usize>) -> Result<ThreadPool, DeviceError> {
    start(threads.unwrap_or_else(|| rayon::current_num_threads().min(THREADS_MAX)))
}

fn start(threads: usize) -> Result<ThreadPool, DeviceError> {
    if !(1..=THREADS_MAX).contains(&threads) {
        let reason = format!("{threads} threads were asked for; 1 to {THREADS_MAX} are possible");
        return Err(DeviceError::Thread { reason });
    }
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(STACK_BYTES)
        .thread_name(|index| format!("storm kernels {index}"))
        .build()
        .map_err(|error| DeviceError::Thread {
            reason: format!("{threads} threads for kernels: {error}"),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sensible_numbers_of_threads_are_started() {
        assert_eq!(start(3).expect("three threads").current_num_threads(), 3);
        for threads in [0, THREADS_MAX + 1, usize::MAX] {
            let error = start(threads).expect_err("refused").to_string();
            assert!(error.contains(&threads.to_string()) && error.contains("1024"), "{error}");
        }
    }
}
