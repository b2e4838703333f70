use super::CudaKept;
use crate::DiskOptions;
use crate::cuda::CudaRanks;
use std::fmt;
use std::sync::Arc;
use storm_plan::Idle;

/// How a GPU runs a plan.
pub struct CudaPlanOptions {
    /// The GPU's number, from 0. With `kept`, the kept device's GPU is used.
    pub ordinal: usize,
    /// Record what the queues did in each step. Costs two events per instruction.
    pub trace: bool,
    /// Delay every instruction by a random time derived from this seed. Results must not change.
    pub chaos_seed: Option<u64>,
    /// How many times as long copies take, to imitate a slower link: each copy moves its bytes this many times. 1 or
    /// less is full speed.
    pub copy_slowdown: f64,
    /// Compute on this many of the card's multiprocessors, or a few more, to imitate a smaller card.
    pub multiprocessors: Option<usize>,
    /// Limit on the card memory of this whole process, context and code included.
    pub vram_bytes: Option<u64>,
    /// Make a kernel fail after this many instructions of the compute queue. The process cannot use the card
    /// afterwards.
    pub fail_after: Option<u64>,
    /// Approximate seconds to spend on finding the fastest algorithms for matrix products. Results are cached on disk,
    /// so the next plan with the same products spends none. Bits do not change.
    pub tune_seconds: f64,
    /// Which kernels are issued as CUDA graphs. Bits do not change.
    pub graphs: GraphUse,
    /// Where the disk tier is. Required if the plan has one.
    pub disk: Option<DiskOptions>,
    /// The other ranks. Required if the plan is for several ranks.
    pub ranks: Option<Arc<CudaRanks>>,
    /// Allocate device memory in parts, so that this can be given back between steps.
    pub releases: Option<Idle>,
    /// Called with the progress of slow preparations.
    pub progress: Option<Box<dyn FnMut(Preparing)>>,
    /// What an earlier device kept, see [`CudaPlanDevice::keep`](super::CudaPlanDevice::keep).
    pub kept: Option<CudaKept>,
}

/// Which kernels the host issues together, as CUDA graphs. `STORM_CUDA_GRAPHS=0` means none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphUse {
    /// Kernels of steps and evaluations, where they are so short that the host could be late, and
    /// where there is memory for graphs.
    WhereShort,
    /// All kernels that can be, for tests.
    Everywhere,
    /// None.
    Never,
}

/// A slow preparation before a plan can run, and its progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preparing {
    /// Host memory is being pinned.
    HostMemory {
        /// Done.
        bytes: usize,
        /// To do.
        of: usize,
    },
    /// Algorithms for matrix products are being measured.
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
            graphs: GraphUse::WhereShort,
            disk: None,
            ranks: None,
            releases: None,
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
            .field("graphs", &self.graphs)
            .field("disk", &self.disk)
            .field("ranks", &self.ranks)
            .field("releases", &self.releases)
            .field("kept", &self.kept.is_some())
            .finish_non_exhaustive()
    }
}

impl CudaPlanOptions {
    /// Which kernels are issued as graphs, given the other options.
    pub(super) fn graph_use(&self, synchronous: bool) -> GraphUse {
        let is_off = std::env::var_os("STORM_CUDA_GRAPHS").is_some_and(|value| value == "0");
        // These options concern single instructions. And graphs are not known to stay on a part of
        // the card.
        let by_instruction = synchronous || self.fail_after.is_some();
        match is_off || by_instruction || self.multiprocessors.is_some() {
            true => GraphUse::Never,
            false => self.graphs,
        }
    }
}
