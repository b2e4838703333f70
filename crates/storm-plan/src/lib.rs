//! Plans training steps within a memory budget, proves the plans safe, and predicts how long they take.
//!
//! This crate is pure: no I/O, no devices, no clock. A [`Plan`] is plain data: instructions on a few queues, each with
//! its addresses and the instructions that it waits for. A [`CheckedPlan`] is one that a device may run.

mod bottleneck;
mod check;
mod choice;
mod collective;
mod decisions;
mod error;
mod estimate;
mod graph_memory;
mod holdings;
mod idle;
mod lanes;
mod lower;
mod pack;
mod per;
mod plan;
mod profile;
mod profiles;
mod queue;
mod random;
mod ranges;
mod request;
mod search;
mod simulate;
mod stretches;
mod task;
mod tier;
mod too_small;

pub use bottleneck::Bottleneck;
pub use check::{
    Actor, CheckError, CheckedPlan, Found, RanksError, Spot, check, shared_digest, sums_digest,
    verify, verify_ranks,
};
pub use collective::{Collective, CollectiveKind, Moved, RankPlace};
pub use decisions::{
    ActivationDecisions, Decisions, GroupDecisions, PIECE_ELEMENTS, RingMemory, SavedStorage,
    SeamMemory, StageDecisions, Storage, Streaming, UpdateTime,
};
pub use error::PlanError;
pub use graph_memory::{GRAPH_KERNEL_BYTES, SHORT_KERNEL_SECONDS};
pub use holdings::{Holding, TensorKind};
pub use idle::Idle;
pub use lanes::{Lanes, NotLanes};
pub use lower::{DISK_BLOCK_BYTES, Lowering};
pub use pack::{ALIGNMENT, Lifetime, Packing, aligned, pack};
pub use plan::{
    Compute, Copy, Fetch, GraphId, Input, Instruction, InstructionId, Lasting, Operand, Operands,
    Place, Plan, PlanResult, ReadAhead, Region, Run, Segment, SegmentId, Shard, Sharded, Value,
    ValueId, Work,
};
pub use profile::{
    AttentionPoint, DiskProfile, ElementwisePoint, GemmKind, GemmPoint, HardwareProfile,
    LinkProfile, LinkRates, MachineLink, ProfileError, RankLink,
};
pub use queue::{Link, Links, PerQueue, Queue};
pub use random::{random_decisions, random_decisions_with_disk};
pub use ranges::merged_ranges;
pub use request::{
    Budget, Forced, OnDisk, Placement, Planned, Policy, Prediction, guess_step_seconds, plan,
    plan_decided, policies,
};
pub use simulate::{
    SegmentTime, Simulation, Span, Stalls, Transfer, instruction_seconds, simulate,
    simulate_with_timeline,
};
pub use stretches::Stretch;
pub use task::{SavedUnit, Task, TrainingGraphs, UpdateRule};
pub use tier::{PerTier, Tier};
pub use too_small::TooSmall;
