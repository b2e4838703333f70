//! A dataset's metadata: `dataset.json`, and the checksums of it and of the tokenizer.

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
/// The checksums of both, as `sha256sum -c` reads them.
pub(crate) const CHECKSUMS: &str = "dataset.sha256";

pub(crate) const FORMAT: &str = "storm-dataset";
pub(crate) const VERSION: u32 = 1;

/// A hundred thousand shards need less.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 16 << 20;
/// The largest tokenizers in use are 35 MB.
pub(crate) const TOKENIZER_BYTES_MAX: u64 = 128 << 20;

/// What a dataset is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One stream of documents; a row is a window of it.
    Text,
    /// Samples with loss masks; a row is packed with whole samples.
    Samples,
}

/// One shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardInfo {
    /// Token ids in it.
    pub tokens: u64,
    /// Documents or samples that start in it.
    pub samples: u64,
    /// Length of the file.
    pub bytes: u64,
    /// Checksum of its checksums.
    pub checksum: u32,
}

/// Where the part for evaluation starts; it extends to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldOut {
    /// Its first token.
    pub from_token: u64,
    /// Its first sample; for text, the first document that starts in it.
    pub from_sample: u64,
}

/// What was packed and what was left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Files.
    pub input_files: u64,
    /// Their bytes.
    pub input_bytes: u64,
    /// Documents or samples.
    pub samples: u64,
    /// Tokens.
    pub tokens: u64,
    /// Of those, the learned tokens: for text all, for samples those in the mask.
    pub learned_tokens: u64,
    /// Left out because they were empty.
    pub empty_samples: u64,
    /// Left out because none of their tokens is learned.
    pub unlearned_samples: u64,
    /// Skipped because they could not be packed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Everything known about a dataset besides its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// What it is made of.
    pub kind: Kind,
    /// The tokenizer of its tokens.
    pub tokenizer: TokenizerInfo,
    /// What went in.
    pub counts: Counts,
    /// The part for evaluation.
    pub held_out: HeldOut,
    /// The shards, in order.
    pub shards: Vec<ShardInfo>,
}

impl Manifest {
    pub(crate) fn new(
        kind: Kind,
        tokenizer: TokenizerInfo,
        counts: Counts,
        shards: Vec<ShardInfo>,
    ) -> Manifest {
        let held_out = HeldOut { from_token: counts.tokens, from_sample: counts.samples };
        let (format, version) = (FORMAT.to_owned(), VERSION);
        Manifest { format, version, kind, tokenizer, counts, held_out, shards }
    }

    /// Writes the manifest and the checksums, and returns the dataset's id. The tokenizer's copy
    /// must already be there.
    pub(crate) fn write(&self, dir: &Path) -> Result<String, DataError> {
        write_manifest(dir, self, self.tokenizer.sha256.as_deref())
    }

    /// Reads the manifest and the dataset's id.
    pub(crate) fn read(dir: &Path) -> Result<(Manifest, String), DataError> {
        let path = dir.join(MANIFEST);
        let json = read_json(dir)?;
        if peek_version(&path, &json)? == crate::records::MANIFEST_VERSION {
            return Err(DataError::OtherKind {
                path: dir.to_owned(),
                holds: "records such as images",
                wanted: "tokens",
            });
        }
        let manifest: Manifest = parse_manifest(&path, &json, VERSION)?;
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

/// A manifest that must be of this version.
pub(crate) fn parse_manifest<T: DeserializeOwned>(
    path: &Path,
    json: &[u8],
    known: u32,
) -> Result<T, DataError> {
    let damaged = |problem: String| DataError::damaged(path, problem);
    let version = peek_version(path, json)?;
    if version != known {
        return Err(damaged(format!("version {version}, this program knows {known}")));
    }
    serde_json::from_slice(json).map_err(|error| damaged(error.to_string()))
}

/// Compares a manifest with its checksum, and returns the dataset's id, which is the checksum of all checksums.
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

/// The version of a manifest, which says what the rest of it looks like.
pub(crate) fn peek_version(path: &Path, json: &[u8]) -> Result<u32, DataError> {
    #[derive(Deserialize)]
    struct Peek {
        format: String,
        version: u32,
    }
    let peek: Peek = serde_json::from_slice(json)
        .map_err(|error| DataError::damaged(path, error.to_string()))?;
    match peek.format == FORMAT {
        true => Ok(peek.version),
        false => Err(DataError::damaged(path, format!("its format is not `{FORMAT}`"))),
    }
}

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a plain file with a limit on its bytes.
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
