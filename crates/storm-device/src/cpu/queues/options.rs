use crate::cpu::Bf16Products;
use crate::{Collectives, DiskOptions};
use std::sync::Arc;
use storm_plan::Queue;

/// How the CPU runs a plan.
#[derive(Clone, Debug)]
pub struct CpuPlanOptions {
    /// Threads for the compute queue's kernels. The default is the size of the caller's rayon pool.
    pub threads: Option<usize>,
    /// Maximum number of commands in each queue. The host waits when a queue is full.
    pub commands_max: usize,
    /// Record what the queues did in each step.
    pub trace: bool,
    /// Delay every instruction by a random time derived from this seed. Results must not change.
    pub chaos_seed: Option<u64>,
    /// Make an instruction fail.
    pub fault: Option<Fault>,
    /// Refuse to take back memory that was released, as if other processes used it.
    pub refuses_reclaim: bool,
    /// Where the disk tier is. If none, a block of memory takes its place.
    pub disk: Option<DiskOptions>,
    /// How products of bf16 operands are summed.
    pub products: Bf16Products,
    /// The connection to other ranks. A plan for several ranks needs it.
    pub ranks: Option<Arc<dyn Collectives>>,
}

impl Default for CpuPlanOptions {
    fn default() -> CpuPlanOptions {
        CpuPlanOptions {
            threads: None,
            commands_max: 1024,
            trace: false,
            chaos_seed: None,
            fault: None,
            refuses_reclaim: false,
            disk: None,
            products: Bf16Products::Fma,
            ranks: None,
        }
    }
}

/// A deliberate failure, for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The queue that fails.
    pub queue: Queue,
    /// Number of instructions that the queue runs before it.
    pub after: u64,
    /// How it fails.
    pub kind: FaultKind,
}

/// How an instruction fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// With an error, as if a driver reported it.
    Error,
    /// With a panic, like a kernel that finds an id out of range.
    Panic,
}
