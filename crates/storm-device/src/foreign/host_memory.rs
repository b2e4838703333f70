//! Our own host memory in place of a framework's.

use super::Foreign;
use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::rc::Rc;

/// A block of host memory, for programs and tests that have no framework.
pub struct HostMemory {
    bytes: Box<[UnsafeCell<u8>]>,
    companion: Option<Rc<dyn Any>>,
}

impl HostMemory {
    /// With these contents.
    pub fn new(bytes: &[u8]) -> HostMemory {
        let bytes = bytes.iter().map(|&byte| UnsafeCell::new(byte)).collect();
        HostMemory { bytes, companion: None }
    }

    /// Attaches a value that lives as long, for example to count live memory.
    pub fn with_companion(self, companion: Rc<dyn Any>) -> HostMemory {
        HostMemory { companion: Some(companion), ..self }
    }

    /// The attached value.
    pub fn companion(&self) -> Option<Rc<dyn Any>> {
        self.companion.clone()
    }

    /// The current contents.
    pub fn contents(&self) -> Vec<u8> {
        // SAFETY: only copies write the bytes, and while one does, a guard owns the memory and gives
        // out no reference.
        self.bytes.iter().map(|byte| unsafe { *byte.get() }).collect()
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory of {} bytes", self.bytes.len())
    }
}

// SAFETY: the bytes are valid as long as the box, which does not move with the value, and may be
// written through shared references. Nothing reuses them before they are freed, and guards delay that.
unsafe impl Foreign for HostMemory {
    fn address(&self) -> usize {
        self.bytes.as_ptr() as usize
    }

    fn bytes(&self) -> usize {
        self.bytes.len()
    }
}
