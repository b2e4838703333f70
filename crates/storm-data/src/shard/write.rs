//! Writes a shard, front to back.

use super::layout::{BLOCK_BYTES, HEADER_BYTES, Header, TokenWidth};
use crate::{DataError, Kind, ShardInfo};
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Numbers that are turned into bytes at a time.
const NUMBERS_AT_ONCE: usize = 1 << 16;

/// A shard being written. Tokens go to disk as they arrive; index and mask follow at the end.
pub(crate) struct ShardWriter {
    path: PathBuf,
    file: Checksummed<BufWriter<File>>,
    header: Header,
    index: Vec<u64>,
    mask: Vec<u8>,
}

impl ShardWriter {
    pub(crate) fn create(
        path: &Path,
        kind: Kind,
        vocabulary: u32,
    ) -> Result<ShardWriter, DataError> {
        let width = TokenWidth::for_vocabulary(vocabulary);
        let header = Header { kind, width, vocabulary, token_count: 0, sample_count: 0 };
        let io = DataError::io(path);
        let mut file = BufWriter::new(File::create_new(path).map_err(&io)?);
        // The header is written at the end.
        file.write_all(&[0; HEADER_BYTES as usize]).map_err(&io)?;
        let file = Checksummed::new(file);
        Ok(ShardWriter { path: path.to_owned(), file, header, index: Vec::new(), mask: Vec::new() })
    }

    pub(crate) fn token_count(&self) -> u64 {
        self.header.token_count
    }

    /// Documents or samples that start in it so far.
    pub(crate) fn sample_count(&self) -> usize {
        self.index.len()
    }

    /// The next token is the first of a document or sample.
    pub(crate) fn begin(&mut self) {
        self.index.push(self.header.token_count);
    }

    /// Adds tokens. For samples, `learned` says for each whether it is a target; otherwise it is
    /// ignored.
    pub(crate) fn push(&mut self, tokens: &[u32], learned: &[bool]) -> Result<(), DataError> {
        for tokens in tokens.chunks(NUMBERS_AT_ONCE) {
            let bytes: Vec<u8> = match self.header.width {
                TokenWidth::Two => {
                    tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()).collect()
                }
                TokenWidth::Four => tokens.iter().flat_map(|&token| token.to_le_bytes()).collect(),
            };
            self.file.write(&bytes).map_err(DataError::io(&self.path))?;
        }
        if self.header.kind == Kind::Samples {
            for (at, &learned) in (self.header.token_count as usize..).zip(learned) {
                self.mask.resize(at / 8 + 1, 0);
                self.mask[at / 8] |= u8::from(learned) << (at % 8);
            }
        }
        self.header.token_count += tokens.len() as u64;
        Ok(())
    }

    /// Writes the rest, and flushes it to disk.
    pub(crate) fn finish(mut self) -> Result<ShardInfo, DataError> {
        self.header.sample_count = self.index.len() as u64;
        let io = DataError::io(&self.path);
        let file = &mut self.file;
        let mut finish = || {
            file.pad()?;
            for starts in self.index.chunks(NUMBERS_AT_ONCE) {
                let bytes: Vec<u8> = starts.iter().flat_map(|start| start.to_le_bytes()).collect();
                file.write(&bytes)?;
            }
            file.write(&self.mask)?;
            file.pad()?;
            let mut table: Vec<u8> =
                file.checksums().iter().flat_map(|sum| sum.to_le_bytes()).collect();
            let checksum = crc32fast::hash(&table);
            table.extend(checksum.to_le_bytes());
            file.inner.write_all(&table)?;
            file.inner.flush()?;
            let end = file.inner.stream_position()?;
            file.inner.seek(SeekFrom::Start(0))?;
            file.inner.write_all(&self.header.to_bytes())?;
            file.inner.flush()?;
            file.inner.get_ref().sync_all()?;
            Ok((end, checksum))
        };
        let (bytes, checksum) = finish().map_err(io)?;
        let Header { token_count: tokens, sample_count: samples, .. } = self.header;
        Ok(ShardInfo { tokens, samples, bytes, checksum })
    }
}

/// Computes the checksum of each block written through it.
struct Checksummed<W> {
    inner: W,
    written: u64,
    current: crc32fast::Hasher,
    finished: Vec<u32>,
}

impl<W: Write> Checksummed<W> {
    fn new(inner: W) -> Checksummed<W> {
        Checksummed { inner, written: 0, current: crc32fast::Hasher::new(), finished: Vec::new() }
    }

    fn write(&mut self, mut bytes: &[u8]) -> std::io::Result<()> {
        self.inner.write_all(bytes)?;
        while !bytes.is_empty() {
            let left = BLOCK_BYTES - self.written % BLOCK_BYTES;
            let (block, rest) = bytes.split_at(bytes.len().min(left as usize));
            self.current.update(block);
            self.written += block.len() as u64;
            if self.written.is_multiple_of(BLOCK_BYTES) {
                self.finished.push(std::mem::take(&mut self.current).finalize());
            }
            bytes = rest;
        }
        Ok(())
    }

    /// Zeros up to a multiple of eight bytes.
    fn pad(&mut self) -> std::io::Result<()> {
        let count = self.written.next_multiple_of(8) - self.written;
        self.write(&[0; 8][..count as usize])
    }

    fn checksums(&mut self) -> Vec<u32> {
        if !self.written.is_multiple_of(BLOCK_BYTES) {
            self.finished.push(std::mem::take(&mut self.current).finalize());
        }
        std::mem::take(&mut self.finished)
    }
}
