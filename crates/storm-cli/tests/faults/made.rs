//! What a command made: all file names, and the bytes that must be the same each time.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(PartialEq, Eq)]
pub(crate) struct Made {
    names: BTreeSet<PathBuf>,
    bytes: BTreeMap<PathBuf, Vec<u8>>,
    /// Step and loss of each line of a run's metrics.
    losses: Vec<(u64, String)>,
}

impl Made {
    /// Everything below a folder.
    pub(crate) fn at(folder: &Path) -> Made {
        let names: BTreeSet<PathBuf> =
            names(folder).into_iter().filter(|name| !is_of_its_time(name)).collect();
        let exact = names.iter().filter(|name| is_exact(name) && folder.join(name).is_file());
        let read = |name: &PathBuf| fs::read(folder.join(name)).unwrap_or_default();
        let bytes = exact.map(|name| (name.clone(), read(name))).collect();
        let metrics = fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
        let loss = |line: &str| {
            let line: Value = serde_json::from_str(line).ok()?;
            Some((line["step"].as_u64()?, line.get("loss")?.to_string()))
        };
        Made { names, bytes, losses: metrics.lines().filter_map(loss).collect() }
    }

    /// What differs from the result of an undisturbed command. `None` if nothing does.
    pub(crate) fn difference(&self, undisturbed: &Made) -> Option<String> {
        let (ours, theirs) = (&self.names, &undisturbed.names);
        // A checkpoint that could not be deleted may stay, as long as it is complete.
        let is_left = |name: &&PathBuf| !is_whole_checkpoint(name);
        let left: Vec<_> = ours.difference(theirs).filter(is_left).collect();
        let missing: Vec<_> = theirs.difference(ours).collect();
        if !left.is_empty() {
            return Some(format!("{left:?} is left over"));
        }
        if !missing.is_empty() {
            return Some(format!("{missing:?} is missing"));
        }
        self.other_bytes(undisturbed).or_else(|| {
            let (ours, theirs) = (&self.losses, &undisturbed.losses);
            (ours != theirs).then(|| format!("the metrics are {ours:?}, not {theirs:?}"))
        })
    }

    /// The first file with different bytes. For a run, these are its weights.
    pub(crate) fn other_bytes(&self, undisturbed: &Made) -> Option<String> {
        let is_other = |(name, bytes): &(&PathBuf, &Vec<u8>)| self.bytes.get(*name) != Some(bytes);
        let (name, _) = undisturbed.bytes.iter().find(is_other)?;
        Some(format!("{} has other bytes", name.display()))
    }
}

/// Everything below a folder, by its path from there.
fn names(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).into_iter().flatten().flatten() {
            found.push(entry.path());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            }
        }
    }
    found.iter().map(|path| path.strip_prefix(folder).expect("below it").to_owned()).collect()
}

/// Files that each start of a run adds under a new name.
fn is_of_its_time(name: &Path) -> bool {
    name.starts_with("tensorboard")
}

/// Files without times and speeds in them.
fn is_exact(name: &Path) -> bool {
    let times = ["metrics.jsonl", "report.html", "trace.json", "config.toml"];
    let is_manifest_of_run = name.starts_with("checkpoints") && name.ends_with("manifest.json");
    !times.iter().any(|file| name.ends_with(file)) && !is_manifest_of_run
}

fn is_whole_checkpoint(name: &Path) -> bool {
    let mut parts = name.iter().filter_map(|part| part.to_str());
    let step = (parts.next() == Some("checkpoints")).then(|| parts.next()).flatten();
    let number = step.and_then(|step| step.strip_prefix("step-"));
    number.is_some_and(|number| number.len() == 8 && number.parse::<u64>().is_ok())
}
