//! Reads a shard, whose bytes are untrusted.

use super::layout::{BLOCK_BYTES, HEADER_BYTES, Header, Layout, TokenWidth};
use crate::{DataError, Kind, ShardInfo};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use storm_host::{Access, MappedFile};

/// Index entries read at a time.
const INDEX_CHUNK: usize = 8192;

/// Bytes read and hashed at a time.
const CHECK_CHUNK: usize = 16 << 10;

/// A shard whose header, sizes and index have been checked. Other blocks are verified when first
/// read.
#[derive(Debug)]
pub(crate) struct Shard {
    file: MappedFile,
    header: Header,
    layout: Layout,
    blocks: Vec<Block>,
}

/// A block of [`BLOCK_BYTES`].
#[derive(Debug)]
struct Block {
    checksum: u32,
    /// Whether its bytes were verified.
    is_checked: AtomicBool,
}

impl Shard {
    /// Maps a shard and checks it against its entry in the manifest.
    pub(crate) fn open(
        path: &Path,
        kind: Kind,
        vocabulary: u32,
        info: &ShardInfo,
    ) -> Result<Shard, DataError> {
        let damaged = |problem: &str| DataError::damaged(path, problem);
        let file = MappedFile::open(path)?;
        if file.length() < HEADER_BYTES {
            return Err(damaged("too short for a shard"));
        }
        let mut bytes = vec![0; HEADER_BYTES as usize];
        file.read(0, &mut bytes)?;
        let header = Header::parse(&bytes).map_err(|problem| damaged(&problem))?;
        let layout = header.layout().filter(|layout| layout.file_bytes == file.length());
        let layout = layout.ok_or_else(|| damaged("its length is not what its header says"))?;
        let expected = Header {
            kind,
            width: TokenWidth::for_vocabulary(vocabulary),
            vocabulary,
            token_count: info.tokens,
            sample_count: info.samples,
        };
        if header != expected || layout.file_bytes != info.bytes {
            return Err(damaged("it is not the shard that the manifest describes"));
        }
        let mut shard = Shard { file, header, layout, blocks: Vec::new() };
        let (checksums, own) = shard.read_checksums()?;
        if own != info.checksum {
            return Err(damaged("its checksums are not those that the manifest describes"));
        }
        let block = |checksum| Block { checksum, is_checked: AtomicBool::new(false) };
        shard.blocks = checksums.into_iter().map(block).collect();
        shard.check_index()?;
        shard.file.advise(Access::Random);
        Ok(shard)
    }

    pub(crate) fn token_count(&self) -> u64 {
        self.header.token_count
    }

    pub(crate) fn sample_count(&self) -> u64 {
        self.header.sample_count
    }

    /// Copies token ids. `bytes` is a buffer for their stored form.
    pub(crate) fn read_tokens(
        &self,
        start: u64,
        dest: &mut [i32],
        bytes: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        let width = self.header.width.bytes();
        bytes.resize(dest.len() * width as usize, 0);
        self.read_checked(HEADER_BYTES + start * width, bytes)?;
        self.header
            .width
            .decode(bytes, self.header.vocabulary, dest)
            .map_err(|problem| DataError::damaged(self.file.path(), problem))
    }

    /// Copies loss masks, for samples only. `bytes` is a buffer for their stored form.
    pub(crate) fn read_mask(
        &self,
        start: u64,
        dest: &mut [bool],
        bytes: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        let (first, end) = (start / 8, (start + dest.len() as u64).div_ceil(8));
        bytes.resize((end - first) as usize, 0);
        self.read_checked(self.layout.mask_at + first, bytes)?;
        for (at, learned) in ((start % 8) as usize..).zip(dest) {
            *learned = bytes[at / 8] >> (at % 8) & 1 == 1;
        }
        Ok(())
    }

    /// Asks the system to prefetch tokens.
    pub(crate) fn will_need(&self, start: u64, count: u64) {
        let width = self.header.width.bytes();
        self.file.will_need(HEADER_BYTES + start * width, count * width);
    }

    /// First tokens of `dest.len()` documents or samples, starting at number `first`.
    pub(crate) fn read_index(&self, first: u64, dest: &mut [u64]) -> Result<(), DataError> {
        let mut bytes = [0; 8 * 64];
        for (chunk, at) in dest.chunks_mut(64).zip((first..).step_by(64)) {
            let bytes = &mut bytes[..8 * chunk.len()];
            self.read_checked(self.layout.index_at + 8 * at, bytes)?;
            for (start, eight) in chunk.iter_mut().zip(bytes.as_chunks().0) {
                *start = u64::from_le_bytes(*eight);
            }
        }
        Ok(())
    }

    /// Checks that every document starts after the previous one and inside the shard.
    fn check_index(&self) -> Result<(), DataError> {
        let damaged = |problem: &str| DataError::damaged(self.file.path(), problem);
        let mut starts = vec![0; INDEX_CHUNK.min(self.header.sample_count as usize)];
        let mut last = None;
        for first in (0..self.header.sample_count).step_by(INDEX_CHUNK) {
            let count = (self.header.sample_count - first).min(INDEX_CHUNK as u64);
            let starts = &mut starts[..count as usize];
            self.read_index(first, starts)?;
            for &start in starts.iter() {
                if last.is_some_and(|last| start <= last) || start >= self.header.token_count {
                    return Err(damaged("its index is out of order"));
                }
                last = Some(start);
            }
            // A sample never crosses shards.
            if first == 0 && self.header.kind == Kind::Samples && starts[0] != 0 {
                return Err(damaged("its index does not begin at the first token"));
            }
        }
        Ok(())
    }

    /// The checksum table, and its own checksum.
    fn read_checksums(&self) -> Result<(Vec<u32>, u32), DataError> {
        let table_bytes = (self.layout.file_bytes - self.layout.table_at) as usize;
        let mut bytes = vec![0; table_bytes];
        self.file.read(self.layout.table_at, &mut bytes)?;
        let own = crc32fast::hash(&bytes[..table_bytes - 4]);
        let mut table: Vec<u32> =
            bytes.as_chunks().0.iter().map(|four| u32::from_le_bytes(*four)).collect();
        if table.pop() != Some(own) {
            let problem = "the checksum of its checksums is wrong";
            return Err(DataError::damaged(self.file.path(), problem));
        }
        Ok((table, own))
    }

    /// Bytes that have a checksum in the table.
    pub(crate) fn verified_bytes(&self) -> u64 {
        self.layout.table_at - HEADER_BYTES
    }

    /// Reads and verifies all blocks of the shard. Calls `done` with the bytes of each.
    pub(crate) fn verify(&self, done: &(dyn Fn(u64) + Sync)) -> Result<(), DataError> {
        use rayon::prelude::*;
        (0..self.blocks.len()).into_par_iter().try_for_each(|block| {
            done(self.check_block(block)?);
            Ok(())
        })
    }

    /// Copies bytes between header and table. Verifies blocks that were not verified before.
    fn read_checked(&self, at: u64, dest: &mut [u8]) -> Result<(), DataError> {
        let Some(last) = (at - HEADER_BYTES + dest.len() as u64).checked_sub(1) else {
            return Ok(());
        };
        let first = (at - HEADER_BYTES) / BLOCK_BYTES;
        for block in first as usize..=(last / BLOCK_BYTES) as usize {
            if !self.blocks[block].is_checked.load(Ordering::Relaxed) {
                self.check_block(block)?;
            }
        }
        Ok(self.file.read(at, dest)?)
    }

    /// Verifies the checksum of a block, and returns its length in bytes.
    fn check_block(&self, block: usize) -> Result<u64, DataError> {
        let start = HEADER_BYTES + block as u64 * BLOCK_BYTES;
        let end = (start + BLOCK_BYTES).min(self.layout.table_at);
        // On the stack, so that loading does not allocate.
        let mut bytes = [0; CHECK_CHUNK];
        let mut hasher = crc32fast::Hasher::new();
        for at in (start..end).step_by(CHECK_CHUNK) {
            let bytes = &mut bytes[..CHECK_CHUNK.min((end - at) as usize)];
            self.file.read(at, bytes)?;
            hasher.update(bytes);
        }
        let Block { checksum, is_checked } = &self.blocks[block];
        if hasher.finalize() != *checksum {
            let problem = format!("bytes {start}..{end} do not match their checksum");
            return Err(DataError::damaged(self.file.path(), problem));
        }
        is_checked.store(true, Ordering::Relaxed);
        Ok(end - start)
    }
}
