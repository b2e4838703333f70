//! A dataset's metadata: `dataset.json`, and the checksums of that file and of the tokenizer.

use crate::records::{Codec, RecordCounts, RecordShardInfo};
use crate::{DataError, TokenizerInfo};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::Path;
use storm_files::open_plain;

/// The manifest's file.
pub(crate) const MANIFEST: &str = "dataset.json";
/// The copy of the tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// The checksums of both, in the format of `sha256sum -c`.
pub(crate) const CHECKSUMS: &str = "dataset.sha256";

pub(crate) const FORMAT: &str = "storm-dataset";
/// Version of text datasets that are mapped into memory.
const MAPPED_VERSION: u32 = 1;
/// Version of datasets with blocks.
pub(crate) const VERSION: u32 = 2;

/// More than a hundred thousand shards need.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 16 << 20;
/// The largest tokenizers in use are 35 MB.
pub(crate) const TOKENIZER_BYTES_MAX: u64 = 128 << 20;

/// What a dataset contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One stream of documents. A row is a window of the stream.
    Text,
    /// Samples with loss masks. A row is packed with whole samples.
    Samples,
}

/// One shard of version 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardInfo {
    /// Token ids in it.
    pub tokens: u64,
    /// Documents or samples that start in it.
    pub samples: u64,
    /// Length of the file.
    pub bytes: u64,
    /// Checksum over the checksums of its blocks.
    pub checksum: u32,
}

/// Where the held-out part starts. It extends to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldOut {
    /// Its first token.
    pub from_token: u64,
    /// Its first sample. For text, the first document that starts in it.
    pub from_sample: u64,
}

/// What was packed and what was skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Input files.
    pub input_files: u64,
    /// Bytes of the input files.
    pub input_bytes: u64,
    /// Documents or samples packed.
    pub samples: u64,
    /// Tokens packed.
    pub tokens: u64,
    /// Tokens that count in the loss: all for text, those in the mask for samples.
    pub learned_tokens: u64,
    /// Skipped because they were empty.
    pub empty_samples: u64,
    /// Skipped because none of their tokens counts in the loss.
    pub unlearned_samples: u64,
    /// Skipped because they could not be packed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The blocks of a dataset. Version 2 only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stored {
    /// How blocks are compressed. A block that would not shrink is stored as is.
    pub codec: Codec,
    /// Token ids and masks.
    pub tokens: StoredStream,
    /// The first token of each document or sample.
    pub starts: StoredStream,
}

/// A long sequence of elements in shards of blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredStream {
    /// Bytes before compression.
    pub raw_bytes: u64,
    /// Bytes of its blocks on disk, including padding.
    pub stored_bytes: u64,
    /// Its shards, in order.
    pub shards: Vec<RecordShardInfo>,
}

impl StoredStream {
    pub(crate) fn new(counts: &RecordCounts, shards: Vec<RecordShardInfo>) -> StoredStream {
        let RecordCounts { raw_bytes, stored_bytes, .. } = *counts;
        StoredStream { raw_bytes, stored_bytes, shards }
    }
}

/// The metadata of a dataset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// What it contains.
    pub kind: Kind,
    /// The tokenizer that produced its tokens.
    pub tokenizer: TokenizerInfo,
    /// What was packed.
    pub counts: Counts,
    /// The held-out part.
    pub held_out: HeldOut,
    /// The shards of version 1, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<ShardInfo>,
    /// The blocks of version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<Stored>,
}

impl Manifest {
    pub(crate) fn new(
        kind: Kind,
        tokenizer: TokenizerInfo,
        counts: Counts,
        stored: Stored,
    ) -> Manifest {
        let held_out = HeldOut { from_token: counts.tokens, from_sample: counts.samples };
        let (format, version, shards) = (FORMAT.to_owned(), VERSION, Vec::new());
        let stored = Some(stored);
        Manifest { format, version, kind, tokenizer, counts, held_out, shards, stored }
    }

    /// How many files hold its tokens and starts.
    pub fn shard_count(&self) -> usize {
        let streams = self.stored.iter().flat_map(|stored| [&stored.tokens, &stored.starts]);
        self.shards.len() + streams.map(|stream| stream.shards.len()).sum::<usize>()
    }

    /// Bytes of those files.
    pub fn shard_bytes(&self) -> u64 {
        let streams = self.stored.iter().flat_map(|stored| [&stored.tokens, &stored.starts]);
        let stored = streams.flat_map(|stream| &stream.shards).map(|shard| shard.bytes);
        self.shards.iter().map(|shard| shard.bytes).chain(stored).sum()
    }

    /// The codec, and the compression ratio of the token blocks. Version 1 has no blocks.
    pub fn codec(&self) -> (Codec, f64) {
        match &self.stored {
            None => (Codec::None, 1.0),
            Some(Stored { codec, tokens, .. }) => {
                (*codec, tokens.raw_bytes as f64 / tokens.stored_bytes.max(1) as f64)
            }
        }
    }

    /// Writes the manifest and the checksums, and returns the dataset's id. The copy of the
    /// tokenizer must already exist.
    pub(crate) fn write(&self, dir: &Path) -> Result<String, DataError> {
        write_manifest(dir, self, self.tokenizer.sha256.as_deref())
    }

    /// Reads the manifest and the dataset's id.
    pub(crate) fn read(dir: &Path) -> Result<(Manifest, String), DataError> {
        let path = dir.join(MANIFEST);
        let json = read_json(dir)?;
        let peek = Peek::of(&path, &json)?;
        if peek.holds_records() {
            return Err(DataError::OtherKind {
                path: dir.to_owned(),
                holds: "records such as images",
                wanted: "tokens",
            });
        }
        let known = [MAPPED_VERSION, VERSION].into_iter().find(|version| *version == peek.version);
        let manifest: Manifest = parse_manifest(&path, &json, known.unwrap_or(VERSION))?;
        if manifest.stored.is_some() != (manifest.version == VERSION)
            || manifest.stored.is_some() && !manifest.shards.is_empty()
        {
            let problem = "its shards are not those of its version";
            return Err(DataError::damaged(&path, problem));
        }
        let id = check_id(dir, &json, manifest.tokenizer.sha256.as_deref())?;
        Ok((manifest, id))
    }
}

/// Writes a manifest of any version and the checksums, and returns the dataset's id.
pub(crate) fn write_manifest(
    dir: &Path,
    manifest: &impl Serialize,
    tokenizer_sha256: Option<&str>,
) -> Result<String, DataError> {
    let mut json = serde_json::to_vec_pretty(manifest)
        .map_err(|error| DataError::damaged(dir, error.to_string()))?;
    json.push(b'\n');
    write_file(&dir.join(MANIFEST), &json)?;
    write_file(&dir.join(CHECKSUMS), checksums(&json, tokenizer_sha256).as_bytes())?;
    Ok(sha256_hex(&json))
}

/// The bytes of a manifest of any version.
pub(crate) fn read_json(dir: &Path) -> Result<Vec<u8>, DataError> {
    let path = dir.join(MANIFEST);
    if !path.is_file() {
        let problem = format!("it has no {MANIFEST}");
        return Err(DataError::NotADataset { path: dir.to_owned(), problem });
    }
    read_file(&path, MANIFEST_BYTES_MAX)
}

/// Parses a manifest that must be of this version.
pub(crate) fn parse_manifest<T: DeserializeOwned>(
    path: &Path,
    json: &[u8],
    known: u32,
) -> Result<T, DataError> {
    let damaged = |problem: String| DataError::damaged(path, problem);
    let version = Peek::of(path, json)?.version;
    if version != known {
        return Err(damaged(format!("version {version}, this program knows {known}")));
    }
    serde_json::from_slice(json).map_err(|error| damaged(error.to_string()))
}

/// Verifies the checksums, and returns the dataset's id, which is the SHA-256 of the manifest.
pub(crate) fn check_id(
    dir: &Path,
    json: &[u8],
    tokenizer_sha256: Option<&str>,
) -> Result<String, DataError> {
    let written = read_file(&dir.join(CHECKSUMS), MANIFEST_BYTES_MAX)?;
    match written == checksums(json, tokenizer_sha256).as_bytes() {
        true => Ok(sha256_hex(json)),
        false => {
            let problem = format!("it does not match {CHECKSUMS}");
            Err(DataError::damaged(&dir.join(MANIFEST), problem))
        }
    }
}

/// The text of the checksum file.
fn checksums(json: &[u8], tokenizer_sha256: Option<&str>) -> String {
    let mut text = format!("{}  {MANIFEST}\n", sha256_hex(json));
    if let Some(sha256) = tokenizer_sha256 {
        text += &format!("{sha256}  {TOKENIZER}\n");
    }
    text
}

/// The fields of a manifest that determine the layout of the rest.
#[derive(Deserialize)]
pub(crate) struct Peek {
    format: String,
    version: u32,
    #[serde(default)]
    kind: serde_json::Value,
}

impl Peek {
    pub(crate) fn of(path: &Path, json: &[u8]) -> Result<Peek, DataError> {
        let peek: Peek = serde_json::from_slice(json)
            .map_err(|error| DataError::damaged(path, error.to_string()))?;
        match peek.format == FORMAT {
            true => Ok(peek),
            false => Err(DataError::damaged(path, format!("its format is not `{FORMAT}`"))),
        }
    }

    /// Tokens rather than records.
    pub(crate) fn holds_tokens(&self) -> bool {
        self.version == MAPPED_VERSION || self.kind == "text" || self.kind == "samples"
    }

    /// Records rather than tokens.
    pub(crate) fn holds_records(&self) -> bool {
        self.version == VERSION && self.kind == crate::records::KIND
    }
}

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a regular file, up to a size limit.
pub(crate) fn read_file(path: &Path, bytes_max: u64) -> Result<Vec<u8>, DataError> {
    let io = DataError::io(path);
    let file = open_plain(path).map_err(|error| match error.kind() {
        ErrorKind::InvalidInput => DataError::input(path, error.to_string()),
        _ => io(error),
    })?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(&io)?;
    if bytes.len() as u64 > bytes_max {
        return Err(DataError::input(path, format!("more than {bytes_max} bytes")));
    }
    Ok(bytes)
}

/// Writes a new file and flushes it to disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let io = DataError::io(path);
    let mut file = File::create_new(path).map_err(&io)?;
    file.write_all(bytes).map_err(&io)?;
    file.sync_all().map_err(&io)
}
