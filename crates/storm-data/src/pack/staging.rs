//! A directory that appears whole or not at all.

use crate::DataError;
use crate::manifest::MANIFEST;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Held locked while the directory is written to.
const LOCK: &str = "packing.lock";

/// What to do when the output directory exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IfExists {
    /// Refuse, unless it is empty.
    #[default]
    Refuse,
    /// Replace it, if it is a dataset or empty.
    Replace,
}

/// A directory beside the one to make; gone if it is dropped before it is finished.
pub(super) struct Staging {
    dir: PathBuf,
    target: PathBuf,
    /// None when it was renamed.
    lock: Option<File>,
}

impl Staging {
    pub(super) fn new(target: &Path, if_exists: IfExists) -> Result<Staging, DataError> {
        check_target(target, if_exists)?;
        let Some(name) = target.file_name() else {
            let problem = format!("{} does not name a directory", target.display());
            return Err(DataError::Option { option: "out", problem });
        };
        let parent = parent(target);
        fs::create_dir_all(parent).map_err(DataError::io(parent))?;
        let prefix = format!(".{}.packing-", name.to_string_lossy());
        remove_left_over(parent, &prefix);
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = parent.join(format!("{prefix}{}-{count}", std::process::id()));
        fs::create_dir(&dir).map_err(DataError::io(&dir))?;
        let mut staging = Staging { dir, target: target.to_owned(), lock: None };
        let lock_path = staging.dir.join(LOCK);
        let lock = File::create_new(&lock_path).map_err(DataError::io(&lock_path))?;
        lock.lock().map_err(DataError::io(&lock_path))?;
        staging.lock = Some(lock);
        Ok(staging)
    }

    /// Where to write.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Puts the directory in its place.
    pub(super) fn finish(mut self) -> Result<(), DataError> {
        let lock_path = self.dir.join(LOCK);
        fs::remove_file(&lock_path).map_err(DataError::io(&lock_path))?;
        sync_dir(&self.dir)?;
        let io = DataError::io(&self.target);
        if is_empty_or_absent(&self.target)? {
            fs::rename(&self.dir, &self.target).map_err(io)?;
        } else {
            self.exchange()?;
            fs::remove_dir_all(&self.dir).map_err(DataError::io(&self.dir))?;
        }
        self.lock = None;
        sync_dir(parent(&self.target))
    }

    /// Swaps the new directory with the old one.
    fn exchange(&self) -> Result<(), DataError> {
        let swap = renameat_with(CWD, &self.dir, CWD, &self.target, RenameFlags::EXCHANGE);
        if swap.is_ok() {
            return Ok(());
        }
        // Some file systems cannot do it at once; then there is an instant without either.
        let io = DataError::io(&self.target);
        let aside = self.dir.with_extension("old");
        fs::rename(&self.target, &aside).map_err(&io)?;
        if let Err(error) = fs::rename(&self.dir, &self.target) {
            fs::rename(&aside, &self.target).ok();
            return Err(io(error));
        }
        fs::rename(&aside, &self.dir).map_err(&io)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.lock.is_some() {
            fs::remove_dir_all(&self.dir).ok();
        }
    }
}

/// What is there may be replaced.
fn check_target(target: &Path, if_exists: IfExists) -> Result<(), DataError> {
    if is_empty_or_absent(target)? {
        return Ok(());
    }
    let refuse = |hint| Err(DataError::Exists { path: target.to_owned(), hint });
    match if_exists {
        IfExists::Refuse => refuse("choose another name, or --overwrite it"),
        IfExists::Replace if !target.join(MANIFEST).is_file() => {
            refuse("it is not a dataset and will not be replaced")
        }
        IfExists::Replace => Ok(()),
    }
}

fn is_empty_or_absent(target: &Path) -> Result<bool, DataError> {
    match fs::read_dir(target) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(DataError::io(target)(error)),
    }
}

/// Removes what packs that were killed have left: directories that nobody holds locked.
fn remove_left_over(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(prefix) {
            continue;
        }
        let lock = File::open(entry.path().join(LOCK));
        if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync_dir(dir: &Path) -> Result<(), DataError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(DataError::io(dir))
}
