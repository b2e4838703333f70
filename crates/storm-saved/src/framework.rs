use crate::{MemoryUse, Peak};
use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Foreign};

/// The framework that owns the memory.
pub trait Framework {
    /// Memory that stays allocated as long as the value lives.
    type Memory: Foreign;
    /// A weak reference to memory.
    type Origin;
    /// The error type.
    type Error: From<DeviceError>;

    /// Allocates memory that is first used in `stream`.
    ///
    /// # Errors
    /// No memory is available.
    fn allocate(&self, bytes: usize, stream: ComputeStream) -> Result<Self::Memory, Self::Error>;

    /// Whether the memory is still alive.
    fn is_alive(&self, origin: &Self::Origin) -> bool;

    /// The memory, if it is still alive.
    fn upgrade(&self, origin: &Self::Origin) -> Option<Self::Memory>;

    /// Current memory use. `None` if the framework does not track it.
    fn memory_use(&self, peak: Peak) -> Option<MemoryUse>;
}
