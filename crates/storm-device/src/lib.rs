//! Devices that run STORM's ops.
//!
//! A [`Device`] runs one instruction after another; a [`PlanDevice`] runs a checked plan on concurrent
//! queues. [`cpu`] is the reference for every other device, and itself a fast device.

mod chaos;
mod collectives;
pub mod cpu;
pub mod cuda;
mod device;
mod disk;
mod error;
pub mod foreign;
mod host_buffer;
mod null;
mod placed;
mod plan_device;
mod refused;
mod scalar;
mod sequence;
mod spans;
mod supply;
mod tickets;

pub use collectives::Collectives;
pub use device::Device;
pub use disk::{DiskOptions, DiskProblem};
pub use error::DeviceError;
pub use host_buffer::HostBuffer;
pub use null::{NullDevice, NullOptions};
pub use plan_device::PlanDevice;
pub use refused::MemoryRefused;
pub use scalar::{Scalar, bytes_of, bytes_of_mut};
pub use spans::{Span, Trace, WaitedFor};
pub use supply::{PutInput, Supply};
