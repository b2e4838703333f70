//! What another framework saves between forward and backward, kept, moved out and fetched back.
//!
//! The framework calls [`Session::save`] where it would keep memory, [`Session::need`] where it wants it
//! back and [`Session::release`] when it never will again. The first step is recorded: everything
//! leaves, one piece at a time, and the memory that the rest takes is seen. From then on a
//! [`SavedPlan`](plan::SavedPlan) says what stays, and when the rest is fetched. A step that does not do what
//! was recorded is carried on without a plan, and the next like it is recorded.
//!
//! [`plan`] is pure arithmetic over a recording; sessions carry a plan out on the copy queues of
//! [`storm_device::foreign`].

mod framework;
pub mod plan;
mod session;

pub use framework::Framework;
pub use session::{MemoryUse, Peak, PieceName, SavedOptions, SavedReport, Session, Source, Use};
