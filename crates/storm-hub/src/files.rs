//! Selects the files of a model to download.

use crate::HubError;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;
use storm_files::open_plain;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Far more than the index of a thousand shards.
const INDEX_BYTES_MAX: u64 = 16 << 20;

/// Extensions of files that contain pickles or other code.
const CODE_ENDINGS: [&str; 7] = [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5"];

/// Extensions of small files to download.
const TEXT_ENDINGS: [&str; 3] = [".json", ".jinja", ".txt"];

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Whether a name denotes a file directly in the directory, on any operating system.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.starts_with('.')
        && !name.contains(['/', '\\', ':'])
        && !name.contains(char::is_control)
}

/// The small files to download from a repository: everything but the weights, including their
/// index.
pub(crate) fn small_files(all: &[String], is_carried: fn(&str) -> bool) -> Vec<String> {
    let is_wanted = |name: &&String| {
        let is_text = TEXT_ENDINGS.iter().any(|ending| name.ends_with(ending));
        let is_licence = !name.contains('.');
        let is_known = *name == CONFIG || is_carried(name) && (is_text || is_licence);
        is_plain(name) && is_known
    };
    let mut files: Vec<String> = all.iter().filter(is_wanted).cloned().collect();
    let has_single = all.iter().any(|name| name == SINGLE);
    files.extend(all.iter().find(|name| *name == INDEX && !has_single).cloned());
    files
}

/// Checks by file names whether a repository can be used.
pub(crate) fn check(model: &str, all: &[String]) -> Result<(), HubError> {
    let has = |file: &str| all.iter().any(|name| name == file);
    let name = model.to_owned();
    if has(SINGLE) || has(INDEX) {
        return match has(CONFIG) {
            true => Ok(()),
            false => Err(HubError::NotAModel { name, missing: CONFIG }),
        };
    }
    let is_code = |name: &&String| CODE_ENDINGS.iter().any(|ending| name.ends_with(ending));
    match all.iter().find(is_code).cloned() {
        Some(file) => Err(HubError::Pickle { name, file }),
        None => Err(HubError::NotAModel { name, missing: SINGLE }),
    }
}

/// The shards listed in a directory's index. `None` if the index is not readable or not valid.
pub(crate) fn shards(directory: &Path) -> Option<BTreeSet<String>> {
    let mut text = Vec::new();
    let file = open_plain(&directory.join(INDEX)).ok()?;
    file.take(INDEX_BYTES_MAX).read_to_end(&mut text).ok()?;
    let index: Index = serde_json::from_slice(&text).ok()?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let is_shard = |name: &String| is_plain(name) && name.ends_with(".safetensors");
    shards.iter().all(is_shard).then_some(shards).filter(|shards| !shards.is_empty())
}
