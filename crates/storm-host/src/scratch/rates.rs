//! How fast a disk is as plans use it: large copies of aligned pieces with checksums, in both directions.

use super::file::BLOCK_BYTES;
use super::{ScratchError, ScratchFolder, ScratchOptions, ScratchPath, ScratchStore, ScratchWay};
use crate::PageBuffer;
use std::ops::Range;
use std::time::Instant;

/// What a copy moves.
const COPY_BYTES: u64 = 32 << 20;

/// What a disk was measured to do, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScratchRates {
    /// Reading alone.
    pub read: f64,
    /// Writing alone.
    pub write: f64,
    /// Both at once, together.
    pub both: f64,
    /// How it was accessed.
    pub path: ScratchPath,
}

impl ScratchRates {
    /// Writes and reads about that many bytes, twice, by this way or the next one that the system allows.
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
        // Not zeros: some disks compress.
        for (index, byte) in from.as_mut_slice().iter_mut().enumerate() {
            *byte = ((index as u32).wrapping_mul(2_654_435_761) >> 24) as u8;
        }
        let memory = [&from, &to].map(|buffer| (buffer.as_slice().as_ptr() as usize, buffer.len()));
        // SAFETY: neither moves nor goes before the store.
        unsafe { store.register(&memory) };
        let written = from.as_slice().as_ptr() as usize;
        let write = |extents: &[Range<u64>]| -> Result<(), ScratchError> {
            for extent in extents {
                // SAFETY: an extent of the store; the buffer has as many bytes and does not change; one thread writes.
                unsafe { store.write(extent.start, written as *const u8, copy as usize)? };
            }
            Ok(())
        };
        let mut read = |extents: &[Range<u64>]| -> Result<(), ScratchError> {
            let to = to.as_mut_slice().as_mut_ptr();
            for extent in extents {
                // SAFETY: likewise; nothing else uses the buffer, and one thread reads.
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
        // Both at once are never slower than the slower alone, nor faster than the two together.
        let both = both.clamp(read_rate.min(write_rate), read_rate + write_rate);
        Ok(ScratchRates { read: read_rate, write: write_rate, both, path: store.path() })
    }
}
