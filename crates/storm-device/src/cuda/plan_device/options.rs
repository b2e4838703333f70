use super::CudaKept;
use std::fmt;

/// How a GPU runs a plan.
pub struct CudaPlanOptions {
    /// Which GPU, from 0. With `kept`, it is the one that was kept.
    pub ordinal: usize,
    /// Record what the queues did in each step. Costs two events an instruction.
    pub trace: bool,
    /// Delay every instruction by a random time from this seed: results must not change.
    pub chaos_seed: Option<u64>,
    /// How many times as long copies take, as if the card had a slower connection: each moves its
    /// bytes so often. At most 1 is full speed.
    pub copy_slowdown: f64,
    /// Compute on so many of the card's multiprocessors, or a few more, as if it were a smaller card.
    pub multiprocessors: Option<usize>,
    /// What all of this process may take of the card's memory, context and code included.
    pub vram_bytes: Option<u64>,
    /// Make a kernel fail, after so many instructions of the compute queue. The process cannot use the
    /// card afterwards.
    pub fail_after: Option<u64>,
    /// How many seconds to take for finding the fastest algorithms of matrix products, about. What was found is kept on
    /// disk, so that the next plan with the same products takes none. Bits do not change.
    pub tune_seconds: f64,
    /// Hears how far the preparation is: parts of it take long.
    pub progress: Option<Box<dyn FnMut(Preparing)>>,
    /// What an earlier device kept, see [`CudaPlanDevice::keep`](super::CudaPlanDevice::keep).
    pub kept: Option<CudaKept>,
}

/// What takes long before a plan can run, and how far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preparing {
    /// Host memory is page-locked.
    HostMemory {
        /// Done.
        bytes: usize,
        /// To do.
        of: usize,
    },
    /// Algorithms of matrix products are tried.
    Products {
        /// Done.
        shapes: usize,
        /// To do.
        of: usize,
    },
}

impl Default for CudaPlanOptions {
    fn default() -> CudaPlanOptions {
        CudaPlanOptions {
            ordinal: 0,
            trace: false,
            chaos_seed: None,
            copy_slowdown: 1.0,
            multiprocessors: None,
            vram_bytes: None,
            fail_after: None,
            tune_seconds: 0.0,
            progress: None,
            kept: None,
        }
    }
}

impl fmt::Debug for CudaPlanOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaPlanOptions")
            .field("ordinal", &self.ordinal)
            .field("trace", &self.trace)
            .field("chaos_seed", &self.chaos_seed)
            .field("copy_slowdown", &self.copy_slowdown)
            .field("multiprocessors", &self.multiprocessors)
            .field("vram_bytes", &self.vram_bytes)
            .field("fail_after", &self.fail_after)
            .field("tune_seconds", &self.tune_seconds)
            .field("kept", &self.kept.is_some())
            .finish_non_exhaustive()
    }
}
