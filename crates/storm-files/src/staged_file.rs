//! A file that appears complete or not at all.

use crate::claim;
use crate::exchange::{Exchange, exchange};
use crate::open::name_of_kind;
use crate::place::{rename_new, sync_directory};
use crate::staged_directory::StageError;
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// What to do with an existing plain file at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfPresent {
    /// Keep it.
    Refuse,
    /// Replace it.
    Replace,
}

/// A file that is written under a hidden name next to its target. Dropping it before `finish`
/// removes it.
#[derive(Debug)]
pub struct StagedFile {
    hidden: PathBuf,
    target: PathBuf,
    /// Whether there was a plain file that may be replaced.
    replaces: bool,
    /// Whether the hidden name now has something of another process, which must not be removed.
    holds_foreign: bool,
    /// Kept locked. A hidden file whose lock is free was left by a killed process.
    file: BufWriter<File>,
}

impl StagedFile {
    /// Checks that `target` may be written and creates a hidden file next to it. Removes leftovers
    /// of killed processes there.
    ///
    /// # Errors
    /// [`StageError::Refused`] if `target` is a directory, a device, a FIFO, or a file that must be
    /// kept.
    pub fn create(target: &Path, if_present: IfPresent) -> Result<StagedFile, StageError> {
        let (target, permissions) = look(target, if_present)?;
        let parent = claim::parent_of(&target);
        let prefix = claim::prefix(target.file_name().unwrap_or_default(), "writing");
        remove_leftovers(parent, prefix.as_encoded_bytes());
        let replaces = permissions.is_some();
        // The umask applies, as for any new file.
        let permissions = permissions.unwrap_or_else(|| Permissions::from_mode(0o666));
        for _ in 0..claim::ATTEMPTS {
            let hidden = tempfile::Builder::new()
                .prefix(&prefix)
                .rand_bytes(12)
                .permissions(permissions.clone())
                .tempfile_in(parent)
                .and_then(|file| Ok(file.keep()?));
            let (file, hidden) = hidden.map_err(StageError::io("create a file in", parent))?;
            if claim::lock(&file).map_err(StageError::io("lock", &hidden))? {
                let file = BufWriter::new(file);
                return Ok(StagedFile { hidden, target, replaces, holds_foreign: false, file });
            }
        }
        let source = io::Error::other("other processes keep removing it");
        Err(StageError::io("create a file in", parent)(source))
    }

    /// Flushes the file to disk and moves it to its target.
    ///
    /// # Errors
    /// [`StageError::Refused`] if something else has appeared at the target. It is kept.
    pub fn finish(self) -> Result<(), StageError> {
        self.finish_with(exchange)
    }

    fn finish_with(
        mut self,
        exchange: fn(&Path, &Path) -> io::Result<Exchange>,
    ) -> Result<(), StageError> {
        let flushed = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        flushed.map_err(StageError::io("write", &self.target))?;
        match self.replaces {
            true => self.replace(exchange)?,
            false => self.rename_to_target()?,
        }
        let parent = claim::parent_of(&self.target);
        sync_directory(parent).map_err(StageError::io("flush", parent))
    }

    fn rename_to_target(&self) -> Result<(), StageError> {
        rename_new(&self.hidden, &self.target).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => changed(),
            _ => StageError::io("write", &self.target)(error),
        })
    }

    /// Replaces a plain file, and nothing else.
    fn replace(
        &mut self,
        exchange: fn(&Path, &Path) -> io::Result<Exchange>,
    ) -> Result<(), StageError> {
        let failed = StageError::io("replace", &self.target);
        let is_plain = |path: &Path| path.symlink_metadata().is_ok_and(|found| found.is_file());
        match exchange(&self.hidden, &self.target) {
            Ok(Exchange::Done) if is_plain(&self.hidden) => Ok(()),
            Ok(Exchange::Done) => {
                let back = exchange(&self.hidden, &self.target);
                self.holds_foreign = !matches!(back, Ok(Exchange::Done));
                if self.holds_foreign {
                    return Err(StageError::refused(format!(
                        "changed while it was being written, and now has the new content; what was there is now {}",
                        self.hidden.display()
                    )));
                }
                Err(changed())
            }
            Ok(Exchange::Unsupported) if is_plain(&self.target) => {
                fs::rename(&self.hidden, &self.target).map_err(failed)
            }
            Ok(Exchange::Unsupported) => Err(changed()),
            Err(error) if error.kind() == ErrorKind::NotFound => self.rename_to_target(),
            Err(error) => Err(failed(error)),
        }
    }
}

impl Write for StagedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if !self.holds_foreign {
            // Already gone if it was renamed.
            claim::delete(|| fs::remove_file(&self.hidden));
        }
    }
}

fn changed() -> StageError {
    let problem = "changed while it was being written; its content was kept; run the command again";
    StageError::refused(problem)
}

/// The resolved target, and the permissions of the file to replace.
fn look(
    target: &Path,
    if_present: IfPresent,
) -> Result<(PathBuf, Option<Permissions>), StageError> {
    if target.file_name().is_none() {
        return Err(StageError::refused("does not name a file; add a name"));
    }
    match target.symlink_metadata() {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok((target.to_owned(), None)),
        Err(error) => return Err(StageError::io("write", target)(error)),
    }
    // Follow a link: replace the file that it points to, not the link.
    let path = target.canonicalize().map_err(StageError::io("write", target))?;
    let found = path.metadata().map_err(StageError::io("write", &path))?;
    if !found.is_file() {
        let kind = name_of_kind(found.file_type());
        return Err(StageError::refused(format!("is {kind}, not a plain file; name another")));
    }
    match if_present {
        IfPresent::Refuse => Err(StageError::refused("exists already; name another")),
        IfPresent::Replace => Ok((path, Some(found.permissions()))),
    }
}

/// Removes the files left by killed processes.
fn remove_leftovers(parent: &Path, prefix: &[u8]) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().as_encoded_bytes().starts_with(prefix) {
            continue;
        }
        if claim::open_lock(&entry.path()).is_ok_and(|file| claim::is_free(&file)) {
            fs::remove_file(entry.path()).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    fn unsupported(_: &Path, _: &Path) -> io::Result<Exchange> {
        Ok(Exchange::Unsupported)
    }

    const BOTH: [fn(&Path, &Path) -> io::Result<Exchange>; 2] = [exchange, unsupported];

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn staged(path: &Path) -> StagedFile {
        let mut file = StagedFile::create(path, IfPresent::Replace).unwrap();
        file.write_all(b"after").unwrap();
        file
    }

    fn fifo(path: &Path) {
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }

    #[test]
    fn a_file_appears_whole() {
        for before in [None, Some("before")] {
            for exchange in BOTH {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("out");
                if let Some(text) = before {
                    fs::write(&path, text).unwrap();
                    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
                }
                let file = staged(&path);
                assert_eq!(fs::read_to_string(&path).ok().as_deref(), before);
                file.finish_with(exchange).unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), "after");
                assert_eq!(names(folder.path()), ["out"]);
                let mode = path.metadata().unwrap().permissions().mode() & 0o777;
                match before {
                    Some(_) => assert_eq!(mode, 0o640),
                    None => assert_ne!(mode & 0o444, 0),
                }
            }
        }
    }

    #[test]
    fn a_dropped_one_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        drop(staged(&folder.path().join("out")));
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn only_plain_files_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fifo(&path("fifo"));
        fs::create_dir(path("folder")).unwrap();
        fs::write(path("file"), "kept").unwrap();
        std::os::unix::fs::symlink("fifo", path("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("dangling")).unwrap();
        let refusal =
            |path: &Path, if_present| StagedFile::create(path, if_present).unwrap_err().to_string();
        let replace = |path: &Path| refusal(path, IfPresent::Replace);
        assert!(replace(&path("fifo")).contains("is a FIFO, not a plain file"));
        assert!(replace(&path("link")).contains("is a FIFO, not a plain file"));
        assert!(replace(&path("folder")).contains("is a directory, not a plain file"));
        assert!(replace(Path::new("/dev/null")).contains("is a device, not a plain file"));
        assert!(replace(Path::new("/")).contains("add a name"));
        replace(&path("dangling"));
        assert!(refusal(&path("file"), IfPresent::Refuse).contains("exists already"));
        assert_eq!(names(folder.path()), ["dangling", "fifo", "file", "folder", "link"]);
    }

    #[test]
    fn what_appears_meanwhile_is_kept() {
        for exchange in BOTH {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("out");
            let file = staged(&path);
            fs::write(&path, "foreign").unwrap();
            file.finish_with(exchange).unwrap_err();
            assert_eq!(fs::read_to_string(&path).unwrap(), "foreign");
            // A plain file at the first check, but a FIFO at the end.
            let file = staged(&path);
            fs::remove_file(&path).unwrap();
            fifo(&path);
            file.finish_with(exchange).unwrap_err();
            assert!(!path.metadata().unwrap().is_file());
            assert_eq!(names(folder.path()), ["out"]);
        }
    }

    #[test]
    fn what_cannot_be_swapped_back_is_kept_and_named() {
        fn once(hidden: &Path, target: &Path) -> io::Result<Exchange> {
            match hidden.metadata()?.is_file() {
                true => exchange(hidden, target),
                false => Err(io::Error::other("the disk is gone")),
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        fs::write(&path, "before").unwrap();
        let file = staged(&path);
        fs::remove_file(&path).unwrap();
        fifo(&path);
        let problem = file.finish_with(once).unwrap_err().to_string();
        assert_eq!(fs::read_to_string(&path).unwrap(), "after");
        let names = names(folder.path());
        let [hidden, _] = &names[..] else { panic!("{names:?}") };
        assert!(problem.contains(hidden.as_str()), "{problem}");
        // It is no leftover to the next one.
        staged(&path).finish().unwrap();
        assert!(!folder.path().join(hidden).metadata().unwrap().is_file());
    }

    #[test]
    fn leftovers_are_removed_by_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        let killed = staged(&path);
        let lock = killed.file.get_ref().try_clone().unwrap();
        std::mem::forget(killed);
        lock.unlock().unwrap();
        let live = staged(&path);
        assert_eq!(names(folder.path()).len(), 1);
        staged(&path).finish().unwrap();
        assert_eq!(names(folder.path()).len(), 2, "the file and the live one");
        drop(live);
        assert_eq!(names(folder.path()), ["out"]);
    }
}
