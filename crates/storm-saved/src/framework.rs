use crate::{MemoryUse, Peak};
use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Foreign};

/// The framework whose memory it is.
pub trait Framework {
    /// Memory that lives as long as the value.
    type Memory: Foreign;
    /// Names memory without keeping it.
    type Origin;
    /// What can go wrong.
    type Error: From<DeviceError>;

    /// New memory, first used in `stream`.
    ///
    /// # Errors
    /// There is none.
    fn allocate(&self, bytes: usize, stream: ComputeStream) -> Result<Self::Memory, Self::Error>;

    /// Whether somebody still holds the memory.
    fn is_alive(&self, origin: &Self::Origin) -> bool;

    /// The memory, if somebody still holds it.
    fn upgrade(&self, origin: &Self::Origin) -> Option<Self::Memory>;

    /// How much memory is in use; none where nobody counts it.
    fn memory_use(&self, peak: Peak) -> Option<MemoryUse>;
}
