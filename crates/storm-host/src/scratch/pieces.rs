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

    /// Reads a piece, as [`Pieces::begin`] says.
    pub(super) fn read(&self, index: usize, to: &mut [u8]) -> Result<(), ScratchError> {
        let Some(mut transfer) = self.begin(ScratchAccess::Read, index) else {
            to.fill(0);
            return Ok(());
        };
        loop {
            let part = self.part(&transfer)?;
            let at = self.list[index].offset + part.start as u64;
            let result = self.file.read_at(&mut to[part], at);
            if self.advance(&mut transfer, result)? && self.finish_read(&mut transfer, to)? {
                return Ok(());
            }
        }
    }

    /// Writes a piece, and remembers its checksum.
    pub(super) fn write(&self, index: usize, from: &[u8]) -> Result<(), ScratchError> {
        let mut transfer = Transfer::new(ScratchAccess::Write, index, &self.faults);
        loop {
            let part = self.part(&transfer)?;
            let at = self.list[index].offset + part.start as u64;
            let result = self.file.write_at(&from[part], at);
            if self.advance(&mut transfer, result)? {
                return self.finish_write(&transfer, from);
            }
        }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Begins the transfer of a piece; none if nothing was written to a piece that is to be read: it is zero.
    pub(super) fn begin(&self, access: ScratchAccess, index: usize) -> Option<Transfer> {
        let is_blank =
            access == ScratchAccess::Read && self.sums[index].load(Ordering::Acquire) == 0;
        (!is_blank).then(|| Transfer::new(access, index, &self.faults))
    }

    /// Which bytes of the piece are next.
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

    /// Counts what an access has transferred, in whole blocks, since the next one must begin at a block. Says whether
    /// the piece is complete.
    pub(super) fn advance(
        &self,
        transfer: &mut Transfer,
        result: io::Result<usize>,
    ) -> Result<bool, ScratchError> {
        match result {
            Ok(count) if count >= BLOCK_BYTES => {
                transfer.done += count / BLOCK_BYTES * BLOCK_BYTES;
            }
            Ok(_) => {
                return Err(self.failed(transfer, io::ErrorKind::UnexpectedEof.into()));
            }
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(self.failed(transfer, error)),
        }
        Ok(transfer.done >= self.list[transfer.index].bytes)
    }

    /// Compares the checksum of a piece that was read. If it differs, the piece must be read once more, which the
    /// transfer then does: the way from the disk may have been at fault.
    pub(super) fn finish_read(
        &self,
        transfer: &mut Transfer,
        to: &mut [u8],
    ) -> Result<bool, ScratchError> {
        if transfer.fault == Some(ScratchFaultKind::Damage) {
            to[0] ^= 1;
        }
        let index = transfer.index;
        if checksum(to) == self.sums[index].load(Ordering::Acquire) {
            return Ok(true);
        }
        if transfer.is_repeated {
            let Piece { offset, bytes } = self.list[index];
            return Err(ScratchError::Damaged { offset, bytes });
        }
        *transfer = Transfer::new(ScratchAccess::Read, index, &self.faults);
        transfer.is_repeated = true;
        Ok(false)
    }

    /// Remembers the checksum of a piece that was written.
    pub(super) fn finish_write(
        &self,
        transfer: &Transfer,
        from: &[u8],
    ) -> Result<(), ScratchError> {
        let index = transfer.index;
        if transfer.fault == Some(ScratchFaultKind::Damage) {
            let mut block = PageBuffer::new(BLOCK_BYTES);
            block.as_mut_slice().copy_from_slice(&from[..BLOCK_BYTES]);
            block.as_mut_slice()[0] ^= 1;
            let written = self.file.write_at(block.as_slice(), self.list[index].offset);
            written.map_err(|error| self.failed(transfer, error))?;
        }
        self.sums[index].store(checksum(from), Ordering::Release);
        Ok(())
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

/// A piece on its way.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) index: usize,
    access: ScratchAccess,
    /// Bytes that are there, in whole blocks.
    done: usize,
    /// What goes wrong with it.
    fault: Option<ScratchFaultKind>,
    /// Whether it was read before, and its checksum differed.
    is_repeated: bool,
}

impl Transfer {
    fn new(access: ScratchAccess, index: usize, faults: &Faults) -> Transfer {
        Transfer { index, access, done: 0, fault: faults.next(access), is_repeated: false }
    }
}

/// Whether the same access may work next time.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}
