//! The folder of a run: locked to one process, and never overwritten when a run starts over.

use crate::UsageError;
use anyhow::{Context, Result, anyhow};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use storm_files::{FolderLock, LockError, rename_new, sync_directory};
use storm_train::{Checkpoints, Disk, Progress};

/// How a run starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// In a folder without checkpoints.
    Fresh,
    /// From the newest checkpoint.
    Resume,
    /// Over again, after moving the folder's earlier contents aside.
    Anew,
}

const CHECKPOINTS: &str = "checkpoints";

/// Prefix of the folders that earlier contents are moved to; a number follows.
const BEFORE: &str = "before-";

/// A run's folder, locked by this process.
pub(super) struct Claimed {
    /// `None` on file systems without locks.
    pub(super) lock: Option<FolderLock>,
    /// The progress of the checkpoint that the run resumes from.
    pub(super) before: Option<Progress>,
}

/// Opens the checkpoints of a run.
pub(super) fn checkpoints(folder: &Path) -> Result<Checkpoints> {
    Ok(Checkpoints::open(&folder.join(CHECKPOINTS), Disk)?)
}

/// The checkpoint a run in this folder would start from: like [`claim`], but creates and locks nothing.
pub(super) fn look(folder: &Path, start: Start) -> Result<Option<Progress>> {
    let path = folder.join(CHECKPOINTS);
    match path.is_dir() {
        true => begins_from(folder, &Checkpoints::reading(&path, Disk), start),
        false => Ok(None),
    }
}

/// Creates and locks a run's folder. Refuses a fresh start where a run already exists.
pub(super) fn claim(folder: &Path, start: Start) -> Result<Claimed> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let lock = lock(folder)?;
    if start == Start::Anew
        && let Some(aside) = set_aside(folder)
            .with_context(|| format!("cannot set aside what is in {}", folder.display()))?
    {
        eprintln!("the previous run is now in {}", aside.display());
    }
    let before = begins_from(folder, &checkpoints(folder)?, start)?;
    Ok(Claimed { lock, before })
}

fn begins_from(folder: &Path, checkpoints: &Checkpoints, start: Start) -> Result<Option<Progress>> {
    match start {
        Start::Resume => Ok(checkpoints.newest_progress()?),
        Start::Anew => Ok(None),
        Start::Fresh if checkpoints.steps()?.is_empty() => Ok(None),
        Start::Fresh => {
            let problem = format!(
                "{} has checkpoints already; continue with --resume, give another --name, or set them aside with \
                 --begin-anew",
                folder.display()
            );
            Err(UsageError(problem).into())
        }
    }
}

fn lock(folder: &Path) -> Result<Option<FolderLock>> {
    let shown = folder.display();
    match FolderLock::acquire(folder) {
        Ok(lock) => {
            if let Some(left) = lock.left_by() {
                eprintln!(
                    "warning: {shown} was left by process {} on {}; make sure that it no longer runs there",
                    left.process, left.host
                );
            }
            Ok(Some(lock))
        }
        Err(error @ LockError::Unsupported(_)) => {
            eprintln!("warning: {shown}: {error}; make sure that nothing else uses this run");
            Ok(None)
        }
        Err(error @ LockError::Held(_)) => {
            Err(anyhow!("{shown} is {error}; wait until it ends, or give another --name"))
        }
        Err(error @ LockError::Io(_)) => {
            Err(anyhow!("{}: {error}", folder.join(FolderLock::FILE_NAME).display()))
        }
    }
}

/// Moves everything an earlier run left into a new subfolder and returns its path; `None` if there was nothing.
fn set_aside(folder: &Path) -> io::Result<Option<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let is_before = name.to_str().is_some_and(|name| name.starts_with(BEFORE));
        if !is_before && name != FolderLock::FILE_NAME {
            names.push(name);
        }
    }
    if names.is_empty() {
        return Ok(None);
    }
    // Move checkpoints last: while they are in place, the folder still counts as an existing run's.
    names.sort_by_key(|name: &OsString| name == CHECKPOINTS);
    let aside = new_folder(folder)?;
    for name in names {
        rename_new(&folder.join(&name), &aside.join(&name))?;
    }
    sync_directory(&aside)?;
    sync_directory(folder)?;
    Ok(Some(aside))
}

fn new_folder(folder: &Path) -> io::Result<PathBuf> {
    let mut number = 1;
    loop {
        let path = folder.join(format!("{BEFORE}{number}"));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            created => return created.map(|()| path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_a_run_is_set_aside_and_nothing_twice() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let _lock = FolderLock::acquire(folder.path()).unwrap();
        assert_eq!(set_aside(folder.path()).unwrap(), None);
        for round in 1..=2 {
            fs::create_dir(path(CHECKPOINTS)).unwrap();
            fs::write(path("metrics.jsonl"), round.to_string()).unwrap();
            assert_eq!(set_aside(folder.path()).unwrap(), Some(path(&format!("before-{round}"))));
        }
        for round in 1..=2 {
            let aside = path(&format!("before-{round}"));
            assert!(aside.join(CHECKPOINTS).is_dir());
            assert_eq!(fs::read_to_string(aside.join("metrics.jsonl")).unwrap(), round.to_string());
        }
        let mut left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["before-1", "before-2", FolderLock::FILE_NAME]);
    }
}
