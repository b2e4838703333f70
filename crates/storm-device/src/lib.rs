//! Devices that run STORM's ops.
//!
//! The only crate with `unsafe` code. [`cpu`] is the reference that every other device is checked
//! against, and a fast device of its own.

pub mod allocation;
pub mod cpu;
pub mod cuda;
mod device;
mod error;
mod placed;
mod scalar;

pub use device::Device;
pub use error::DeviceError;
pub use scalar::Scalar;
