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

/// The kind in the manifest.
pub(crate) const KIND: &str = "records";

/// Limit on shards of a dataset.
pub(crate) const SHARDS_MAX: usize = 100_000;
/// Limit on class names.
const CLASS_NAMES_MAX: usize = 1 << 20;

/// The contents of a dataset of version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Records,
}

/// One shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordShardInfo {
    /// The part that its records belong to.
    pub part: Split,
    /// Records in it.
    pub records: u64,
    /// Blocks in it.
    pub blocks: u64,
    /// Length of the file.
    pub bytes: u64,
    /// Checksum of its index.
    pub checksum: u32,
    /// Checksum over the checksums of its records, so that the dataset's id depends on its
    /// contents. The checksums of uncompressed blocks do not: the CRC-32 of bytes that end with
    /// their own CRC-32 is constant. `None` in datasets packed before this field existed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<u32>,
}

/// What was packed and what was skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordCounts {
    /// Input files.
    pub input_files: u64,
    /// Bytes of the input files.
    pub input_bytes: u64,
    /// Records of both parts.
    pub records: u64,
    /// Records held out for evaluation.
    pub held_out: u64,
    /// Bytes of the records before compression.
    pub raw_bytes: u64,
    /// Bytes of the blocks on disk, including padding.
    pub stored_bytes: u64,
    /// Inputs that could not be used.
    pub skipped: u64,
}

/// The metadata of a dataset of records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordManifest {
    format: String,
    version: u32,
    kind: Kind,
    /// A description of its source.
    pub source: String,
    /// The columns of each record.
    pub columns: Vec<Column>,
    /// Names of the classes by index. Empty if they have none.
    pub class_names: Vec<String>,
    /// How blocks are compressed. A block that would not shrink is stored as is.
    pub codec: Codec,
    /// What was packed.
    pub counts: RecordCounts,
    /// Statistics of the training images. `None` for other records, and in datasets packed before
    /// this field existed.
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

    /// Whether the source is CIFAR-10.
    pub fn is_cifar10(&self) -> bool {
        self.source == super::pack::CIFAR10
    }

    /// Compression ratio.
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
