//! A checkpoint file that several ranks write together: who writes which bytes, and how it is hashed.
//!
//! All ranks know the layout before anything is written. The file is divided into blocks. A rank writes and hashes the
//! blocks whose bytes it owns entirely. Rank 0 writes all other blocks, including a shorter last one; the other ranks
//! send it their bytes of those. So no two ranks write to the same page of the file, and neither its bytes nor its hash
//! depend on the number of ranks.

use super::manifest::FileEntry;
use super::tree::{BLOCK_BYTES, block_count, combine, hash_block};
use super::{CheckpointError, StatePart, StateTensor};
use crate::TrainError;
use blake3::hazmat::ChainingValue;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use storm_model::safetensors_header;

/// Blocks that are read, hashed and written at once.
const BLOCKS_AT_A_TIME: u64 = 64;

/// Reads bytes of a tensor by name, starting at an offset.
pub(crate) type ReadTensor<'a> = dyn FnMut(&str, usize, &mut [u8]) -> Result<(), TrainError> + 'a;

/// The layout of a checkpoint file.
#[derive(Debug)]
pub(crate) struct SharedFile {
    pub(crate) name: &'static str,
    header: Vec<u8>,
    /// Each tensor with its offset in the file.
    tensors: Vec<(u64, StateTensor)>,
    /// The owner of each byte range, in order and without gaps. Neighbors have different owners.
    spans: Vec<(Range<u64>, u32)>,
    bytes: u64,
}

/// What a rank sends to rank 0 about a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OwnPart {
    /// Hashes of the blocks the rank has written, in order.
    blocks: Vec<ChainingValue>,
    /// The rank's bytes of all other blocks, in order.
    edges: Vec<u8>,
}

impl SharedFile {
    /// A file of these tensors. `owners` returns who owns which bytes of a tensor, in order.
    pub(crate) fn new(
        part: StatePart,
        tensors: &[StateTensor],
        owners: impl Fn(&StateTensor) -> Vec<(u32, usize)>,
    ) -> SharedFile {
        let entries = tensors.iter().map(|t| (t.name.as_str(), t.file_dtype(), t.shape.axes()));
        let (header, _) = safetensors_header(entries);
        // Rank 0 writes the header.
        let mut spans = vec![(0..header.len() as u64, 0)];
        let mut placed = Vec::new();
        let mut end = header.len() as u64;
        for tensor in tensors {
            placed.push((end, tensor.clone()));
            for (owner, bytes) in owners(tensor) {
                let range = end..end + bytes as u64;
                end = range.end;
                match spans.last_mut() {
                    Some((before, of)) if *of == owner => before.end = range.end,
                    _ => spans.push((range, owner)),
                }
            }
        }
        spans.retain(|(range, _)| !range.is_empty());
        SharedFile { name: part.file_name(), header, tensors: placed, spans, bytes: end }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn header_bytes(&self) -> u64 {
        self.header.len() as u64
    }

    /// The blocks a rank writes, as byte ranges.
    fn whole(&self, rank: u32) -> impl Iterator<Item = Range<u64>> {
        let own = self.spans.iter().filter(move |(_, owner)| *owner == rank);
        own.map(|(span, _)| self.blocks_in(span)).filter(|range| !range.is_empty())
    }

    /// The byte ranges a rank owns in all other blocks.
    fn edges(&self, rank: u32) -> impl Iterator<Item = Range<u64>> {
        let own = self.spans.iter().filter(move |(_, owner)| *owner == rank);
        own.flat_map(|(span, _)| {
            let whole = self.blocks_in(span);
            match whole.is_empty() {
                true => [span.clone(), span.end..span.end],
                false => [span.start..whole.start, whole.end..span.end],
            }
        })
        .filter(|range| !range.is_empty())
    }

    /// The byte range of all blocks entirely inside a span.
    fn blocks_in(&self, span: &Range<u64>) -> Range<u64> {
        // A file of one block has no hash tree; rank 0 hashes it.
        if block_count(self.bytes) == 1 {
            return 0..0;
        }
        let first = span.start.next_multiple_of(BLOCK_BYTES);
        let end = span.end / BLOCK_BYTES * BLOCK_BYTES;
        first..end.max(first)
    }

    /// Size of a rank's [`OwnPart`] as a message.
    pub(crate) fn message_bytes(&self, rank: u32) -> usize {
        let blocks: u64 = self.whole(rank).map(|range| block_count(range.end - range.start)).sum();
        let edges: u64 = self.edges(rank).map(|range| range.end - range.start).sum();
        blocks as usize * size_of::<ChainingValue>() + edges as usize
    }

    /// Fills a byte range of the file, using `read` for tensors.
    fn fill(
        &self,
        range: Range<u64>,
        bytes: &mut [u8],
        read: &mut ReadTensor<'_>,
    ) -> Result<(), TrainError> {
        let header = 0..self.header.len() as u64;
        if let Some(inside) = common(&range, &header) {
            let from = &self.header[inside.start as usize..inside.end as usize];
            bytes[..from.len()].copy_from_slice(from);
        }
        let first = self
            .tensors
            .partition_point(|(start, tensor)| start + tensor.size_bytes() as u64 <= range.start);
        for (start, tensor) in &self.tensors[first..] {
            let Some(inside) = common(&range, &(*start..start + tensor.size_bytes() as u64)) else {
                break;
            };
            let to = (inside.start - range.start) as usize..(inside.end - range.start) as usize;
            read(&tensor.name, (inside.start - start) as usize, &mut bytes[to])?;
        }
        Ok(())
    }

    /// Every rank: writes its blocks, and returns what rank 0 needs.
    pub(crate) fn write_own(
        &self,
        rank: u32,
        file: &File,
        path: &Path,
        read: &mut ReadTensor<'_>,
    ) -> Result<OwnPart, TrainError> {
        let mut own = OwnPart::default();
        let mut buffer = Vec::new();
        for range in self.whole(rank) {
            let step = BLOCKS_AT_A_TIME * BLOCK_BYTES;
            for first in range.clone().step_by(step as usize) {
                let piece = first..range.end.min(first + step);
                buffer.resize((piece.end - piece.start) as usize, 0);
                self.fill(piece, &mut buffer, read)?;
                file.write_all_at(&buffer, first).map_err(CheckpointError::io("write", path))?;
                let blocks = buffer.par_chunks(BLOCK_BYTES as usize).enumerate();
                let hashed = blocks
                    .map(|(number, block)| hash_block(first + number as u64 * BLOCK_BYTES, block));
                own.blocks.par_extend(hashed);
            }
        }
        for range in self.edges(rank) {
            let start = own.edges.len();
            own.edges.resize(start + (range.end - range.start) as usize, 0);
            self.fill(range, &mut own.edges[start..], read)?;
        }
        Ok(own)
    }

    /// Rank 0, last: writes the blocks shared by several ranks, and hashes the file. `parts` has the part of each rank.
    pub(crate) fn complete(
        &self,
        file: &File,
        path: &Path,
        parts: &[OwnPart],
    ) -> Result<FileEntry, CheckpointError> {
        let mut blocks: BTreeMap<u64, ChainingValue> = BTreeMap::new();
        let mut shared: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for (rank, part) in (0..).zip(parts) {
            let firsts = self.whole(rank).flat_map(|range| range.step_by(BLOCK_BYTES as usize));
            blocks.extend(firsts.zip(part.blocks.iter().copied()));
            let mut edges = &part.edges[..];
            for range in self.edges(rank) {
                let mut at = range.start;
                while at < range.end {
                    let first = at / BLOCK_BYTES * BLOCK_BYTES;
                    let end = range.end.min(first + BLOCK_BYTES);
                    let size = BLOCK_BYTES.min(self.bytes - first) as usize;
                    let block = shared.entry(first).or_insert_with(|| vec![0; size]);
                    let (next, rest) = edges.split_at((end - at) as usize);
                    block[(at - first) as usize..(end - first) as usize].copy_from_slice(next);
                    (edges, at) = (rest, end);
                }
            }
        }
        for (&first, block) in &shared {
            file.write_all_at(block, first).map_err(CheckpointError::io("write", path))?;
        }
        let hash = match (shared.get(&0), block_count(self.bytes)) {
            (Some(only), 1) => blake3::hash(only),
            _ => {
                let found = shared.iter().map(|(&first, block)| (first, hash_block(first, block)));
                blocks.extend(found);
                combine(&blocks.into_values().collect::<Vec<_>>(), self.bytes)
            }
        };
        let (name, blake3) = (self.name.to_owned(), hash.to_hex().to_string());
        Ok(FileEntry { name, bytes: self.bytes, blake3 })
    }
}

impl OwnPart {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.blocks.concat();
        bytes.extend_from_slice(&self.edges);
        bytes
    }

    /// Decodes a message of [`SharedFile::message_bytes`].
    pub(crate) fn of_bytes(file: &SharedFile, rank: u32, bytes: &[u8]) -> OwnPart {
        let count: u64 = file.whole(rank).map(|range| block_count(range.end - range.start)).sum();
        let (blocks, edges) = bytes.split_at(count as usize * size_of::<ChainingValue>());
        OwnPart { blocks: blocks.as_chunks().0.to_vec(), edges: edges.to_vec() }
    }
}

/// The intersection of two ranges.
fn common(one: &Range<u64>, other: &Range<u64>) -> Option<Range<u64>> {
    let range = one.start.max(other.start)..one.end.min(other.end);
    (!range.is_empty()).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::random::Random;
    use storm_graph::{DType, Shape};

    /// Random tensors that ranks own in random parts: the file has the bytes and the hash that one process would write.
    #[test]
    fn any_owners_write_the_same_file() {
        let mut random = Random(19);
        for case in 0..60 {
            let ranks = 1 + random.below(4) as u32;
            let largest = [10, 3_000, 100_000][case % 3];
            let tensors: Vec<StateTensor> = (0..random.below(6))
                .map(|number| StateTensor {
                    name: format!("t{number}"),
                    shape: Shape::from([1 + random.below(largest)]),
                    dtype: if random.below(2) == 0 { DType::F32 } else { DType::BF16 },
                    part: StatePart::Optimizer,
                })
                .collect();
            let owned: BTreeMap<String, Vec<(u32, usize)>> = tensors
                .iter()
                .map(|tensor| {
                    let mut parts = Vec::new();
                    let mut left = tensor.size_bytes();
                    while left > 0 {
                        let size = left.min(1 + random.below(200_000));
                        parts.push((random.below(ranks as usize) as u32, size));
                        left -= size;
                    }
                    (tensor.name.clone(), parts)
                })
                .collect();
            let values: BTreeMap<String, Vec<u8>> = tensors
                .iter()
                .map(|tensor| {
                    let bytes = (0..tensor.size_bytes()).map(|_| random.below(256) as u8);
                    (tensor.name.clone(), bytes.collect())
                })
                .collect();
            let layout = SharedFile::new(StatePart::Optimizer, &tensors, |tensor| {
                owned[&tensor.name].clone()
            });
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("file");
            let file = File::create_new(&path).expect("a file");
            let parts: Vec<OwnPart> = (0..ranks)
                .map(|rank| {
                    // A rank has nothing but its own.
                    let mut read = |name: &str, first: usize, bytes: &mut [u8]| {
                        let mut start = 0;
                        for &(owner, size) in &owned[name] {
                            let part = start..start + size;
                            start = part.end;
                            let asked = first..first + bytes.len();
                            let both = part.start.max(asked.start)..part.end.min(asked.end);
                            assert!(both.is_empty() || owner == rank, "another rank's bytes");
                        }
                        bytes.copy_from_slice(&values[name][first..first + bytes.len()]);
                        Ok(())
                    };
                    let part = layout.write_own(rank, &file, &path, &mut read).expect("written");
                    let message = part.to_bytes();
                    assert_eq!(message.len(), layout.message_bytes(rank));
                    assert_eq!(OwnPart::of_bytes(&layout, rank, &message), part);
                    part
                })
                .collect();
            let entry = layout.complete(&file, &path, &parts).expect("written");
            let mut expected = layout.header.clone();
            tensors.iter().for_each(|tensor| expected.extend(&values[&tensor.name]));
            assert!(std::fs::read(&path).expect("a file") == expected, "case {case}");
            assert_eq!(entry.bytes, expected.len() as u64);
            assert_eq!(entry.blake3, blake3::hash(&expected).to_hex().as_str(), "case {case}");
        }
    }
}
