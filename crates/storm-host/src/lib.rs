//! Host memory, independent of any device.
//!
//! - [`HostPages`] is memory of exactly the requested size, faulted in before it is used.
//! - [`HostLimit`] is how much memory is available and what limits it: the machine, its control
//!   group, or the limit on locked memory.
//! - [`prefer_huge_pages`] asks for huge pages.
//! - [`release_pages`] returns idle memory to the system until [`restore_pages`].
//! - [`MappedFile`] is a mapped file that tolerates truncation.
//! - [`ReadRing`] keeps many file reads in flight, into [`PageBuffer`]s.
//! - [`cached_bytes`] returns how much of a file is in the page cache.
//! - [`ScratchStore`] is scratch space on a disk. [`DriveWear`] is how worn an NVMe drive is.
//! - [`allocation`] counts allocations in tests.
//!
//! A device that copies pages by DMA registers them with its driver, and reports a refusal as
//! [`HostMemoryRefused::to_lock`].

pub mod allocation;
mod drive_wear;
mod huge_pages;
mod idle_pages;
mod limits;
mod mapped;
mod page_buffer;
mod page_cache;
mod pages;
mod read_ring;
mod refused;
mod ring;
mod scratch;
mod size;

pub use drive_wear::DriveWear;
pub use huge_pages::prefer_huge_pages;
pub use idle_pages::{absent_bytes, release_pages, restore_pages};
pub use limits::{HostLimit, host_memory, locked_memory_limit};
pub use mapped::{Access, MapError, MappedFile};
pub use page_buffer::PageBuffer;
pub use page_cache::cached_bytes;
pub use pages::HostPages;
pub use read_ring::{ReadRing, RingRead, RingResult};
pub use refused::HostMemoryRefused;
pub use scratch::{
    ScratchAccess, ScratchError, ScratchFault, ScratchFaultKind, ScratchFolder, ScratchOptions,
    ScratchPath, ScratchRates, ScratchStore, ScratchWay,
};
pub use size::show_bytes;
