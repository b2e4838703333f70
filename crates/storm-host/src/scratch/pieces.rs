//! The pieces of a scratch file, each with the checksum of what was written to it.

use super::fault::{Faults, ScratchAccess, ScratchFaultKind};
use super::file::BLOCK_BYTES;
use super::{ScratchError, ScratchFault};
use crate::PageBuffer;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a single access transfers, at most.
const PIECE_BYTES_MAX: usize = 4 << 20;

/// Consecutive bytes that are always read and written together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) bytes: usize,
}

/// A file in pieces.
#[derive(Debug)]
pub(super) struct Pieces {
    file: File,
    /// In order.
    list: Vec<Piece>,
    /// By piece: 0 if nothing was written, else the checksum and a bit above it.
    sums: Vec<AtomicU64>,
    faults: Faults,
}

/// Above the 32 bits of a checksum.
const WRITTEN: u64 = 1 << 32;

fn checksum(bytes: &[u8]) -> u64 {
    WRITTEN | u64::from(crc32fast::hash(bytes))
}

impl Pieces {
    /// Divides extents of the file into pieces.
    ///
    /// # Panics
    /// If extents overlap, or are not whole blocks.
    pub(super) fn new(
        file: File,
        mut extents: Vec<Range<u64>>,
        fault: Option<ScratchFault>,
    ) -> Pieces {
        extents.sort_by_key(|extent| extent.start);
        extents.dedup();
        let mut list: Vec<Piece> = Vec::new();
        for extent in extents {
            let is_block = |at: u64| at.is_multiple_of(BLOCK_BYTES as u64);
            assert!(is_block(extent.start) && is_block(extent.end), "extents are whole blocks");
            let end = list.last().map_or(0, |piece| piece.offset + piece.bytes as u64);
            assert!(extent.start >= end, "extents do not overlap");
            let mut offset = extent.start;
            while offset < extent.end {
                let bytes = PIECE_BYTES_MAX.min((extent.end - offset) as usize);
                list.push(Piece { offset, bytes });
                offset += bytes as u64;
            }
        }
        let sums = list.iter().map(|_| AtomicU64::new(0)).collect();
        Pieces { file, list, sums, faults: Faults::new(fault) }
    }

    pub(super) fn piece(&self, index: usize) -> Piece {
        self.list[index]
    }

    /// The pieces that contain any of these bytes.
    pub(super) fn touching(&self, bytes: Range<u64>) -> Range<usize> {
        let end_of = |piece: &Piece| piece.offset + piece.bytes as u64;
        let first = self.list.partition_point(|piece| end_of(piece) <= bytes.start);
        let end = self.list.partition_point(|piece| piece.offset < bytes.end);
        first..end.max(first)
    }

    /// Reads a piece and compares its checksum. A piece that was never written is zero. If the checksum differs, it is
    /// read once more: the way from the disk may have been at fault.
    pub(super) fn read(&self, index: usize, to: &mut [u8]) -> Result<(), ScratchError> {
        let wanted = self.sums[index].load(Ordering::Acquire);
        if wanted == 0 {
            to.fill(0);
            return Ok(());
        }
        let Piece { offset, bytes } = self.list[index];
        for _ in 0..2 {
            self.transfer_in(offset, to).map_err(|error| ScratchError::Io {
                access: "reading",
                offset,
                bytes,
                error,
            })?;
            if checksum(to) == wanted {
                return Ok(());
            }
        }
        Err(ScratchError::Damaged { offset, bytes })
    }

    /// Writes a piece, and remembers its checksum.
    pub(super) fn write(&self, index: usize, from: &[u8]) -> Result<(), ScratchError> {
        let Piece { offset, bytes } = self.list[index];
        let sum = checksum(from);
        self.transfer_out(offset, from).map_err(|error| ScratchError::Io {
            access: "writing",
            offset,
            bytes,
            error,
        })?;
        self.sums[index].store(sum, Ordering::Release);
        Ok(())
    }

    fn transfer_in(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let fault = self.faults.next(ScratchAccess::Read);
        let mut done = 0;
        while done < to.len() {
            let end = end_of_access(done, to.len(), fault)?;
            done += progress(self.file.read_at(&mut to[done..end], offset + done as u64))?;
        }
        if fault == Some(ScratchFaultKind::Damage) {
            to[0] ^= 1;
        }
        Ok(())
    }

    fn transfer_out(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let fault = self.faults.next(ScratchAccess::Write);
        let mut done = 0;
        while done < from.len() {
            let end = end_of_access(done, from.len(), fault)?;
            done += progress(self.file.write_at(&from[done..end], offset + done as u64))?;
        }
        if fault == Some(ScratchFaultKind::Damage) {
            let mut block = PageBuffer::new(BLOCK_BYTES);
            block.as_mut_slice().copy_from_slice(&from[..BLOCK_BYTES]);
            block.as_mut_slice()[0] ^= 1;
            self.file.write_at(block.as_slice(), offset)?;
        }
        Ok(())
    }
}

/// How far the next access is to go; less far than possible if it is to be short.
fn end_of_access(done: usize, end: usize, fault: Option<ScratchFaultKind>) -> io::Result<usize> {
    match fault {
        Some(ScratchFaultKind::Error) => Err(io::Error::from_raw_os_error(libc::EIO)),
        Some(ScratchFaultKind::Short) if done == 0 => {
            Ok((end / 2).next_multiple_of(BLOCK_BYTES).min(end))
        }
        _ => Ok(end),
    }
}

/// How much of an access counts: whole blocks, since the next one must begin at a block.
fn progress(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Ok(count) if count >= BLOCK_BYTES => Ok(count / BLOCK_BYTES * BLOCK_BYTES),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        Err(error) => Err(error),
    }
}
