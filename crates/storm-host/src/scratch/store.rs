use super::lane::Lane;
use super::pieces::{Memory, Pieces};
use super::ring_lane::RingLane;
use super::{
    ScratchAccess, ScratchError, ScratchFolder, ScratchOptions, ScratchPath, ScratchWay, file,
};
use crate::PageBuffer;
use std::ops::Range;
use std::sync::Arc;

/// Threads of [`ScratchStore::read_bytes`].
const HOST_THREADS: usize = 4;

/// A scratch file. At most one thread reads and one writes at a time.
#[derive(Debug)]
pub struct ScratchStore {
    reads: Lane,
    writes: Lane,
    pieces: Arc<Pieces>,
    bytes: u64,
    path: ScratchPath,
}

impl ScratchStore {
    /// Creates a file. Each extent is transferred as a unit, and consists of whole blocks of 4096
    /// bytes.
    ///
    /// # Errors
    /// There is not enough space, or the system refuses a file or threads.
    ///
    /// # Panics
    /// If extents overlap, or are not whole blocks.
    pub fn new(
        folder: &ScratchFolder,
        bytes: u64,
        extents: Vec<Range<u64>>,
        options: ScratchOptions,
    ) -> Result<ScratchStore, ScratchError> {
        let ScratchOptions { way, fault } = options;
        let (file, is_direct) = file::create(folder, bytes, way)?;
        let pieces = Arc::new(Pieces::new(file, extents, fault));
        let rings = match way {
            ScratchWay::Ring if is_direct => rings(&pieces),
            _ => None,
        };
        let path = match (&rings, is_direct) {
            (Some(_), _) => ScratchPath::Ring { is_registered: false },
            (None, true) => ScratchPath::Direct,
            (None, false) => ScratchPath::PageCache,
        };
        let (reading, writing) = rings.unzip();
        let reads = Lane::new(&pieces, ScratchAccess::Read, reading)?;
        let writes = Lane::new(&pieces, ScratchAccess::Write, writing)?;
        Ok(ScratchStore { reads, writes, pieces, bytes, path })
    }

    /// Registers memory, given as address and length, with the kernel if io_uring is used.
    /// Transfers of this memory then have less overhead. If the kernel refuses, nothing else
    /// changes.
    ///
    /// # Safety
    /// The memory stays mapped as long as the store is used.
    pub unsafe fn register(&mut self, memory: &[(usize, usize)]) {
        if let ScratchPath::Ring { .. } = self.path {
            // SAFETY: the caller's promise.
            let is_registered =
                unsafe { self.reads.register(memory) && self.writes.register(memory) };
            self.path = ScratchPath::Ring { is_registered };
        }
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The I/O method in use.
    pub fn path(&self) -> ScratchPath {
        self.path
    }

    /// Reads an extent. Data that was never written is zero.
    ///
    /// # Errors
    /// The disk failed, or returned other bytes than were written.
    ///
    /// # Safety
    /// The range of `bytes` from `offset` is one of the extents. `to` is aligned to 4096 bytes and
    /// has room for them. Nothing else accesses that memory until this returns. Only one thread at
    /// a time reads.
    pub unsafe fn read(&self, offset: u64, to: *mut u8, bytes: usize) -> Result<(), ScratchError> {
        let pieces = self.pieces.touching(offset..offset + bytes as u64);
        // SAFETY: the caller's promise.
        unsafe { self.reads.transfer(pieces, Memory { offset, address: to as usize }) }
    }

    /// Writes an extent.
    ///
    /// # Errors
    /// The disk failed.
    ///
    /// # Safety
    /// As [`ScratchStore::read`], except that others may read `from`. Only one thread at a time
    /// writes.
    pub unsafe fn write(
        &self,
        offset: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), ScratchError> {
        let pieces = self.pieces.touching(offset..offset + bytes as u64);
        // SAFETY: the caller's promise. Writing does not change the memory.
        unsafe { self.writes.transfer(pieces, Memory { offset, address: from as usize }) }
    }

    /// Reads any range, while nothing else is being transferred.
    ///
    /// # Errors
    /// As [`ScratchStore::read`].
    pub fn read_bytes(&self, offset: u64, to: &mut [u8]) -> Result<(), ScratchError> {
        // Each piece, the offset of its first wanted byte, and the destination.
        let mut parts: Vec<(usize, usize, &mut [u8])> = Vec::new();
        let (mut rest, mut next) = (to, offset);
        for index in self.pieces.touching(offset..offset + rest.len() as u64) {
            let piece = self.pieces.piece(index);
            let first = next.max(piece.offset);
            // Nothing is ever written between extents.
            let (gap, after) = rest.split_at_mut((first - next) as usize);
            gap.fill(0);
            let at = (first - piece.offset) as usize;
            let (part, after) = after.split_at_mut((piece.bytes - at).min(after.len()));
            next = first + part.len() as u64;
            parts.push((index, at, part));
            rest = after;
        }
        rest.fill(0);
        let read = |parts: Vec<(usize, usize, &mut [u8])>| {
            let mut buffer = PageBuffer::new(0);
            for (index, at, part) in parts {
                let bytes = self.pieces.piece(index).bytes;
                if buffer.len() < bytes {
                    buffer = PageBuffer::new(bytes);
                }
                let piece = &mut buffer.as_mut_slice()[..bytes];
                self.pieces.read(index, piece)?;
                part.copy_from_slice(&piece[at..at + part.len()]);
            }
            Ok(())
        };
        let share = parts.len().div_ceil(HOST_THREADS).max(1);
        let mut shares: Vec<Vec<_>> = Vec::new();
        let mut left = parts.into_iter().peekable();
        while left.peek().is_some() {
            shares.push(left.by_ref().take(share).collect());
        }
        std::thread::scope(|scope| {
            let mut others = Vec::new();
            let mine = shares.pop();
            for share in shares {
                let thread = std::thread::Builder::new().spawn_scoped(scope, || read(share));
                others.push(thread.map_err(ScratchError::Thread)?);
            }
            let mut result = mine.map_or(Ok(()), read);
            for thread in others {
                let theirs = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                result = result.and(theirs);
            }
            result
        })
    }

    /// Writes any range, while nothing else is being transferred. Bytes outside of all extents are
    /// dropped.
    ///
    /// # Errors
    /// As [`ScratchStore::read`].
    pub fn write_bytes(&self, offset: u64, from: &[u8]) -> Result<(), ScratchError> {
        let end = offset + from.len() as u64;
        let mut buffer = PageBuffer::new(0);
        for index in self.pieces.touching(offset..end) {
            let piece = self.pieces.piece(index);
            if buffer.len() < piece.bytes {
                buffer = PageBuffer::new(piece.bytes);
            }
            let memory = &mut buffer.as_mut_slice()[..piece.bytes];
            let piece_end = piece.offset + piece.bytes as u64;
            let (first, last) = (offset.max(piece.offset), end.min(piece_end));
            if (first, last) != (piece.offset, piece_end) {
                self.pieces.read(index, memory)?;
            }
            let inside = (first - piece.offset) as usize..(last - piece.offset) as usize;
            memory[inside]
                .copy_from_slice(&from[(first - offset) as usize..(last - offset) as usize]);
            self.pieces.write(index, memory)?;
        }
        Ok(())
    }
}

/// Rings for reading and for writing. `None` if the system refuses io_uring.
fn rings(pieces: &Arc<Pieces>) -> Option<(RingLane, RingLane)> {
    let reads = RingLane::new(pieces, ScratchAccess::Read).ok()?;
    let writes = RingLane::new(pieces, ScratchAccess::Write).ok()?;
    Some((reads, writes))
}
