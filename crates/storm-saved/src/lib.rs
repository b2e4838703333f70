//! Keeps, offloads and fetches the tensors that another framework saves between forward and
//! backward.
//!
//! The framework calls [`Session::save`] where it would keep memory, [`Session::need`] where it
//! reads that memory, and [`Session::release`] when it no longer needs it. The first step is
//! recorded: everything is offloaded, one piece at a time, which shows how much memory the step
//! needs without the saved tensors. From then on, a [`SavedPlan`](plan::SavedPlan) determines which
//! tensors stay on the device and when the others are fetched. A step that differs from the
//! recording completes without a plan, and the next one like it is recorded.
//!
//! [`plan`] is pure arithmetic over a recording. Sessions execute a plan on the copy queues of
//! [`storm_device::foreign`].

mod framework;
pub mod plan;
mod session;

pub use framework::Framework;
pub use session::{MemoryUse, Peak, PieceName, SavedOptions, SavedReport, Session, Source, Use};
