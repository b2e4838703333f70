//! The speed of a disk under the load that plans assume: large aligned copies with checksums, in
//! both directions.

use super::file::BLOCK_BYTES;
use super::{ScratchError, ScratchFolder, ScratchOptions, ScratchPath, ScratchStore, ScratchWay};
use crate::PageBuffer;
use std::ops::Range;
use std::time::Instant;

/// Bytes per copy.
const COPY_BYTES: u64 = 32 << 20;

/// Measured throughput, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScratchRates {
    /// Reads alone.
    pub read: f64,
    /// Writes alone.
    pub write: f64,
    /// Reads and writes at once, summed.
    pub both: f64,
    /// The I/O method used.
    pub path: ScratchPath,
}

impl ScratchRates {
    /// Writes and reads about `bytes`, first separately and then at once, with `way` or the next
    /// method that the system allows.
    ///
    /// # Errors
    /// As [`ScratchStore::new`] and [`ScratchStore::read`].
    pub fn measure(
        folder: &ScratchFolder,
        bytes: u64,
        way: ScratchWay,
    ) -> Result<ScratchRates, ScratchError> {
        let block = BLOCK_BYTES as u64;
        let copy = COPY_BYTES.min(bytes / 4 / block * block).max(block);
        let count = (bytes / copy).max(2);
        let extents: Vec<Range<u64>> =
            (0..count).map(|index| index * copy..(index + 1) * copy).collect();
        let options = ScratchOptions { way, fault: None };
        let mut store = ScratchStore::new(folder, count * copy, extents.clone(), options)?;
        let [mut from, mut to] = [(); 2].map(|()| PageBuffer::new(copy as usize));
        // Not zeros, because some disks compress.
        for (index, byte) in from.as_mut_slice().iter_mut().enumerate() {
            *byte = ((index as u32).wrapping_mul(2_654_435_761) >> 24) as u8;
        }
        let memory = [&from, &to].map(|buffer| (buffer.as_slice().as_ptr() as usize, buffer.len()));
        // SAFETY: both buffers outlive the store and do not move.
        unsafe { store.register(&memory) };
        let written = from.as_slice().as_ptr() as usize;
        let write = |extents: &[Range<u64>]| -> Result<(), ScratchError> {
            for extent in extents {
                // SAFETY: an extent of the store. The buffer is as long and does not change. One
                // thread writes.
                unsafe { store.write(extent.start, written as *const u8, copy as usize)? };
            }
            Ok(())
        };
        let mut read = |extents: &[Range<u64>]| -> Result<(), ScratchError> {
            let to = to.as_mut_slice().as_mut_ptr();
            for extent in extents {
                // SAFETY: likewise. Nothing else uses the buffer, and one thread reads.
                unsafe { store.read(extent.start, to, copy as usize)? };
            }
            Ok(())
        };
        let rate =
            |bytes: u64, start: Instant| bytes as f64 / start.elapsed().as_secs_f64().max(1e-9);
        let start = Instant::now();
        write(&extents)?;
        let write_rate = rate(count * copy, start);
        let start = Instant::now();
        read(&extents)?;
        let read_rate = rate(count * copy, start);
        let (first, second) = extents.split_at(extents.len() / 2);
        let start = Instant::now();
        std::thread::scope(|scope| {
            let spawned = std::thread::Builder::new().spawn_scoped(scope, || write(second));
            let writing = spawned.map_err(ScratchError::Thread)?;
            let done = read(first);
            let written = writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done.and(written)
        })?;
        let both = rate(count * copy, start);
        // Bounded by the slower direction alone and by the sum of both.
        let both = both.clamp(read_rate.min(write_rate), read_rate + write_rate);
        Ok(ScratchRates { read: read_rate, write: write_rate, both, path: store.path() })
    }
}
