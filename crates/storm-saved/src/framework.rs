use crate::{MemoryUse, Peak};
use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Foreign};

/// The framework that owns the memory.
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
    /// No memory is available.
    fn allocate(&self, bytes: usize, stream: ComputeStream) -> Result<Self::Memory, Self::Error>;

    /// Whether the memory is still alive.
    fn is_alive(&self, origin: &Self::Origin) -> bool;

    /// The memory, if it is still alive.
    fn upgrade(&self, origin: &Self::Origin) -> Option<Self::Memory>;

    /// How much memory is in use; none if the framework does not count it.
    fn memory_use(&self, peak: Peak) -> Option<MemoryUse>;
}
