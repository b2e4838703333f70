//! An open dataset of records.

use super::block::{Block, is_intact};
use super::codec::Codec;
use super::column::{Column, RecordLayout};
use super::counters::{Count, ReadCounters};
use super::fault::ReadFaults;
use super::layout::{Entry, Header, PAGE_BYTES, parse_index};
use super::loader::{Load, RecordLoaderOptions, data_ram_to_hold};
use super::manifest::RecordManifest;
use super::parallel;
use super::queue::ReadQueue;
use super::read::{Buffers, ShardFile};
use super::reading::{Reading, ReadingPath};
use crate::shard::file_name;
use crate::{DataError, Split, VerifyProgress};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use storm_host::{PageBuffer, ReadRing};

/// Queue depth for sequential reads.
const READ_AHEAD_BLOCKS: usize = 8;

/// A directory of records that [`super::pack_records`] wrote.
#[derive(Debug)]
pub struct RecordSet {
    dir: PathBuf,
    manifest: RecordManifest,
    layout: RecordLayout,
    id: String,
    shards: Vec<Arc<ShardFile>>,
    blocks: Vec<BlockPlace>,
    /// io_uring is refused or not wanted.
    ring_refused: Arc<AtomicBool>,
}

/// The location of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockPlace {
    shard: u32,
    /// Its index in the shard.
    number: u32,
    entry: Entry,
    /// The number of its first record in the dataset.
    pub(super) first_record: u64,
}

impl BlockPlace {
    pub(super) fn records(&self) -> u32 {
        self.entry.records
    }

    /// Bytes after decompression.
    pub(super) fn raw_bytes(&self) -> u64 {
        self.entry.raw_bytes.into()
    }

    /// Bytes on disk, including padding.
    pub(super) fn disk_bytes(&self) -> u64 {
        self.entry.padded_bytes()
    }
}

/// A thread's state for reading blocks.
#[derive(Debug)]
pub(super) struct Reader {
    buffers: Arc<Buffers>,
    queue: ReadQueue,
    /// Reusable buffers for compressed blocks and for the pages of single records.
    spare: Vec<PageBuffer>,
    pub(super) counters: Arc<ReadCounters>,
}

impl Reader {
    /// A reader with this queue depth.
    pub(super) fn new(set: &RecordSet, buffers: &Arc<Buffers>, depth: usize) -> Reader {
        Reader {
            buffers: Arc::clone(buffers),
            queue: ReadQueue::new(depth, &set.ring_refused),
            spare: Vec::new(),
            counters: Arc::default(),
        }
    }

    /// A reused buffer of at least this size, or a new one.
    fn spare(&mut self, bytes: usize) -> PageBuffer {
        let used = self.spare.pop().filter(|buffer| buffer.len() >= bytes);
        used.unwrap_or_else(|| PageBuffer::new(bytes))
    }

    /// Its queue depth.
    pub(super) fn depth(&self) -> usize {
        self.queue.depth()
    }

    /// Whether there is room for another read.
    pub(super) fn has_room(&self) -> bool {
        self.queue.has_room()
    }

    /// Discards all pending reads.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    /// Waits for the oldest read.
    fn pop(&mut self, bytes: u64) -> io::Result<PageBuffer> {
        let (began, in_flight) = (Instant::now(), self.queue.count());
        let popped = self.queue.pop();
        self.counters.add_time(Count::ReadingNs, began.elapsed());
        for (what, count) in
            [(Count::Reads, 1), (Count::Bytes, bytes), (Count::InFlight, in_flight as u64)]
        {
            self.counters.add(what, count);
        }
        let (buffer, result) = popped.ok_or_else(|| io::Error::other("no read was begun"))?;
        result.map(|()| buffer)
    }
}

impl RecordSet {
    /// Whether a folder has a manifest of records. False if the manifest is damaged.
    pub fn is_one(dir: &Path) -> bool {
        RecordManifest::is_one(dir)
    }

    /// Opens a dataset. Checks the manifest, and the headers, sizes and indices of all shards, but
    /// not their blocks.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(dir: &Path) -> Result<RecordSet, DataError> {
        RecordSet::open_with(dir, Reading::from_environment()?)
    }

    /// As [`RecordSet::open`], with no faster read method than the given one.
    ///
    /// # Errors
    /// As [`RecordSet::open`].
    pub fn open_with(dir: &Path, reading: Reading) -> Result<RecordSet, DataError> {
        let (manifest, layout, id) = RecordManifest::read(dir)?;
        RecordSet::of_manifest(dir, manifest, layout, id, file_name, reading)
    }

    /// Opens the shards of a manifest. `file_name` maps a shard number to its name.
    pub(super) fn of_manifest(
        dir: &Path,
        manifest: RecordManifest,
        layout: RecordLayout,
        id: String,
        file_name: fn(usize) -> String,
        reading: Reading,
    ) -> Result<RecordSet, DataError> {
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
            // The length is that of the rest of the file, which exists, so this allocation is
            // bounded.
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
            shards.push(Arc::new(file));
        }
        if (records, held_out) != (manifest.counts.records, manifest.counts.held_out) {
            let problem = "the shards do not add up to what the manifest says";
            return Err(DataError::damaged(dir, problem));
        }
        let ring_refused = reading != Reading::Ring || ReadRing::new(1).is_err();
        let ring_refused = Arc::new(AtomicBool::new(ring_refused));
        Ok(RecordSet { dir: dir.to_owned(), manifest, layout, id, shards, blocks, ring_refused })
    }

    /// Injects faults into reads of blocks, for tests.
    pub fn with_faults(mut self, faults: &Arc<dyn ReadFaults>) -> RecordSet {
        // Nothing else holds the shards yet, because the set is owned here.
        for shard in self.shards.iter_mut().filter_map(Arc::get_mut) {
            shard.set_faults(Arc::clone(faults));
        }
        self
    }

    /// Its manifest.
    pub fn manifest(&self) -> &RecordManifest {
        &self.manifest
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A hash of its contents.
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

    /// The read method in use, as far as the system has allowed it.
    pub fn reading_path(&self) -> ReadingPath {
        match self.shards.iter().all(|shard| shard.direct().is_some()) {
            false => ReadingPath::Advised,
            true if self.ring_refused.load(Ordering::Relaxed) => ReadingPath::Direct,
            true => ReadingPath::Ring,
        }
    }

    /// The `data_ram` with which a part stays in memory once read.
    pub fn data_ram_to_hold(&self, part: Split) -> u64 {
        data_ram_to_hold(self, self.blocks_of(part).len() as u64)
    }

    /// The minimum `data_ram` of a record loader with these options.
    pub fn data_ram_needed(&self, options: &RecordLoaderOptions) -> u64 {
        let blocks = self.blocks_of(options.part).len() as u64;
        Load::records(self, blocks).needed(self, options)
    }

    pub(super) fn layout(&self) -> &RecordLayout {
        &self.layout
    }

    /// The block of a record, and the record's index in it.
    pub(super) fn place_of(&self, record: u64) -> (u32, u32) {
        let block = self.blocks.partition_point(|block| block.first_record <= record) - 1;
        (block as u32, (record - self.blocks[block].first_record) as u32)
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

    /// The numbers of a part's blocks, at least one.
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

    /// Bytes of the largest block in memory.
    pub(super) fn block_bytes_max(&self) -> usize {
        self.blocks.iter().map(|block| block.entry.raw_bytes).max().unwrap_or(0) as usize
    }

    /// Whether any block is compressed.
    pub(super) fn is_compressed(&self) -> bool {
        self.blocks.iter().any(|block| block.entry.codec != Codec::None)
    }

    /// Whether single records can be read without the rest of their block.
    pub(super) fn has_single_records(&self) -> bool {
        self.layout.record_bytes().is_some() && !self.is_compressed()
    }

    pub(super) fn damaged_block(&self, block: u32, problem: impl Into<String>) -> DataError {
        let place = self.block(block);
        DataError::DamagedBlock {
            path: self.shards[place.shard as usize].path().to_owned(),
            block: place.number.into(),
            problem: problem.into(),
        }
    }

    fn read_block_error(&self, block: u32, source: io::Error) -> DataError {
        let place = self.block(block);
        let path = self.shards[place.shard as usize].path().to_owned();
        match source.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged_block(block, "the file ends before it"),
            _ => DataError::ReadBlock { path, block: place.number.into(), source },
        }
    }

    /// Reads a block, verifies its checksum, and decompresses it.
    pub(super) fn load(&self, block: u32, reader: &mut Reader) -> Result<Block, DataError> {
        self.begin(block, reader);
        self.finish(block, reader)
    }

    /// Reads blocks in order, with as many reads in flight as the reader allows. Calls `with` with
    /// the value paired with each block and the block. Stops at its first error. Takes the next
    /// item when there is room for another read.
    pub(super) fn load_each<T>(
        &self,
        blocks: impl IntoIterator<Item = (u32, T)>,
        reader: &mut Reader,
        mut with: impl FnMut(T, Result<Block, DataError>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut begun = VecDeque::new();
        let mut blocks = blocks.into_iter().fuse();
        loop {
            while reader.has_room()
                && let Some((block, extra)) = blocks.next()
            {
                self.begin(block, reader);
                begun.push_back((block, extra));
            }
            let Some((block, extra)) = begun.pop_front() else { return Ok(()) };
            let loaded = self.finish(block, reader);
            with(extra, loaded).inspect_err(|_| reader.clear())?;
        }
    }

    /// As [`RecordSet::load_each`], for single records of uncompressed blocks whose records all
    /// have the same size.
    pub(super) fn load_each_record<T>(
        &self,
        records: impl IntoIterator<Item = (u32, u32, T)>,
        reader: &mut Reader,
        mut with: impl FnMut(T, &[u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut begun = VecDeque::new();
        let mut records = records.into_iter().fuse();
        loop {
            while reader.has_room()
                && let Some((block, record, extra)) = records.next()
            {
                self.begin_record(block, record, reader);
                begun.push_back((block, record, extra));
            }
            let Some((block, record, extra)) = begun.pop_front() else { return Ok(()) };
            self.finish_record(block, record, reader, |bytes| with(extra, bytes))
                .flatten()
                .inspect_err(|_| reader.clear())?;
        }
    }

    /// Starts to read a block. Reads must be finished in the order they were started.
    pub(super) fn begin(&self, block: u32, reader: &mut Reader) {
        let BlockPlace { shard, entry, .. } = *self.block(block);
        let padded = entry.padded_bytes() as usize;
        let buffer = match entry.codec {
            Codec::None => reader.buffers.take(),
            Codec::Zstd | Codec::Lz4 => reader.spare(padded),
        };
        reader.queue.push(&self.shards[shard as usize], entry.at, padded, buffer);
    }

    /// Waits for a block that was started, verifies its checksum, and decompresses it.
    pub(super) fn finish(&self, block: u32, reader: &mut Reader) -> Result<Block, DataError> {
        let entry = self.block(block).entry;
        let (stored_bytes, raw_bytes) = (entry.stored_bytes as usize, entry.raw_bytes as usize);
        let stored = reader
            .pop(entry.padded_bytes())
            .map_err(|source| self.read_block_error(block, source))?;
        let began = Instant::now();
        if crc32fast::hash(&stored.as_slice()[..stored_bytes]) != entry.checksum {
            return Err(self.damaged_block(block, "it does not match its checksum"));
        }
        let raw = match entry.codec {
            Codec::None => stored,
            Codec::Zstd | Codec::Lz4 => {
                let mut raw = reader.buffers.take();
                let bytes = &mut raw.as_mut_slice()[..raw_bytes];
                entry
                    .codec
                    .decompress(&stored.as_slice()[..stored_bytes], bytes)
                    .map_err(|problem| self.damaged_block(block, problem))?;
                reader.spare.push(stored);
                raw
            }
        };
        reader.counters.add_time(Count::DecodingNs, began.elapsed());
        reader.counters.add(Count::DecodedBytes, raw_bytes as u64);
        Block::new(raw, &reader.buffers, raw_bytes, entry.records as usize, &self.layout)
            .map_err(|problem| self.damaged_block(block, problem))
    }

    /// The pages that hold a record, and its offset in them.
    fn record_pages(&self, block: u32, record: u32) -> (Range<u64>, usize) {
        let bytes = self.layout.record_bytes_min() as u64;
        let start = self.block(block).entry.at + u64::from(record) * bytes;
        let page = PAGE_BYTES as u64;
        let from = start / page * page;
        (from..(start + bytes).next_multiple_of(page), (start - from) as usize)
    }

    /// Starts to read a single record of an uncompressed block whose records all have the same
    /// size. Reads must be finished in the order they were started.
    fn begin_record(&self, block: u32, record: u32, reader: &mut Reader) {
        let (pages, _) = self.record_pages(block, record);
        let bytes = (pages.end - pages.start) as usize;
        let buffer = reader.spare(bytes);
        let shard = &self.shards[self.block(block).shard as usize];
        reader.queue.push(shard, pages.start, bytes, buffer);
    }

    /// Waits for a record that was started, verifies its checksum, and calls `with` with it.
    fn finish_record<R>(
        &self,
        block: u32,
        record: u32,
        reader: &mut Reader,
        with: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, DataError> {
        let (pages, start) = self.record_pages(block, record);
        let buffer = reader
            .pop(pages.end - pages.start)
            .map_err(|source| self.read_block_error(block, source))?;
        let began = Instant::now();
        let bytes = &buffer.as_slice()[start..][..self.layout.record_bytes_min()];
        if !is_intact(bytes) {
            let problem = format!("its record {record} does not match its checksum");
            return Err(self.damaged_block(block, problem));
        }
        reader.counters.add_time(Count::DecodingNs, began.elapsed());
        reader.counters.add(Count::DecodedBytes, bytes.len() as u64);
        let result = with(bytes);
        reader.spare.push(buffer);
        Ok(result)
    }

    /// Calls `with` with each record of a part, in file order.
    pub(super) fn each_record(
        &self,
        part: Split,
        with: &mut dyn FnMut(&[u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let buffers = Arc::new(Buffers::new(self.block_bytes_max()));
        let mut reader = Reader::new(self, &buffers, READ_AHEAD_BLOCKS);
        let blocks = self.nonempty_blocks_of(part)?;
        let blocks = blocks.into_iter().map(|block| (block, self.block(block).records()));
        self.load_each(blocks, &mut reader, |records, loaded| {
            let block = loaded?;
            (0..records as usize).try_for_each(|record| with(block.record(record, &self.layout)))
        })
    }

    /// Evicts its shards from the page cache, except dirty pages. Returns the bytes that are left.
    ///
    /// # Errors
    /// The state of a shard cannot be queried.
    pub fn drop_page_cache(&self) -> Result<u64, DataError> {
        self.shards.iter().for_each(|shard| shard.drop_page_cache());
        self.cached_bytes()
    }

    /// Bytes of its shards that are in the page cache.
    ///
    /// # Errors
    /// The state of a shard cannot be queried.
    pub fn cached_bytes(&self) -> Result<u64, DataError> {
        self.shards.iter().map(|shard| shard.cached_bytes()).sum()
    }

    /// Bytes that [`RecordSet::verify`] reads.
    pub(super) fn verified_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.entry.padded_bytes()).sum()
    }

    /// Reads every block, and verifies the checksums of blocks and records.
    ///
    /// # Errors
    /// Names the first block that is damaged.
    pub fn verify(&self, progress: &(dyn Fn(VerifyProgress) + Sync)) -> Result<(), DataError> {
        let bytes_total = self.verified_bytes();
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
        parallel::map(&numbers, || Reader::new(self, &buffers, 1), check).into_iter().collect()
    }

    /// Verifies the checksums of a block and of its records.
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
