//! A dataset of records on disk, checked and open.

use super::block::{Block, is_intact};
use super::codec::Codec;
use super::column::{Column, RecordLayout};
use super::layout::{Entry, Header, PAGE_BYTES, parse_index};
use super::manifest::RecordManifest;
use super::parallel;
use super::read::{Buffer, Buffers, Reading, ReadingPath, ShardFile};
use crate::shard::file_name;
use crate::{DataError, Split, VerifyProgress};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A directory of records that [`super::pack_records`] wrote.
#[derive(Debug)]
pub struct RecordSet {
    dir: PathBuf,
    manifest: RecordManifest,
    layout: RecordLayout,
    id: String,
    shards: Vec<ShardFile>,
    blocks: Vec<BlockPlace>,
}

/// Where a block is.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockPlace {
    shard: u32,
    /// Its number in the shard.
    number: u32,
    entry: Entry,
    /// The number of its first record in the dataset.
    pub(super) first_record: u64,
}

impl BlockPlace {
    pub(super) fn records(&self) -> u32 {
        self.entry.records
    }
}

/// What a thread needs to read blocks.
#[derive(Debug)]
pub(super) struct Reader {
    buffers: Arc<Buffers>,
    /// Compressed bytes.
    stored: Option<Buffer>,
    /// Pages that hold one record.
    pages: Option<Buffer>,
    pub(super) statistics: ReadStatistics,
}

/// What reading has cost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReadStatistics {
    /// Blocks and single records.
    pub(super) reads: u64,
    /// Bytes from disk.
    pub(super) bytes: u64,
    /// Waiting for the disk.
    pub(super) reading_ns: u64,
    /// Checksums and decompression.
    pub(super) decoding_ns: u64,
}

impl Reader {
    pub(super) fn new(buffers: &Arc<Buffers>) -> Reader {
        Reader {
            buffers: Arc::clone(buffers),
            stored: None,
            pages: None,
            statistics: ReadStatistics::default(),
        }
    }
}

/// A buffer of at least so many bytes, kept for the next time.
fn grown(buffer: &mut Option<Buffer>, bytes: usize) -> &mut Buffer {
    if buffer.as_ref().is_none_or(|buffer| buffer.len() < bytes) {
        *buffer = None;
    }
    buffer.get_or_insert_with(|| Buffer::new(bytes))
}

impl RecordSet {
    /// Whether a folder says that it holds records; what is damaged says nothing.
    pub fn is_one(dir: &Path) -> bool {
        RecordManifest::is_one(dir)
    }

    /// Opens a dataset: checks the manifest, and headers, sizes and indices of all shards, but not their blocks.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(dir: &Path) -> Result<RecordSet, DataError> {
        RecordSet::open_with(dir, Reading::default())
    }

    /// As [`RecordSet::open`], read in the way that is given.
    ///
    /// # Errors
    /// As [`RecordSet::open`].
    pub fn open_with(dir: &Path, reading: Reading) -> Result<RecordSet, DataError> {
        let (manifest, layout, id) = RecordManifest::read(dir)?;
        let (mut shards, mut blocks) = (Vec::new(), Vec::new());
        let (mut records, mut held_out) = (0, 0);
        for (number, info) in manifest.shards.iter().enumerate() {
            let path = dir.join(file_name(number));
            let damaged = |problem: &str| DataError::damaged(&path, problem);
            let file = ShardFile::open(&path, reading)?;
            let length = file.length()?;
            let mut page = vec![0; PAGE_BYTES];
            if length < PAGE_BYTES as u64 {
                return Err(damaged("too short for a shard"));
            }
            file.read_plain(0, &mut page).map_err(DataError::io(&path))?;
            let header = Header::parse(&page).map_err(|problem| damaged(&problem))?;
            if header.file_bytes() != Some(length) {
                return Err(damaged("its length is not what its header says"));
            }
            let described = (info.records, info.blocks, info.bytes, info.checksum);
            if described != (header.records, header.blocks, length, header.index_checksum) {
                return Err(damaged("it is not the shard that the manifest describes"));
            }
            // As long as the rest of the file, which is there.
            let mut index = vec![0; (length - header.index_at) as usize];
            file.read_plain(header.index_at, &mut index).map_err(DataError::io(&path))?;
            let entries =
                parse_index(&index, &header, &layout).map_err(|problem| damaged(&problem))?;
            for (in_shard, entry) in entries.into_iter().enumerate() {
                let (shard, number) = (number as u32, in_shard as u32);
                blocks.push(BlockPlace { shard, number, entry, first_record: records });
                records += u64::from(entry.records);
            }
            if info.part == Split::Held {
                held_out += info.records;
            }
            shards.push(file);
        }
        if (records, held_out) != (manifest.counts.records, manifest.counts.held_out) {
            let problem = "the shards do not add up to what the manifest says";
            return Err(DataError::damaged(dir, problem));
        }
        Ok(RecordSet { dir: dir.to_owned(), manifest, layout, id, shards, blocks })
    }

    /// Its manifest.
    pub fn manifest(&self) -> &RecordManifest {
        &self.manifest
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Identifies the dataset by its content.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The columns of each record.
    pub fn columns(&self) -> &[Column] {
        self.layout.columns()
    }

    /// A column by its name.
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns().iter().find(|column| column.name == name)
    }

    /// Records in a part.
    pub fn records(&self, part: Split) -> u64 {
        let held_out = self.manifest.counts.held_out;
        match part {
            Split::Train => self.manifest.counts.records - held_out,
            Split::Held => held_out,
        }
    }

    /// How it is read: directly, unless that is refused for one of its files.
    pub fn reading_path(&self) -> ReadingPath {
        let is_advised = |shard: &ShardFile| shard.reading_path() == ReadingPath::Advised;
        match self.shards.iter().any(is_advised) {
            true => ReadingPath::Advised,
            false => ReadingPath::Direct,
        }
    }

    pub(super) fn layout(&self) -> &RecordLayout {
        &self.layout
    }

    pub(super) fn block(&self, block: u32) -> &BlockPlace {
        &self.blocks[block as usize]
    }

    /// The numbers of a part's blocks.
    pub(super) fn blocks_of(&self, part: Split) -> Vec<u32> {
        let of_part = |(_, place): &(u32, &BlockPlace)| {
            self.manifest.shards[place.shard as usize].part == part
        };
        (0..).zip(&self.blocks).filter(of_part).map(|(number, _)| number).collect()
    }

    /// The numbers of a part's blocks, of which there is at least one.
    pub(super) fn nonempty_blocks_of(&self, part: Split) -> Result<Vec<u32>, DataError> {
        let blocks = self.blocks_of(part);
        if !blocks.is_empty() {
            return Ok(blocks);
        }
        let hint = match part {
            Split::Train => "pack more data, or hold less of it out",
            Split::Held => "pack a dataset that has a test part, or with --held-out",
        };
        let (path, split) = (self.dir.clone(), part.name());
        Err(DataError::Empty { path, split, hint: hint.to_owned() })
    }

    /// Bytes of the longest block in memory.
    pub(super) fn block_bytes_max(&self) -> usize {
        self.blocks.iter().map(|block| block.entry.raw_bytes).max().unwrap_or(0) as usize
    }

    /// Whether single records can be read without the rest of their block.
    pub(super) fn has_single_records(&self) -> bool {
        self.layout.record_bytes().is_some()
            && self.blocks.iter().all(|block| block.entry.codec == Codec::None)
    }

    pub(super) fn damaged_block(&self, block: u32, problem: impl Into<String>) -> DataError {
        let place = self.block(block);
        DataError::DamagedBlock {
            path: self.shards[place.shard as usize].path().to_owned(),
            block: place.number.into(),
            problem: problem.into(),
        }
    }

    fn read_block_error(&self, block: u32, source: std::io::Error) -> DataError {
        let place = self.block(block);
        let path = self.shards[place.shard as usize].path().to_owned();
        match source.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                self.damaged_block(block, "the file ends before it")
            }
            _ => DataError::ReadBlock { path, block: place.number.into(), source },
        }
    }

    /// Reads a block, compares it with its checksum, and decompresses it.
    pub(super) fn load(&self, block: u32, reader: &mut Reader) -> Result<Block, DataError> {
        let BlockPlace { shard, entry, .. } = *self.block(block);
        let file = &self.shards[shard as usize];
        let (stored_bytes, raw_bytes) = (entry.stored_bytes as usize, entry.raw_bytes as usize);
        let padded = entry.padded_bytes() as usize;
        let mut buffer = reader.buffers.take();
        let before = reader.statistics.reading_ns;
        let statistics = &mut reader.statistics;
        let began = Instant::now();
        let mut read = |pages: &mut Buffer| {
            file.read_pages(entry.at, &mut pages.as_mut_slice()[..padded])
                .map_err(|source| self.read_block_error(block, source))?;
            statistics.reads += 1;
            statistics.bytes += padded as u64;
            statistics.reading_ns += began.elapsed().as_nanos() as u64;
            match crc32fast::hash(&pages.as_slice()[..stored_bytes]) == entry.checksum {
                true => Ok(()),
                false => Err(self.damaged_block(block, "it does not match its checksum")),
            }
        };
        match entry.codec {
            Codec::None => read(&mut buffer)?,
            Codec::Zstd | Codec::Lz4 => {
                let stored = grown(&mut reader.stored, padded);
                read(stored)?;
                let raw = &mut buffer.as_mut_slice()[..raw_bytes];
                entry
                    .codec
                    .decompress(&stored.as_slice()[..stored_bytes], raw)
                    .map_err(|problem| self.damaged_block(block, problem))?;
            }
        }
        let spent = began.elapsed().as_nanos() as u64;
        reader.statistics.decoding_ns +=
            spent.saturating_sub(reader.statistics.reading_ns - before);
        Block::new(buffer, &reader.buffers, raw_bytes, entry.records as usize, &self.layout)
            .map_err(|problem| self.damaged_block(block, problem))
    }

    /// Reads one record of a block that is not compressed, where all records have the same size.
    pub(super) fn load_record<'a>(
        &self,
        block: u32,
        record: u32,
        reader: &'a mut Reader,
    ) -> Result<&'a [u8], DataError> {
        let BlockPlace { shard, entry, .. } = *self.block(block);
        let bytes = self.layout.record_bytes_min();
        let start = entry.at + u64::from(record) * bytes as u64;
        let page = PAGE_BYTES as u64;
        let (from, to) = (start / page * page, (start + bytes as u64).next_multiple_of(page));
        let pages = grown(&mut reader.pages, (to - from) as usize);
        let began = Instant::now();
        self.shards[shard as usize]
            .read_pages(from, &mut pages.as_mut_slice()[..(to - from) as usize])
            .map_err(|source| self.read_block_error(block, source))?;
        reader.statistics.reads += 1;
        reader.statistics.bytes += to - from;
        reader.statistics.reading_ns += began.elapsed().as_nanos() as u64;
        let bytes = &pages.as_slice()[(start - from) as usize..][..bytes];
        match is_intact(bytes) {
            true => Ok(bytes),
            false => Err(self
                .damaged_block(block, format!("its record {record} does not match its checksum"))),
        }
    }

    /// Reads every block and compares it and its records with their checksums.
    ///
    /// # Errors
    /// Names the first block that is damaged.
    pub fn verify(&self, progress: &(dyn Fn(VerifyProgress) + Sync)) -> Result<(), DataError> {
        let bytes_total = self.blocks.iter().map(|block| block.entry.padded_bytes()).sum();
        let (bytes_done, is_damaged) = (AtomicU64::new(0), AtomicBool::new(false));
        let buffers = Arc::new(Buffers::new(self.block_bytes_max()));
        let numbers: Vec<u32> = (0..self.blocks.len() as u32).collect();
        let check = |reader: &mut Reader, &number: &u32| {
            if is_damaged.load(Ordering::Relaxed) {
                return Ok(());
            }
            self.check_block(number, reader)
                .inspect_err(|_| is_damaged.store(true, Ordering::Relaxed))?;
            let bytes = self.block(number).entry.padded_bytes();
            let bytes_done = bytes_done.fetch_add(bytes, Ordering::Relaxed) + bytes;
            progress(VerifyProgress { bytes_done, bytes_total });
            Ok(())
        };
        parallel::map(&numbers, || Reader::new(&buffers), check).into_iter().collect()
    }

    /// Compares a block and each of its records with their checksums.
    fn check_block(&self, number: u32, reader: &mut Reader) -> Result<(), DataError> {
        let block = self.load(number, reader)?;
        let is_damaged = |&record: &usize| !is_intact(block.record(record, &self.layout));
        match (0..self.block(number).entry.records as usize).find(is_damaged) {
            None => Ok(()),
            Some(record) => {
                let problem = format!("its record {record} does not match its checksum");
                Err(self.damaged_block(number, problem))
            }
        }
    }
}
