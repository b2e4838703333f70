//! Writes shards of records.

use super::codec::Codec;
use super::column::{CHECKSUM_BYTES, Column, RecordLayout};
use super::layout::{BLOCK_BYTES, Entry, Header, PAGE_BYTES, SHARD_BLOCKS_MAX};
use super::manifest::{RecordCounts, RecordShardInfo};
use super::parallel;
use super::statistics::ImageStatistics;
use crate::shard::file_name;
use crate::{DataError, Split};
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Default size limit of a shard.
const SHARD_BYTES: u64 = 1 << 30;
/// Bytes of blocks compressed at once. Bounds the memory of packing.
const PENDING_BYTES: usize = 32 * BLOCK_BYTES;

/// The shards of a dataset that is being written.
pub(super) struct RecordWriter {
    dir: PathBuf,
    layout: RecordLayout,
    codec: Codec,
    file_name: fn(usize) -> String,
    shard_bytes: u64,
    parts: [PartWriter; 2],
    finished: Vec<Option<RecordShardInfo>>,
    counts: RecordCounts,
    /// The index of the image column, and its sums.
    statistics: Option<(usize, ImageStatistics)>,
}

/// The result of a writer.
type Finished = (RecordCounts, Option<ImageStatistics>, Vec<RecordShardInfo>);

/// The unwritten end of one part.
struct PartWriter {
    part: Split,
    records: Vec<u8>,
    /// Offset of each record of the current block in `records`.
    starts: Vec<u32>,
    /// The checksums of these records, concatenated.
    checksums: Vec<u8>,
    pending: Vec<RawBlock>,
    shard: Option<ShardWriter>,
}

struct RawBlock {
    bytes: Vec<u8>,
    records: u32,
    checksums: Vec<u8>,
}

impl RecordWriter {
    pub(super) fn new(
        dir: &Path,
        columns: &[Column],
        codec: Codec,
    ) -> Result<RecordWriter, DataError> {
        let layout = RecordLayout::new(columns)
            .map_err(|problem| DataError::Option { option: "columns", problem })?;
        let part = |part| PartWriter {
            part,
            records: Vec::new(),
            starts: Vec::new(),
            checksums: Vec::new(),
            pending: Vec::new(),
            shard: None,
        };
        Ok(RecordWriter {
            dir: dir.to_owned(),
            layout,
            codec,
            file_name,
            shard_bytes: SHARD_BYTES,
            parts: [part(Split::Train), part(Split::Held)],
            finished: Vec::new(),
            counts: RecordCounts::default(),
            statistics: ImageStatistics::of_columns(columns),
        })
    }

    /// The same with other shard names and another shard size limit.
    pub(super) fn with_shards(self, file_name: fn(usize) -> String, shard_bytes: u64) -> Self {
        RecordWriter { file_name, shard_bytes, ..self }
    }

    pub(super) fn counts(&self) -> &RecordCounts {
        &self.counts
    }

    /// Adds a record to a part. `values` has the bytes of each column. The inner error is the
    /// problem with the record, which is then not added.
    pub(super) fn push(
        &mut self,
        part: Split,
        values: &[&[u8]],
    ) -> Result<Result<(), String>, DataError> {
        let at = usize::from(part == Split::Held);
        let writer = &mut self.parts[at];
        let start = writer.records.len();
        if let Err(problem) = self.layout.write(values, &mut writer.records) {
            writer.records.truncate(start);
            return Ok(Err(problem));
        }
        let length = writer.records.len() - start;
        let checksum = writer.records.last_chunk::<CHECKSUM_BYTES>().copied().unwrap_or_default();
        let overflows = writer.records.len() > BLOCK_BYTES && start > 0;
        let last = overflows.then(|| writer.records.split_off(start));
        if let Some(last) = last {
            self.end_block(at)?;
            self.parts[at].records = last;
            self.parts[at].starts.push(0);
        } else {
            writer.starts.push(start as u32);
        }
        self.parts[at].checksums.extend(checksum);
        if let (Split::Train, Some((column, statistics))) = (part, &mut self.statistics) {
            statistics.add(values[*column]);
        }
        self.counts.records += 1;
        self.counts.held_out += u64::from(part == Split::Held);
        self.counts.raw_bytes += length as u64;
        let pending: usize = self.parts[at].pending.iter().map(|block| block.bytes.len()).sum();
        if pending >= PENDING_BYTES {
            self.write_pending(at)?;
        }
        Ok(Ok(()))
    }

    /// Ends the current block.
    fn end_block(&mut self, at: usize) -> Result<(), DataError> {
        let writer = &mut self.parts[at];
        let records = std::mem::take(&mut writer.records);
        let starts = std::mem::take(&mut writer.starts);
        let checksums = std::mem::take(&mut writer.checksums);
        if starts.is_empty() {
            return Ok(());
        }
        let bytes = match self.layout.record_bytes() {
            Some(_) => records,
            None => {
                let table = 4 * starts.len() as u32;
                let mut bytes: Vec<u8> =
                    starts.iter().flat_map(|start| (start + table).to_le_bytes()).collect();
                bytes.extend(records);
                bytes
            }
        };
        writer.pending.push(RawBlock { bytes, records: starts.len() as u32, checksums });
        Ok(())
    }

    /// Compresses the pending blocks on all cores and writes them in order.
    fn write_pending(&mut self, at: usize) -> Result<(), DataError> {
        let codec = self.codec;
        let pending = std::mem::take(&mut self.parts[at].pending);
        let compressed = parallel::map(&pending, || (), |(), block| codec.compress(&block.bytes));
        for (raw, stored) in pending.into_iter().zip(compressed) {
            let stored = stored.map_err(DataError::io(&self.dir))?;
            let (codec, bytes) = match &stored {
                Some(stored) => (codec, stored),
                None => (Codec::None, &raw.bytes),
            };
            let entry = Entry {
                at: 0,
                stored_bytes: bytes.len() as u32,
                raw_bytes: raw.bytes.len() as u32,
                records: raw.records,
                codec,
                checksum: crc32fast::hash(bytes),
            };
            self.counts.stored_bytes += entry.padded_bytes();
            let shard = self.shard(at, entry.padded_bytes())?;
            shard.push(entry, bytes)?;
            shard.content.update(&raw.checksums);
        }
        Ok(())
    }

    /// The current shard of a part, or a new one if it is full.
    fn shard(&mut self, at: usize, bytes: u64) -> Result<&mut ShardWriter, DataError> {
        let is_full = |shard: &mut ShardWriter| {
            shard.at + bytes > self.shard_bytes || shard.entries.len() as u64 >= SHARD_BLOCKS_MAX
        };
        let part = self.parts[at].part;
        if let Some(shard) = self.parts[at].shard.take_if(is_full) {
            let number = shard.number;
            self.finished[number] = Some(shard.finish(part)?);
        }
        match &mut self.parts[at].shard {
            Some(shard) => Ok(shard),
            empty => {
                let number = self.finished.len();
                self.finished.push(None);
                Ok(empty.insert(ShardWriter::create(&self.dir, (self.file_name)(number), number)?))
            }
        }
    }

    /// Counts, image statistics of the training part, and shards.
    pub(super) fn finish(mut self) -> Result<Finished, DataError> {
        for at in 0..self.parts.len() {
            self.end_block(at)?;
            self.write_pending(at)?;
            if let Some(shard) = self.parts[at].shard.take() {
                let number = shard.number;
                self.finished[number] = Some(shard.finish(self.parts[at].part)?);
            }
        }
        let statistics = self.statistics.map(|(_, statistics)| statistics);
        let statistics = statistics.filter(|statistics| statistics.pixels > 0);
        Ok((self.counts, statistics, self.finished.into_iter().flatten().collect()))
    }
}

struct ShardWriter {
    number: usize,
    path: PathBuf,
    file: BufWriter<File>,
    at: u64,
    records: u64,
    entries: Vec<Entry>,
    content: crc32fast::Hasher,
}

impl ShardWriter {
    fn create(dir: &Path, name: String, number: usize) -> Result<ShardWriter, DataError> {
        let path = dir.join(name);
        let file = File::create_new(&path).map_err(DataError::io(&path))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        // The header is written at the end.
        file.write_all(&[0; PAGE_BYTES]).map_err(DataError::io(&path))?;
        Ok(ShardWriter {
            number,
            file,
            at: PAGE_BYTES as u64,
            records: 0,
            entries: Vec::new(),
            content: crc32fast::Hasher::new(),
            path,
        })
    }

    fn push(&mut self, entry: Entry, bytes: &[u8]) -> Result<(), DataError> {
        let io = DataError::io(&self.path);
        let padding = entry.padded_bytes() as usize - bytes.len();
        self.file.write_all(bytes).map_err(&io)?;
        self.file.write_all(&[0; PAGE_BYTES][..padding]).map_err(&io)?;
        self.entries.push(Entry { at: self.at, ..entry });
        self.at += entry.padded_bytes();
        self.records += u64::from(entry.records);
        Ok(())
    }

    /// Writes the index and the header, and flushes the file to disk.
    fn finish(mut self, part: Split) -> Result<RecordShardInfo, DataError> {
        let index: Vec<u8> = self.entries.iter().flat_map(|entry| entry.to_bytes()).collect();
        let checksum = crc32fast::hash(&index);
        let header = Header {
            records: self.records,
            blocks: self.entries.len() as u64,
            index_at: self.at,
            index_checksum: checksum,
        };
        let file = &mut self.file;
        let mut finish = || {
            file.write_all(&index)?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header.to_bytes())?;
            file.flush()?;
            file.get_ref().sync_all()?;
            // Loaders bypass the page cache, so written data need not stay in it.
            fadvise(file.get_ref(), 0, None, Advice::DontNeed).ok();
            Ok(())
        };
        finish().map_err(DataError::io(&self.path))?;
        let bytes = self.at + index.len() as u64;
        let content = Some(self.content.finalize());
        let (records, blocks) = (self.records, header.blocks);
        Ok(RecordShardInfo { part, records, blocks, bytes, checksum, content })
    }
}
