//! `dataset.json` of a dataset of records, version 2 of the format.

use super::codec::Codec;
use super::column::{Column, RecordLayout};
use super::statistics::ImageStatistics;
use crate::manifest::{
    FORMAT, MANIFEST, Peek, VERSION, check_id, parse_manifest, read_json, write_manifest,
};
use crate::{DataError, Split};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// What the manifest calls its kind.
pub(crate) const KIND: &str = "records";

/// The most shards of a dataset.
pub(crate) const SHARDS_MAX: usize = 100_000;
/// The most names of classes.
const CLASS_NAMES_MAX: usize = 1 << 20;

/// What a dataset of version 2 is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Records,
}

/// One shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordShardInfo {
    /// Which part its records belong to.
    pub part: Split,
    /// Records in it.
    pub records: u64,
    /// Blocks in it.
    pub blocks: u64,
    /// Length of the file.
    pub bytes: u64,
    /// Checksum of its index.
    pub checksum: u32,
    /// Checksum of the checksums of its records, so that the dataset's id says what is in it. Those of blocks do not say it
    /// where a block is stored as it is: of bytes that end with their own CRC-32, the CRC-32 is always the same. None in
    /// datasets that were packed before this was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<u32>,
}

/// What was packed and what was left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordCounts {
    /// Files.
    pub input_files: u64,
    /// Their bytes.
    pub input_bytes: u64,
    /// Records of both parts.
    pub records: u64,
    /// Of those, held out for evaluation.
    pub held_out: u64,
    /// Bytes of the records before compression.
    pub raw_bytes: u64,
    /// Bytes of the blocks on disk, with padding.
    pub stored_bytes: u64,
    /// Inputs that could not be used and were skipped.
    pub skipped: u64,
}

/// Everything known about a dataset of records besides the records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordManifest {
    format: String,
    version: u32,
    kind: Kind,
    /// What it was packed from, in words.
    pub source: String,
    /// The columns of each record.
    pub columns: Vec<Column>,
    /// Names of the classes by their numbers; empty if they have none.
    pub class_names: Vec<String>,
    /// How blocks are compressed, where that makes them shorter.
    pub codec: Codec,
    /// What went in.
    pub counts: RecordCounts,
    /// Of the images of the training part; none for other records, and in datasets that were packed before this was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statistics: Option<ImageStatistics>,
    /// The shards, in order.
    pub shards: Vec<RecordShardInfo>,
}

impl RecordManifest {
    pub(super) fn new(
        source: String,
        columns: Vec<Column>,
        class_names: Vec<String>,
        codec: Codec,
        counts: RecordCounts,
        statistics: Option<ImageStatistics>,
        shards: Vec<RecordShardInfo>,
    ) -> RecordManifest {
        let (format, version, kind) = (FORMAT.to_owned(), VERSION, Kind::Records);
        RecordManifest {
            format,
            version,
            kind,
            source,
            columns,
            class_names,
            codec,
            counts,
            statistics,
            shards,
        }
    }

    /// Whether the records are those of CIFAR-10.
    pub fn is_cifar10(&self) -> bool {
        self.source == super::pack::CIFAR10
    }

    /// How many times shorter blocks are than their records.
    pub fn ratio(&self) -> f64 {
        self.counts.raw_bytes as f64 / self.counts.stored_bytes.max(1) as f64
    }

    /// Writes the manifest and its checksum, and returns the dataset's id.
    pub(super) fn write(&self, dir: &Path) -> Result<String, DataError> {
        write_manifest(dir, self, None)
    }

    /// Whether a folder has such a manifest.
    pub(super) fn is_one(dir: &Path) -> bool {
        let json = read_json(dir);
        let peek = json.and_then(|json| Peek::of(&dir.join(MANIFEST), &json));
        peek.is_ok_and(|peek| peek.holds_records())
    }

    /// Reads the manifest, the layout of its records, and the dataset's id.
    pub(super) fn read(dir: &Path) -> Result<(RecordManifest, RecordLayout, String), DataError> {
        let path = dir.join(MANIFEST);
        let damaged = |problem: String| DataError::damaged(&path, problem);
        let json = read_json(dir)?;
        if Peek::of(&path, &json)?.holds_tokens() {
            return Err(DataError::OtherKind {
                path: dir.to_owned(),
                holds: "tokens",
                wanted: "records such as images",
            });
        }
        let manifest: RecordManifest = parse_manifest(&path, &json, VERSION)?;
        let id = check_id(dir, &json, None)?;
        let layout = RecordLayout::new(&manifest.columns).map_err(damaged)?;
        if manifest.shards.len() > SHARDS_MAX || manifest.class_names.len() > CLASS_NAMES_MAX {
            return Err(damaged("more shards or classes than a dataset has".to_owned()));
        }
        if let Some(statistics) = &manifest.statistics {
            let channels = ImageStatistics::of_columns(&manifest.columns);
            if !channels.is_some_and(|(_, of)| statistics.is_sound(of.sums.len())) {
                return Err(damaged("statistics that no images have".to_owned()));
            }
        }
        Ok((manifest, layout, id))
    }
}
