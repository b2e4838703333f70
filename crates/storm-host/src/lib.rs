//! Host memory, independent of any device.
//!
//! [`HostPages`] is memory of exactly the requested size, present before it is used. [`HostLimit`] says how much
//! is available and what limits it: the machine, its control group, or the limit on locked memory.
//! [`MappedFile`] is a mapped file that tolerates truncation. [`cached_bytes`] says how much of a file is in the page
//! cache. [`ReadRing`] has many reads of files in flight, into [`PageBuffer`]s. [`ScratchStore`] is
//! scratch space on a disk, [`release_pages`] gives memory back for a while, and [`DriveWear`] says how worn an NVMe drive is. [`allocation`] counts what tests allocate.
//!
//! Nothing here knows about devices. A device that copies pages by DMA registers them with its driver, and
//! reports a refusal as [`HostMemoryRefused::to_lock`].

pub mod allocation;
mod drive_wear;
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
