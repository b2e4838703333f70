//! A safetensors file. The header is checked completely on opening. Tensors are then read by
//! position.
//!
//! The file is neither mapped nor loaded: if a mapped file shrinks, the process is killed, and
//! models are larger than memory.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use storm_files::open_plain;

use super::dtype::{Dtype, Element, decode};
use super::pickle::is_pickle;
use super::strict_json::{ENTRIES_MAX, Name, UniqueMap, UniqueMapSeed, parse_stream};
use crate::ModelError;
use crate::error::clip;

/// Limit on the headers of all files of a model together. The format allows 100 MB per file, but
/// the headers of a hundred thousand tensors take less than this.
pub const HEADER_BYTES_MAX: u64 = 16 << 20;

/// Tensors are read in pieces of this size.
pub(super) const CHUNK_BYTES: usize = 4 << 20;

const RANK_MAX: usize = 8;

/// Header bytes and entries that a model may still use. A model may have thousands of files, so a
/// size that is harmless for one is not for all of them.
pub(super) struct HeaderBudget {
    bytes: u64,
    entries: usize,
}

impl HeaderBudget {
    pub(super) fn new() -> Self {
        Self { bytes: HEADER_BYTES_MAX, entries: ENTRIES_MAX }
    }

    fn take_bytes(&mut self, path: &Path, header_bytes: u64) -> Result<(), ModelError> {
        let before = HEADER_BYTES_MAX - self.bytes;
        self.bytes = self.bytes.checked_sub(header_bytes).ok_or_else(|| ModelError::TooLarge {
            path: path.to_owned(),
            what: match before {
                0 => "the header, as the file states it,",
                _ => "the header, with those of the shards before it,",
            },
            bytes: header_bytes.saturating_add(before),
            limit: HEADER_BYTES_MAX,
        })?;
        Ok(())
    }
}

/// The type, shape and location of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Index of its file in the directory. 0 for a single file.
    pub file: usize,
    /// Its byte range in that file.
    pub range: Range<u64>,
}

impl TensorEntry {
    /// Number of elements.
    pub fn element_count(&self) -> usize {
        // Exact, because opening the file checked that the shape fits the range and the range fits
        // the file.
        (self.range.end - self.range.start) as usize / self.dtype.size_bytes()
    }
}

/// An open safetensors file.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, TensorEntry>,
}

impl SafetensorsFile {
    /// Opens a file and checks its whole header: every tensor has a known type and a shape that
    /// matches its bytes, and the tensors fill the file without overlaps or gaps.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::open_within(path, &mut HeaderBudget::new())
    }

    /// Opens one of several files.
    pub(super) fn open_within(path: &Path, budget: &mut HeaderBudget) -> Result<Self, ModelError> {
        let file = open_plain(path).map_err(ModelError::io("open the file", path))?;
        let metadata = file.metadata().map_err(ModelError::io("read the file's size", path))?;
        let damaged = |problem: String| ModelError::Safetensors { path: path.to_owned(), problem };
        if is_pickle(&file) {
            return Err(ModelError::Pickle { path: path.to_owned() });
        }
        let file_bytes = metadata.len();
        let mut prefix = [0; 8];
        if file_bytes < prefix.len() as u64 {
            return Err(damaged(format!(
                "it has {file_bytes} bytes, fewer than the 8 of the header's length"
            )));
        }
        file.read_exact_at(&mut prefix, 0).map_err(ModelError::io("read the header", path))?;
        let header_bytes = u64::from_le_bytes(prefix);
        budget.take_bytes(path, header_bytes)?;
        let data_start = 8 + header_bytes;
        if data_start > file_bytes {
            return Err(damaged(format!(
                "the header should end at byte {data_start}, but the file ends at byte {file_bytes}: it is cut off"
            )));
        }
        (&file).seek(SeekFrom::Start(8)).map_err(ModelError::io("read the header", path))?;
        let seed = UniqueMapSeed::new(budget.entries);
        let header = parse_stream((&file).take(header_bytes), seed).map_err(|error| {
            damaged(format!("the header does not parse: {}", clip(&error.to_string())))
        })?;
        budget.entries -= header.0.len();
        let tensors = check_entries(header, data_start, file_bytes).map_err(damaged)?;
        Ok(Self { path: path.to_owned(), file, tensors })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.tensors
    }

    pub(super) fn take_tensors(&mut self) -> BTreeMap<String, TensorEntry> {
        std::mem::take(&mut self.tensors)
    }

    /// Reads bytes of a tensor of this file, starting at `offset` in the tensor.
    pub fn read_bytes(
        &self,
        entry: &TensorEntry,
        offset: u64,
        dest: &mut [u8],
    ) -> Result<(), ModelError> {
        let available = (entry.range.end - entry.range.start).saturating_sub(offset);
        if dest.len() as u64 > available {
            return Err(ModelError::WrongLength {
                what: "the range to read, in bytes,",
                name: self.path.display().to_string(),
                got: dest.len(),
                expected: available as usize,
            });
        }
        self.file.read_exact_at(dest, entry.range.start + offset).map_err(ModelError::io(
            "read a tensor (did the file change since it was opened?)",
            &self.path,
        ))
    }

    /// Reads elements of a tensor of this file as `f32` or `bf16`, starting at element `first`.
    /// `name` is only for messages. Needs one chunk of memory, whatever the size.
    pub fn read_elements<E: Element>(
        &self,
        name: &str,
        entry: &TensorEntry,
        first: usize,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        if !entry.dtype.is_weight() {
            return Err(ModelError::UnsupportedDtype {
                name: clip(name),
                dtype: entry.dtype.name(),
            });
        }
        let available = entry.element_count().saturating_sub(first);
        if dest.len() > available {
            return Err(ModelError::WrongLength {
                what: "the range to read, in elements,",
                name: clip(name),
                got: dest.len(),
                expected: available,
            });
        }
        let size = entry.dtype.size_bytes();
        let mut buffer = vec![0; CHUNK_BYTES.min(dest.len() * size)];
        let mut offset = first as u64 * size as u64;
        for dest in dest.chunks_mut(CHUNK_BYTES / size) {
            let bytes = &mut buffer[..dest.len() * size];
            self.read_bytes(entry, offset, bytes)?;
            decode(entry.dtype, bytes, dest);
            offset += bytes.len() as u64;
        }
        Ok(())
    }
}

/// Checks all entries against each other and the file's length. Errors are full messages.
fn check_entries(
    header: UniqueMap<HeaderEntry>,
    data_start: u64,
    file_bytes: u64,
) -> Result<BTreeMap<String, TensorEntry>, String> {
    let mut entries = header.0;
    for (name, entry) in &entries {
        match (name == METADATA, entry) {
            (true, HeaderEntry::Metadata) | (false, HeaderEntry::Tensor(_)) => {}
            (true, HeaderEntry::Tensor(_)) => return Err("__metadata__ describes a tensor".into()),
            (false, HeaderEntry::Metadata) => {
                return Err(format!("the entry {} lacks dtype, shape or data_offsets", clip(name)));
            }
        }
    }
    // In place, because there may be many entries.
    entries.retain(|(name, _)| name != METADATA);
    entries.sort_unstable_by_key(|(_, entry)| match entry {
        HeaderEntry::Tensor(entry) => (entry.range.start, entry.range.end),
        HeaderEntry::Metadata => (0, 0),
    });
    let data_bytes = file_bytes - data_start;
    let mut end_before = 0;
    for (name, entry) in &mut entries {
        let HeaderEntry::Tensor(TensorEntry { dtype, shape, range, .. }) = entry else { continue };
        let Range { start, end } = *range;
        let tensor = || format!("tensor {} at bytes {start}..{end}", clip(name));
        if start > end {
            return Err(format!("{} ends before it starts", tensor()));
        }
        if end > data_bytes {
            return Err(format!(
                "{} lies outside the file's {data_bytes} bytes of data: it is cut off",
                tensor()
            ));
        }
        if start < end_before {
            return Err(format!(
                "{} overlaps the tensor before it, which ends at {end_before}",
                tensor()
            ));
        }
        if start > end_before {
            return Err(format!(
                "{} leaves a hole after the tensor before it, which ends at {end_before}",
                tensor()
            ));
        }
        let elements =
            shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size as u64));
        let bytes = elements.and_then(|elements| elements.checked_mul(dtype.size_bytes() as u64));
        if bytes != Some(end - start) {
            return Err(format!(
                "{} does not have the size of {shape:?} {}",
                tensor(),
                dtype.name()
            ));
        }
        end_before = end;
        *range = data_start + start..data_start + end;
    }
    if end_before != data_bytes {
        return Err(format!(
            "the tensors end at byte {end_before} of the data, the file at {data_bytes}"
        ));
    }
    Ok(entries
        .into_iter()
        .filter_map(|(name, entry)| match entry {
            HeaderEntry::Tensor(entry) => Some((name, entry)),
            HeaderEntry::Metadata => None,
        })
        .collect())
}

/// The only name that does not denote a tensor.
const METADATA: &str = "__metadata__";

/// The value of a name in the header.
enum HeaderEntry {
    /// A tensor. Its range is still relative to the start of the data.
    Tensor(TensorEntry),
    /// `__metadata__`: text that STORM does not use.
    Metadata,
}

impl<'de> Deserialize<'de> for HeaderEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntryVisitor)
    }
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = HeaderEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
        let twice = |is_second: bool| {
            if is_second { Err(A::Error::custom("a field occurs twice")) } else { Ok(()) }
        };
        while let Some(Name(key)) = map.next_key()? {
            match key.as_str() {
                "dtype" => twice(dtype.replace(map.next_value::<KnownDtype>()?.0).is_some())?,
                "shape" => twice(shape.replace(map.next_value::<Shape>()?.0).is_some())?,
                "data_offsets" => {
                    twice(data_offsets.replace(map.next_value::<[u64; 2]>()?).is_some())?
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(match (dtype, shape, data_offsets) {
            (Some(dtype), Some(shape), Some([start, end])) => {
                HeaderEntry::Tensor(TensorEntry { dtype, shape, file: 0, range: start..end })
            }
            _ => HeaderEntry::Metadata,
        })
    }
}

/// Looked up during parsing, so that the type names of all tensors need not be kept.
struct KnownDtype(Dtype);

impl<'de> Deserialize<'de> for KnownDtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(DtypeVisitor)
    }
}

struct DtypeVisitor;

impl Visitor<'_> for DtypeVisitor {
    type Value = KnownDtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a type")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<KnownDtype, E> {
        Dtype::from_name(name).map(KnownDtype).ok_or_else(|| {
            let name: String = name.chars().take(16).collect();
            E::custom(format_args!("unknown type {name}"))
        })
    }
}

/// A shape of bounded rank, so that a hostile list of a million ones does not become a
/// million-element vector.
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {RANK_MAX} sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let (mut shape, mut rank) = ([0; RANK_MAX], 0);
        while let Some(size) = seq.next_element()? {
            let Some(place) = shape.get_mut(rank) else {
                return Err(A::Error::custom(format_args!(
                    "a tensor has more than {RANK_MAX} dimensions"
                )));
            };
            *place = size;
            rank += 1;
        }
        Ok(Shape(shape[..rank].to_vec()))
    }
}
