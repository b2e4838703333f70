//! Tensors that another framework saves between forward and backward: kept, offloaded and fetched back.
//!
//! The framework calls [`Session::save`] where it would keep memory, [`Session::need`] where it reads it
//! and [`Session::release`] when it no longer needs it. The first step is recorded: everything
//! is offloaded, one piece at a time, which shows how much memory the rest uses. From then on a
//! [`SavedPlan`](storm_plan::saved::SavedPlan) says what stays, and when the rest is fetched. A step that
//! differs from the recording completes without a plan, and the next one like it is recorded.

mod mover;
mod piece;
mod recorder;
mod recordings;
mod report;
mod session;
mod step;

pub use recorder::{MemoryUse, Peak};
pub use report::SavedReport;
pub use session::{PieceName, SavedOptions, Session, Source, Use};

use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Foreign};

/// The framework that owns the memory.
pub trait Framework {
    /// Memory that lives as long as the value.
    type Memory: Foreign;
    /// Names memory without keeping it.
    type Origin;
    /// What can go wrong.
    type Error: From<DeviceError>;

    /// New memory, first used in `stream`.
    ///
    /// # Errors
    /// No memory is available.
    fn allocate(&self, bytes: usize, stream: ComputeStream) -> Result<Self::Memory, Self::Error>;

    /// Whether the memory is still alive.
    fn is_alive(&self, origin: &Self::Origin) -> bool;

    /// The memory, if it is still alive.
    fn upgrade(&self, origin: &Self::Origin) -> Option<Self::Memory>;

    /// How much memory is in use; none if the framework does not count it.
    fn memory_use(&self, peak: Peak) -> Option<MemoryUse>;
}
