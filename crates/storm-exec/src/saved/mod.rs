//! What another framework saves between forward and backward, kept, moved out and fetched back.
//!
//! The framework calls [`Session::save`] where it would keep memory, [`Session::need`] where it wants it
//! back and [`Session::release`] when it never will again. The first step is recorded: everything
//! leaves, one piece at a time, and the memory that the rest takes is seen. From then on a
//! [`SavedPlan`](storm_plan::saved::SavedPlan) says what stays, and when the rest is fetched. A step that
//! does not do what was recorded is carried on without a plan, and the next like it is recorded.

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

/// The framework whose memory it is.
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
    /// There is none.
    fn allocate(&self, bytes: usize, stream: ComputeStream) -> Result<Self::Memory, Self::Error>;

    /// Whether somebody still holds the memory.
    fn is_alive(&self, origin: &Self::Origin) -> bool;

    /// The memory, if somebody still holds it.
    fn upgrade(&self, origin: &Self::Origin) -> Option<Self::Memory>;

    /// How much memory is in use; none where nobody counts it.
    fn memory_use(&self, peak: Peak) -> Option<MemoryUse>;
}
