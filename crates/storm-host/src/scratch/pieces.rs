//! The pieces of a scratch file, each with the checksum of its data.

use super::fault::{Faults, ScratchAccess, ScratchFaultKind};
use super::file::BLOCK_BYTES;
use super::{ScratchError, ScratchFault};
use crate::PageBuffer;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum bytes of a single access.
const PIECE_BYTES_MAX: usize = 4 << 20;

/// Consecutive bytes that are always read or written together.
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
    /// Per piece: 0 if nothing was written, otherwise the checksum with [`WRITTEN`] set.
    sums: Vec<AtomicU64>,
    faults: Faults,
}

/// A bit above the 32 bits of a checksum.
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

    /// Reads a piece. A piece that was never written is zero.
    pub(super) fn read(&self, index: usize, to: &mut [u8]) -> Result<(), ScratchError> {
        match self.begin(ScratchAccess::Read, index) {
            Some(transfer) => self.complete_read(transfer, to),
            None => {
                to.fill(0);
                Ok(())
            }
        }
    }

    /// Writes a piece, and records its checksum.
    pub(super) fn write(&self, index: usize, from: &[u8]) -> Result<(), ScratchError> {
        self.complete_write(Transfer::new(ScratchAccess::Write, index, &self.faults), from)
    }

    /// Reads the rest of a piece, and verifies its checksum. On a mismatch it reads the piece once
    /// more, because the transfer from the disk may have been at fault.
    pub(super) fn complete_read(
        &self,
        mut transfer: Transfer,
        to: &mut [u8],
    ) -> Result<(), ScratchError> {
        let index = transfer.index;
        for is_last in [false, true] {
            while !self.is_complete(&transfer) {
                let part = self.part(&transfer)?;
                let at = self.list[index].offset + part.start as u64;
                let result = self.file.read_at(&mut to[part], at);
                self.advance(&mut transfer, result)?;
            }
            if transfer.fault == Some(ScratchFaultKind::Damage) {
                to[0] ^= 1;
            }
            if checksum(to) == self.sums[index].load(Ordering::Acquire) {
                break;
            }
            if is_last {
                let Piece { offset, bytes } = self.list[index];
                return Err(ScratchError::Damaged { offset, bytes });
            }
            transfer = Transfer::new(ScratchAccess::Read, index, &self.faults);
        }
        Ok(())
    }

    /// Writes the rest of a piece, and records its checksum.
    pub(super) fn complete_write(
        &self,
        mut transfer: Transfer,
        from: &[u8],
    ) -> Result<(), ScratchError> {
        let index = transfer.index;
        while !self.is_complete(&transfer) {
            let part = self.part(&transfer)?;
            let at = self.list[index].offset + part.start as u64;
            let result = self.file.write_at(&from[part], at);
            self.advance(&mut transfer, result)?;
        }
        self.written(&transfer, from)?;
        self.remember(index, from);
        Ok(())
    }

    /// Records the checksum that a piece will have once it is written. If the write fails, the
    /// piece counts as damaged.
    pub(super) fn remember(&self, index: usize, from: &[u8]) {
        self.sums[index].store(checksum(from), Ordering::Release);
    }

    /// Corrupts a completed write if a fault asks for it.
    pub(super) fn written(&self, transfer: &Transfer, from: &[u8]) -> Result<(), ScratchError> {
        if transfer.fault != Some(ScratchFaultKind::Damage) {
            return Ok(());
        }
        let mut block = PageBuffer::new(BLOCK_BYTES);
        block.as_mut_slice().copy_from_slice(&from[..BLOCK_BYTES]);
        block.as_mut_slice()[0] ^= 1;
        let written = self.file.write_at(block.as_slice(), self.list[transfer.index].offset);
        written.map(|_| ()).map_err(|error| self.failed(transfer, error))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Begins the transfer of a piece. Returns `None` for a read of a piece that was never written,
    /// which is zero.
    pub(super) fn begin(&self, access: ScratchAccess, index: usize) -> Option<Transfer> {
        let is_blank =
            access == ScratchAccess::Read && self.sums[index].load(Ordering::Acquire) == 0;
        (!is_blank).then(|| Transfer::new(access, index, &self.faults))
    }

    /// The bytes of the piece to transfer next.
    pub(super) fn part(&self, transfer: &Transfer) -> Result<Range<usize>, ScratchError> {
        let &Transfer { index, done, fault, .. } = transfer;
        let bytes = self.list[index].bytes;
        let end = match fault {
            Some(ScratchFaultKind::Error) => return Err(self.refused(transfer, libc::EIO)),
            Some(ScratchFaultKind::Full) => return Err(self.refused(transfer, libc::ENOSPC)),
            Some(ScratchFaultKind::Short) if done == 0 => {
                (bytes / 2).next_multiple_of(BLOCK_BYTES).min(bytes)
            }
            _ => bytes,
        };
        Ok(done..end)
    }

    /// Adds what an access transferred, in whole blocks, because the next access must begin at a
    /// block.
    pub(super) fn advance(
        &self,
        transfer: &mut Transfer,
        result: io::Result<usize>,
    ) -> Result<(), ScratchError> {
        match result {
            Ok(count) if count >= BLOCK_BYTES => {
                transfer.done += count / BLOCK_BYTES * BLOCK_BYTES;
                Ok(())
            }
            Ok(_) => Err(self.failed(transfer, io::ErrorKind::UnexpectedEof.into())),
            Err(error) if is_passing(&error) => Ok(()),
            Err(error) => Err(self.failed(transfer, error)),
        }
    }

    /// Whether all bytes of the piece are transferred.
    pub(super) fn is_complete(&self, transfer: &Transfer) -> bool {
        transfer.done >= self.list[transfer.index].bytes
    }

    fn refused(&self, transfer: &Transfer, code: i32) -> ScratchError {
        self.failed(transfer, io::Error::from_raw_os_error(code))
    }

    fn failed(&self, transfer: &Transfer, error: io::Error) -> ScratchError {
        let Piece { offset, bytes } = self.list[transfer.index];
        match (transfer.access, error.raw_os_error()) {
            (ScratchAccess::Write, Some(libc::ENOSPC | libc::EDQUOT)) => {
                ScratchError::Filled { offset, bytes }
            }
            (ScratchAccess::Write, _) => {
                ScratchError::Io { access: "writing", offset, bytes, error }
            }
            (ScratchAccess::Read, _) => {
                ScratchError::Io { access: "reading", offset, bytes, error }
            }
        }
    }
}

/// A piece in transfer.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) index: usize,
    pub(super) access: ScratchAccess,
    /// Bytes transferred, in whole blocks.
    done: usize,
    /// The injected fault.
    fault: Option<ScratchFaultKind>,
}

impl Transfer {
    fn new(access: ScratchAccess, index: usize, faults: &Faults) -> Transfer {
        Transfer { index, access, done: 0, fault: faults.next(access) }
    }

    /// Whether to refuse io_uring from now on.
    pub(super) fn ends_ring(&self) -> bool {
        self.fault == Some(ScratchFaultKind::NoRing)
    }
}

/// The memory of consecutive pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// Offset of the first byte in the file.
    pub(super) offset: u64,
    /// Address of the first byte.
    pub(super) address: usize,
}

impl Memory {
    /// The address of a byte of the file.
    pub(super) fn address(self, at: u64) -> usize {
        self.address + (at - self.offset) as usize
    }

    /// The memory of a piece.
    ///
    /// # Safety
    /// It is valid, and nothing writes it during the lifetime.
    pub(super) unsafe fn of<'a>(self, piece: Piece) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address(piece.offset) as *const u8, piece.bytes) }
    }

    /// The memory of a piece.
    ///
    /// # Safety
    /// It is valid, and nothing else accesses it during the lifetime.
    pub(super) unsafe fn of_mut<'a>(self, piece: Piece) -> &'a mut [u8] {
        let start = self.address(piece.offset) as *mut u8;
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, piece.bytes) }
    }
}

/// Whether the error is transient.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    /// Only whole blocks count, because the next access must begin at a block. No progress is an
    /// error, and so is any error that is not transient.
    #[test]
    fn what_an_access_transferred_is_counted_in_blocks() {
        let file = File::open("/dev/null").expect("a file");
        let whole = 0..3 * BLOCK_BYTES as u64;
        let pieces = Pieces::new(file, Vec::from([whole]), None);
        let mut transfer = pieces.begin(ScratchAccess::Write, 0).expect("something to write");
        let mut after = |result: io::Result<usize>| {
            pieces.advance(&mut transfer, result)?;
            let next = pieces.part(&transfer)?;
            Ok::<_, ScratchError>((next.start / BLOCK_BYTES, pieces.is_complete(&transfer)))
        };
        assert_eq!(after(Err(ErrorKind::Interrupted.into())).unwrap(), (0, false));
        assert_eq!(after(Err(ErrorKind::WouldBlock.into())).unwrap(), (0, false));
        assert_eq!(after(Ok(BLOCK_BYTES + 100)).unwrap(), (1, false));
        assert_eq!(after(Ok(2 * BLOCK_BYTES - 1)).unwrap(), (2, false));
        for result in [Ok(BLOCK_BYTES - 1), Ok(0), Err(io::Error::from_raw_os_error(libc::EIO))] {
            let error = after(result).expect_err("no progress");
            assert!(matches!(error, ScratchError::Io { access: "writing", .. }), "{error}");
        }
        let quota = after(Err(io::Error::from_raw_os_error(libc::EDQUOT)));
        assert!(matches!(quota, Err(ScratchError::Filled { .. })));
        assert_eq!(after(Ok(BLOCK_BYTES)).unwrap(), (3, true));
    }
}
