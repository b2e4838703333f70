//! The layout of a shard of records.
//!
//! A header of [`PAGE_BYTES`], then blocks, each padded with zeros to a multiple of [`PAGE_BYTES`],
//! and at the end the index with an entry of [`ENTRY_BYTES`] per block. A block holds whole
//! records. Where their sizes vary, it begins with the offset of each record as `u32`. All numbers
//! are little-endian.

use super::codec::Codec;
use super::column::{RECORD_BYTES_MAX, RecordLayout};

/// Alignment of direct reads.
pub const PAGE_BYTES: usize = 4096;
/// Target size of a block.
pub const BLOCK_BYTES: usize = 256 << 10;
/// Size limit of a block, unless a single record is larger.
const BLOCK_BYTES_MAX: u64 = 1 << 20;
/// Limit on blocks of a shard. Bounds the memory of its index.
pub(super) const SHARD_BLOCKS_MAX: u64 = 1 << 20;
pub(super) const ENTRY_BYTES: usize = 32;

const MAGIC: [u8; 8] = *b"STORMSHD";
const VERSION: u32 = 2;
const KIND_RECORDS: u32 = 2;
/// Offset of the header's own checksum.
const CHECKSUM_AT: usize = PAGE_BYTES - 4;

/// The contents of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) records: u64,
    pub(super) blocks: u64,
    /// Offset of the index.
    pub(super) index_at: u64,
    /// CRC-32 of the index.
    pub(super) index_checksum: u32,
}

impl Header {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(PAGE_BYTES);
        bytes.extend(MAGIC);
        for value in [VERSION, KIND_RECORDS] {
            bytes.extend(value.to_le_bytes());
        }
        for value in [self.records, self.blocks, self.index_at] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(self.index_checksum.to_le_bytes());
        bytes.resize(CHECKSUM_AT, 0);
        let checksum = crc32fast::hash(&bytes);
        bytes.extend(checksum.to_le_bytes());
        bytes
    }

    /// Parses a header of exactly [`PAGE_BYTES`].
    pub(super) fn parse(bytes: &[u8]) -> Result<Header, String> {
        if bytes.len() != PAGE_BYTES || bytes[..8] != MAGIC {
            return Err("not a shard".to_owned());
        }
        if u32_at(bytes, CHECKSUM_AT) != crc32fast::hash(&bytes[..CHECKSUM_AT]) {
            return Err("the header's checksum is wrong".to_owned());
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(format!("version {version} of the format, this program knows {VERSION}"));
        }
        if u32_at(bytes, 12) != KIND_RECORDS {
            return Err("not a shard of records".to_owned());
        }
        Ok(Header {
            records: u64_at(bytes, 16),
            blocks: u64_at(bytes, 24),
            index_at: u64_at(bytes, 32),
            index_checksum: u32_at(bytes, 40),
        })
    }

    /// The length of the file. `None` if it exceeds the limits.
    pub(super) fn file_bytes(&self) -> Option<u64> {
        if self.blocks > SHARD_BLOCKS_MAX {
            return None;
        }
        self.index_at.checked_add(self.blocks * ENTRY_BYTES as u64)
    }
}

/// A block's entry in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its offset, a multiple of [`PAGE_BYTES`].
    pub(super) at: u64,
    /// Bytes on disk, without padding.
    pub(super) stored_bytes: u32,
    /// Bytes after decompression.
    pub(super) raw_bytes: u32,
    pub(super) records: u32,
    pub(super) codec: Codec,
    /// CRC-32 of the bytes on disk.
    pub(super) checksum: u32,
}

impl Entry {
    pub(super) fn to_bytes(self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..8].copy_from_slice(&self.at.to_le_bytes());
        let numbers =
            [self.stored_bytes, self.raw_bytes, self.records, self.codec.code(), self.checksum];
        for (number, four) in numbers.iter().zip(bytes[8..].chunks_exact_mut(4)) {
            four.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Entry, String> {
        let codec = Codec::from_code(u32_at(bytes, 20)).ok_or("an unknown codec")?;
        Ok(Entry {
            at: u64_at(bytes, 0),
            stored_bytes: u32_at(bytes, 8),
            raw_bytes: u32_at(bytes, 12),
            records: u32_at(bytes, 16),
            codec,
            checksum: u32_at(bytes, 24),
        })
    }

    /// Bytes on disk, with padding.
    pub(super) fn padded_bytes(&self) -> u64 {
        u64::from(self.stored_bytes).next_multiple_of(PAGE_BYTES as u64)
    }

    /// Checks that the sizes are consistent with the records.
    fn check(&self, layout: &RecordLayout) -> Result<(), String> {
        let (raw, stored) = (u64::from(self.raw_bytes), u64::from(self.stored_bytes));
        let records = u64::from(self.records);
        let raw_max = match records {
            0 => return Err("it has no records".to_owned()),
            1 => BLOCK_BYTES_MAX.max(RECORD_BYTES_MAX + 8),
            _ => BLOCK_BYTES_MAX,
        };
        if raw > raw_max {
            return Err(format!("{raw} bytes are more than a block has"));
        }
        let record = layout.record_bytes_min() as u64;
        let fits = match layout.record_bytes() {
            Some(_) => raw == records * record,
            None => raw >= records * (record + 4),
        };
        let compressed = match self.codec {
            Codec::None => stored == raw,
            Codec::Zstd | Codec::Lz4 => stored > 0 && stored < raw,
        };
        match fits && compressed {
            true => Ok(()),
            false => Err("its sizes do not fit its records".to_owned()),
        }
    }
}

/// Parses the index, and checks that blocks are contiguous from the header to the index.
pub(super) fn parse_index(
    bytes: &[u8],
    header: &Header,
    layout: &RecordLayout,
) -> Result<Vec<Entry>, String> {
    if crc32fast::hash(bytes) != header.index_checksum {
        return Err("the checksum of its index is wrong".to_owned());
    }
    let (mut at, mut records) = (PAGE_BYTES as u64, 0);
    let mut entries = Vec::with_capacity(bytes.len() / ENTRY_BYTES);
    for (number, bytes) in bytes.chunks_exact(ENTRY_BYTES).enumerate() {
        let entry = Entry::parse(bytes).and_then(|entry| entry.check(layout).map(|()| entry));
        let entry = entry.map_err(|problem| format!("block {number} of its index: {problem}"))?;
        if entry.at != at {
            return Err(format!("block {number} of its index is out of place"));
        }
        at += entry.padded_bytes();
        records += u64::from(entry.records);
        entries.push(entry);
    }
    match (at, records) == (header.index_at, header.records) {
        true => Ok(entries),
        false => Err("its index is not what its header says".to_owned()),
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
