//! The cache layout: `models--OWNER--MODEL/refs/REVISION` contains a commit, and `snapshots/COMMIT`
//! contains its files.

use crate::files::{CONFIG, SINGLE, shards};
use crate::name::is_hash;
use crate::{Hub, HubName, Snapshot, Wanted};
use std::io::Read;
use std::path::{Path, PathBuf};
use storm_files::open_plain;

impl Hub {
    /// Finds a model in the cache, if all wanted files are there.
    pub fn find(&self, name: &HubName, wanted: Wanted) -> Option<Snapshot> {
        let repository = self.repository(name);
        let revision = name.revision();
        let commit = match is_hash(revision) {
            true => revision.to_owned(),
            false => read_commit(&repository.join("refs").join(revision))?,
        };
        let directory = repository.join("snapshots").join(&commit);
        has_all(&directory, wanted).then_some(Snapshot {
            directory,
            revision: commit,
            is_new: false,
        })
    }

    pub(crate) fn repository(&self, name: &HubName) -> PathBuf {
        self.cache.join(format!("models--{}", name.repository.replace('/', "--")))
    }
}

fn read_commit(path: &Path) -> Option<String> {
    let mut text = String::new();
    open_plain(path).ok()?.take(256).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned()).filter(|commit| is_hash(commit))
}

fn has_all(directory: &Path, wanted: Wanted) -> bool {
    let has = |name: &str| directory.join(name).is_file();
    if !has(CONFIG) {
        return false;
    }
    wanted == Wanted::Config
        || has(SINGLE)
        || shards(directory).is_some_and(|shards| shards.iter().all(|name| has(name)))
}
