//! Host buffers for large reads from a device.

use crate::DeviceError;
use crate::cuda::PinnedMemory;
use rayon::prelude::*;
use storm_host::HostPages;

/// Bytes that one core copies at once.
const PIECE_BYTES: usize = 4 << 20;

/// Host memory of exactly the requested size, with all pages present; pinned if a GPU copies to it.
#[derive(Debug)]
pub struct HostBuffer(Memory);

#[derive(Debug)]
enum Memory {
    Pages(HostPages),
    Pinned(PinnedMemory),
}

impl HostBuffer {
    /// Allocates `bytes` of ordinary memory, at least one.
    ///
    /// # Errors
    /// The machine or its cgroup has less.
    pub fn new(bytes: usize) -> Result<HostBuffer, DeviceError> {
        Ok(HostBuffer(Memory::Pages(HostPages::new(bytes, |_| {})?)))
    }

    pub(crate) fn pinned(memory: PinnedMemory) -> HostBuffer {
        HostBuffer(Memory::Pinned(memory))
    }

    /// The contents.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Memory::Pages(pages) => pages.as_slice(),
            Memory::Pinned(memory) => memory.as_slice(),
        }
    }

    /// The contents, mutable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Pages(pages) => pages.as_mut_slice(),
            Memory::Pinned(memory) => memory.as_mut_slice(),
        }
    }
}

/// Copies each first slice to its second, of the same length, on all cores: one core alone does not
/// saturate the memory bandwidth.
pub(crate) fn copy_all(pairs: Vec<(&[u8], &mut [u8])>) {
    pairs.into_par_iter().for_each(|(from, to)| {
        let pieces = to.par_chunks_mut(PIECE_BYTES).zip(from.par_chunks(PIECE_BYTES));
        pieces.for_each(|(to, from)| to.copy_from_slice(from));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_as_large_as_asked_for_and_can_be_filled_elsewhere() {
        let from: Vec<u8> = (0..3 * PIECE_BYTES + 77).map(|i| (i / 251) as u8).collect();
        let mut buffer = HostBuffer::new(from.len()).expect("little");
        assert!(buffer.as_slice().iter().all(|&byte| byte == 0));
        let (head, tail) = buffer.as_mut_slice().split_at_mut(1000);
        copy_all(vec![(&from[1000..], tail), (&from[..1000], head)]);
        let buffer = std::thread::spawn(move || buffer).join().expect("it can be sent");
        assert!(buffer.as_slice() == from);
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let error = HostBuffer::new(1 << 50).expect_err("too much").to_string();
        assert!(error.contains("1024.00 TiB of host memory are needed, and "), "{error}");
    }
}
