//! Memory of the host, whatever device works beside it.
//!
//! [`HostPages`] is memory of exactly the size asked for, present before it is used. [`HostLimit`] says how much
//! there is to take and who refuses more: the machine, its control group, or the limit on locked memory.
//! [`MappedFile`] is a file in memory that may be cut short without harm. [`allocation`] counts what tests
//! allocate.
//!
//! Nothing here knows a device. A device that copies from pages by itself registers them with its driver, and
//! reports a refusal as [`HostMemoryRefused::to_lock`].

pub mod allocation;
mod limits;
mod mapped;
mod pages;
mod refused;
mod size;

pub use limits::{HostLimit, host_memory, locked_memory_limit};
pub use mapped::{Access, MapError, MappedFile};
pub use pages::HostPages;
pub use refused::HostMemoryRefused;
pub use size::show_bytes;
