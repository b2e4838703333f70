//! Buffers for direct reads.

/// Alignment of direct reads, in memory and in files.
const PAGE_BYTES: usize = 4096;

/// Zeroed memory in whole pages of 4096 bytes, aligned to a page.
#[derive(Debug)]
pub struct PageBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl PageBuffer {
    /// At least this many bytes, rounded up to whole pages.
    pub fn new(bytes: usize) -> PageBuffer {
        let length = bytes.next_multiple_of(PAGE_BYTES);
        let bytes = vec![0; length + PAGE_BYTES];
        let address = bytes.as_ptr().addr();
        PageBuffer { start: address.next_multiple_of(PAGE_BYTES) - address, bytes }
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len() - PAGE_BYTES
    }

    /// Whether its size is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len()]
    }

    /// As [`PageBuffer::as_slice`], mutable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let length = self.len();
        &mut self.bytes[self.start..][..length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_long_enough() {
        for bytes in [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 300_000] {
            let mut buffer = PageBuffer::new(bytes);
            assert_eq!(buffer.len(), bytes.next_multiple_of(PAGE_BYTES));
            assert_eq!(buffer.as_slice().len(), buffer.len());
            assert_eq!(buffer.as_mut_slice().as_ptr().addr() % PAGE_BYTES, 0);
            assert_eq!(buffer.is_empty(), bytes == 0);
        }
    }
}
