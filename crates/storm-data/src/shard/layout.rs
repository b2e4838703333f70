//! The layout of a shard of version 1, used by text datasets before they had blocks.
//!
//! A header of [`HEADER_BYTES`], followed by sections, each zero-padded to a multiple of eight
//! bytes:
//! - the token ids
//! - the index: a `u64` per document or sample that starts in this shard, the position of its first
//!   token
//! - for samples, the loss mask: one bit per token, lowest bit first
//!
//! At the end come a table with the CRC-32 of each [`BLOCK_BYTES`] between header and table, as
//! `u32`, and the CRC-32 of that table. All numbers are little-endian.

use crate::Kind;

pub(crate) const HEADER_BYTES: u64 = 4096;
pub(crate) const BLOCK_BYTES: u64 = 1 << 20;

/// Size limit of a shard. Bounds the memory of its checksum table.
const SHARD_BYTES_MAX: u64 = 1 << 40;

const MAGIC: [u8; 8] = *b"STORMSHD";
const VERSION: u32 = 1;
/// Offset of the header's own checksum.
const CHECKSUM_AT: usize = HEADER_BYTES as usize - 4;

/// Bytes per token id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenWidth {
    Two,
    Four,
}

impl TokenWidth {
    /// The smallest width for ids below `vocabulary`.
    pub(crate) fn for_vocabulary(vocabulary: u32) -> TokenWidth {
        if vocabulary <= 1 << 16 { TokenWidth::Two } else { TokenWidth::Four }
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            TokenWidth::Two => 2,
            TokenWidth::Four => 4,
        }
    }

    /// Appends the stored form of ids.
    pub(crate) fn encode(self, tokens: &[u32], out: &mut Vec<u8>) {
        match self {
            TokenWidth::Two => {
                out.extend(tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()));
            }
            TokenWidth::Four => out.extend(tokens.iter().flat_map(|&token| token.to_le_bytes())),
        }
    }

    /// Fills `dest` with ids from their stored form. All must be below `vocabulary`.
    pub(crate) fn decode(
        self,
        bytes: &[u8],
        vocabulary: u32,
        dest: &mut [i32],
    ) -> Result<(), String> {
        let mut largest = 0;
        match self {
            TokenWidth::Two => {
                for (token, pair) in dest.iter_mut().zip(bytes.as_chunks().0) {
                    let id = u32::from(u16::from_le_bytes(*pair));
                    largest = largest.max(id);
                    *token = id as i32;
                }
            }
            TokenWidth::Four => {
                for (token, four) in dest.iter_mut().zip(bytes.as_chunks().0) {
                    let id = u32::from_le_bytes(*four);
                    largest = largest.max(id);
                    *token = id as i32;
                }
            }
        }
        match largest < vocabulary || dest.is_empty() {
            true => Ok(()),
            false => Err(format!("has token {largest}, but the vocabulary ends at {vocabulary}")),
        }
    }
}

/// The contents of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) width: TokenWidth,
    /// All ids are below this.
    pub(crate) vocabulary: u32,
    pub(crate) token_count: u64,
    /// Documents or samples that start in this shard.
    pub(crate) sample_count: u64,
}

/// Offsets in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) index_at: u64,
    pub(crate) mask_at: u64,
    pub(crate) table_at: u64,
    pub(crate) file_bytes: u64,
}

impl Header {
    /// Parses a header of exactly [`HEADER_BYTES`].
    pub(crate) fn parse(bytes: &[u8]) -> Result<Header, String> {
        if bytes.len() != HEADER_BYTES as usize || bytes[..8] != MAGIC {
            return Err("not a shard".to_owned());
        }
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if u32_at(CHECKSUM_AT) != crc32fast::hash(&bytes[..CHECKSUM_AT]) {
            return Err("the header's checksum is wrong".to_owned());
        }
        let version = u32_at(8);
        if version != VERSION {
            return Err(format!("version {version} of the format, this program knows {VERSION}"));
        }
        let kind = [Kind::Text, Kind::Samples].into_iter().find(|&k| kind_code(k) == u32_at(12));
        let width = [TokenWidth::Two, TokenWidth::Four]
            .into_iter()
            .find(|w| w.bytes() as u32 == u32_at(16));
        let (Some(kind), Some(width)) = (kind, width) else {
            return Err("unknown kind or width of tokens".to_owned());
        };
        let (vocabulary, token_count, sample_count) = (u32_at(20), u64_at(24), u64_at(32));
        Ok(Header { kind, width, vocabulary, token_count, sample_count })
    }

    /// The offsets. `None` if the counts exceed any possible file.
    pub(crate) fn layout(&self) -> Option<Layout> {
        let padded = |bytes: u64| bytes.checked_next_multiple_of(8);
        let tokens = padded(self.token_count.checked_mul(self.width.bytes())?)?;
        let index_at = HEADER_BYTES.checked_add(tokens)?;
        let mask_at = index_at.checked_add(self.sample_count.checked_mul(8)?)?;
        let mask = match self.kind {
            Kind::Text => 0,
            Kind::Samples => padded(self.token_count.div_ceil(8))?,
        };
        let table_at = mask_at.checked_add(mask)?;
        let blocks = (table_at - HEADER_BYTES).div_ceil(BLOCK_BYTES);
        let file_bytes = table_at.checked_add(blocks.checked_add(1)?.checked_mul(4)?)?;
        let layout = Layout { index_at, mask_at, table_at, file_bytes };
        (file_bytes <= SHARD_BYTES_MAX).then_some(layout)
    }
}

fn kind_code(kind: Kind) -> u32 {
    match kind {
        Kind::Text => 0,
        Kind::Samples => 1,
    }
}
