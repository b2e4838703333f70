//! Runs programs on a device.
//!
//! [`Resident`] keeps everything in device memory: parameters, gradients and optimizer state in
//! persistent slots, and all activations of a step in a work area that is laid out in advance from
//! their lifetimes. Nothing is allocated, decided or looked up while a schedule runs.
//!
//! [`Planned`] runs a checked plan, which lists every copy between device and host in order;
//! [`trace`] shows what the queues did.

mod error;
mod layout;
mod planned;
mod resident;
mod schedule;
mod slots;
pub mod trace;

pub use error::ExecError;
pub use planned::{Feed, Planned};
pub use resident::{Resident, resident_bytes};
pub use schedule::{Schedule, ScheduleId};
pub use slots::{SlotId, Slots};
