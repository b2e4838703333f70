//! Host memory of our own in the place of a framework's.

use super::Foreign;
use std::cell::UnsafeCell;

/// A block of host memory, for programs and tests that have no framework.
#[derive(Debug)]
pub struct HostMemory {
    bytes: Box<[UnsafeCell<u8>]>,
}

impl HostMemory {
    /// With these contents.
    pub fn new(bytes: &[u8]) -> HostMemory {
        HostMemory { bytes: bytes.iter().map(|&byte| UnsafeCell::new(byte)).collect() }
    }

    /// What is in it now.
    pub fn contents(&self) -> Vec<u8> {
        // SAFETY: bytes are written by copies only, and while one writes, a guard owns the memory and
        // gives out no reference.
        self.bytes.iter().map(|byte| unsafe { *byte.get() }).collect()
    }
}

// SAFETY: the bytes are valid as long as the box, which is not moved with the value, and may be written
// through shared references. Nothing reuses them before they are freed, which guards put off.
unsafe impl Foreign for HostMemory {
    fn address(&self) -> usize {
        self.bytes.as_ptr() as usize
    }

    fn bytes(&self) -> usize {
        self.bytes.len()
    }
}
