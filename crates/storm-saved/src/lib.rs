//! Keeps, offloads and fetches the tensors that another framework saves between forward and backward.
//!
//! The framework calls [`Session::save`] where it would keep memory, [`Session::need`] where it reads it
//! and [`Session::release`] when it no longer needs it. The first step is recorded: everything
//! is offloaded, one piece at a time, which shows how much memory the rest uses. From then on a
//! [`SavedPlan`](plan::SavedPlan) says what stays, and when the rest is fetched. A step that
//! differs from the recording completes without a plan, and the next one like it is recorded.
//!
//! [`plan`] is pure arithmetic over a recording; sessions carry a plan out on the copy queues of
//! [`storm_device::foreign`].

mod framework;
pub mod plan;
mod session;

pub use framework::Framework;
pub use session::{MemoryUse, Peak, PieceName, SavedOptions, SavedReport, Session, Source, Use};
