//! The manifest of a checkpoint.
//!
//! The file is `{"blake3":"…","manifest":…}`. The hash covers everything after it, so that any change to the manifest
//! is detected.

use super::CheckpointError;
use crate::PredictState;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use storm_files::open_plain;

pub(super) const FILE_NAME: &str = "manifest.json";

/// The newest format that this program writes and reads. Checkpoints without predictions still use the format before
/// it, so that older programs, which cannot resume predictions, can read them.
const FORMAT: u32 = 2;
const FORMAT_WITHOUT_PREDICTIONS: u32 = 1;

/// Size limit. The manifest of a run with every option set takes a few kilobytes.
const BYTES_MAX: u64 = 1 << 20;

const BEFORE_HASH: &str = "{\"blake3\":\"";
const AFTER_HASH: &str = "\",\"manifest\":";
const HASH_LETTERS: usize = 2 * blake3::OUT_LEN;

/// The progress of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps made, whether they updated anything or not.
    pub step: u64,
    /// Updates made; together with the seed, the whole state of the random generator.
    pub updates: u32,
    /// Tokens or samples read.
    #[serde(rename = "tokens", alias = "units")]
    pub units: u64,
    /// The position in the data, in the format of the data source.
    pub data: serde_json::Value,
    /// The best evaluation so far.
    pub best: Option<Best>,
    /// Evaluations since the best one.
    pub evaluations_without_gain: u32,
    /// Every resolved setting of the run, including the micro-batch size.
    pub settings: BTreeMap<String, String>,
    /// The device and the versions of its libraries. Resuming is bitwise exact only on the same ones.
    pub device: String,
    /// State of predictions, if the run predicts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predict: Option<PredictState>,
}

/// The best evaluation of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The step of the evaluation.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
}

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its hash.
    pub blake3: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format: u32,
    pub(super) storm_version: String,
    pub(super) progress: Progress,
    pub(super) files: Vec<FileEntry>,
}

impl Manifest {
    pub(super) fn new(progress: Progress, files: Vec<FileEntry>) -> Manifest {
        let storm_version = env!("CARGO_PKG_VERSION").to_owned();
        let format = match progress.predict {
            Some(_) => FORMAT,
            None => FORMAT_WITHOUT_PREDICTIONS,
        };
        Manifest { format, storm_version, progress, files }
    }

    pub(super) fn to_text(&self) -> String {
        let json = serde_json::to_string_pretty(self).expect("maps of strings and numbers");
        let body = format!("{json}}}\n");
        let hash = blake3::hash(body.as_bytes()).to_hex();
        format!("{BEFORE_HASH}{hash}{AFTER_HASH}{body}")
    }

    pub(super) fn read(path: &Path) -> Result<Manifest, CheckpointError> {
        let file = open_plain(path).map_err(CheckpointError::io("open", path))?;
        let mut text = Vec::new();
        file.take(BYTES_MAX + 1)
            .read_to_end(&mut text)
            .map_err(CheckpointError::io("read", path))?;
        let damaged = |problem: String| CheckpointError::Damaged { path: path.to_owned(), problem };
        let body = checked_body(&text).map_err(|problem| damaged(problem.to_owned()))?;
        let json = body.strip_suffix("}\n").unwrap_or(body);
        // Read the format number first: the other fields depend on it.
        let known: Numbered =
            serde_json::from_str(json).map_err(|error| damaged(error.to_string()))?;
        if known.format > FORMAT {
            let (path, format) = (path.to_owned(), known.format);
            return Err(CheckpointError::Newer { path, format, known: FORMAT });
        }
        serde_json::from_str(json).map_err(|error| damaged(error.to_string()))
    }
}

#[derive(Deserialize)]
struct Numbered {
    format: u32,
}

/// Returns what follows the hash, if the hash matches.
fn checked_body(text: &[u8]) -> Result<&str, &'static str> {
    if text.len() as u64 > BYTES_MAX {
        return Err("it is longer than any manifest");
    }
    let text = std::str::from_utf8(text).map_err(|_| "it is not text")?;
    let form = "it does not begin as a manifest does";
    let rest = text.strip_prefix(BEFORE_HASH).ok_or(form)?;
    let (hash, rest) = rest.split_at_checked(HASH_LETTERS).ok_or(form)?;
    let body = rest.strip_prefix(AFTER_HASH).ok_or(form)?;
    match blake3::hash(body.as_bytes()).to_hex().as_str() == hash {
        true => Ok(body),
        false => Err("its hash is not that of its contents"),
    }
}
