//! Runs programs on a device.
//!
//! [`Resident`] keeps everything in device memory: parameters, gradients and optimizer state in
//! slots that last, and all activations of a step in a work area that is laid out beforehand from
//! their lifetimes. Nothing is allocated, decided or looked up while a schedule runs.

mod error;
mod layout;
mod resident;
mod schedule;
mod slots;
mod verify;

pub use error::ExecError;
pub use resident::Resident;
pub use schedule::{Schedule, ScheduleId};
pub use slots::{SlotId, Slots};
pub use verify::{ChunkReport, OpReport, verify_ops, verify_row_chunks};
