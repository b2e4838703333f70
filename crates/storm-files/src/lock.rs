//! Lets one process at a time change a directory.

use crate::claim;
use crate::open::check_plain;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::system::uname;
use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Enough for three short lines.
const TEXT_BYTES_MAX: u64 = 1024;

/// An exclusive lock on a directory, held until dropped.
///
/// The operating system releases the lock when the process ends, however it ends. The lock file
/// names the holder and is removed with the lock. A file left by a killed process is not locked.
#[derive(Debug)]
pub struct FolderLock {
    path: PathBuf,
    left_by: Option<Holder>,
    /// Locked as long as it is open.
    _file: File,
}

/// The process that holds a lock, as it recorded itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process ID.
    pub process: u32,
    /// The host name of its machine.
    pub host: String,
    /// When it took the lock, as a Unix timestamp in seconds.
    pub since: u64,
}

/// Why a lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds it. `None` if that process has not recorded itself yet.
    #[error("in use by {}", .0.as_ref().map_or("another process".to_owned(), Holder::to_string))]
    Held(Option<Holder>),
    /// The file system does not support locks.
    #[error("the file system has no locks: {0}")]
    Unsupported(io::Error),
    /// A file system operation failed.
    #[error("cannot lock: {0}")]
    Io(#[from] io::Error),
}

impl FolderLock {
    /// The name of the lock file.
    pub const FILE_NAME: &str = "storm.lock";

    /// Locks a directory, which must exist. Changes nothing if it is already locked.
    ///
    /// # Errors
    /// Another process holds it, or from the file system.
    pub fn acquire(folder: &Path) -> Result<FolderLock, LockError> {
        let path = folder.join(Self::FILE_NAME);
        loop {
            let (mut file, is_new) = open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(LockError::Held(Holder::read(&file))),
                Err(TryLockError::Error(error)) => {
                    if is_new {
                        claim::delete(|| fs::remove_file(&path));
                    }
                    return Err(refused(error));
                }
            }
            // The previous holder may have removed the file after it was opened here. The lock is
            // then on a file that no other process can find.
            if !is_at(&file, &path)? {
                continue;
            }
            let here = Holder::here();
            let left_by = Holder::read(&file).filter(|left| left.host != here.host);
            // The lock works without the text, and a full disk must not block a run that would free
            // space.
            let _ = here.write(&mut file);
            return Ok(FolderLock { path, left_by, _file: file });
        }
    }

    /// The process on another machine that left its lock file behind. It was killed there, or it is
    /// still running and its locks are not visible here.
    pub fn left_by(&self) -> Option<&Holder> {
        self.left_by.as_ref()
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // On failure, an unlocked file stays, and the next process takes it over.
        claim::delete(|| fs::remove_file(&self.path));
    }
}

/// Opens or creates the file. Returns whether it is new.
fn open(path: &Path) -> io::Result<(File, bool)> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags as i32);
    loop {
        match options.clone().create_new(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            file => return Ok((file?, true)),
        }
        match options.open(path) {
            // Removed by another process in between.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            file => {
                let file = file?;
                check_plain(file.metadata()?.file_type())?;
                return Ok((file, false));
            }
        }
    }
}

fn refused(error: io::Error) -> LockError {
    match Errno::from_io_error(&error) {
        Some(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => LockError::Unsupported(error),
        _ => LockError::Io(error),
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl Holder {
    fn here() -> Holder {
        let host = uname().nodename().to_string_lossy().into_owned();
        Holder { process: std::process::id(), host, since: now() }
    }

    fn read(mut file: &File) -> Option<Holder> {
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).ok()?;
        file.take(TEXT_BYTES_MAX).read_to_string(&mut text).ok()?;
        let field =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        // The host name is shown on terminals.
        let host = field("host")?.chars().filter(|letter| !letter.is_control()).collect();
        Some(Holder {
            process: field("process")?.parse().ok()?,
            host,
            since: field("since")?.parse().ok()?,
        })
    }

    fn write(&self, file: &mut File) -> io::Result<()> {
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
        let Holder { process, host, since } = self;
        file.write_all(format!("process {process}\nhost {host}\nsince {since}\n").as_bytes())
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let minutes = now().saturating_sub(self.since) / 60;
        write!(f, "process {} on {}, for ", self.process, self.host)?;
        match (minutes / 60, minutes % 60) {
            (0, 0) => f.write_str("less than a minute"),
            (0, minutes) => write!(f, "{minutes} min"),
            (hours, minutes) => write!(f, "{hours} h {minutes} min"),
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    fn held(folder: &Path) -> Option<Holder> {
        match FolderLock::acquire(folder).unwrap_err() {
            LockError::Held(holder) => holder,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn one_at_a_time_and_the_holder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FolderLock::FILE_NAME);
        let lock = FolderLock::acquire(folder.path()).unwrap();
        let text = fs::read(&file).unwrap();
        let holder = held(folder.path()).expect("it names its holder");
        assert_eq!(holder, Holder { since: holder.since, ..Holder::here() });
        let words = format!("in use by process {} on {}, for", holder.process, holder.host);
        let error = FolderLock::acquire(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with(&words), "{error}");
        assert_eq!(fs::read(&file).unwrap(), text, "a refused process changes nothing");
        drop(lock);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        FolderLock::acquire(folder.path()).unwrap();
    }

    #[test]
    fn what_a_killed_process_left_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FolderLock::FILE_NAME);
        let here = Holder::here().host;
        for (text, left) in [
            (format!("process 7\nhost {here}\nsince 9\n"), None),
            ("process 7\nhost far\u{1b}[2J-away\nsince 9\n".to_owned(), Some("far[2J-away")),
            ("no lock at all".to_owned(), None),
            (String::new(), None),
        ] {
            fs::write(&file, text).unwrap();
            let lock = FolderLock::acquire(folder.path()).unwrap();
            assert_eq!(lock.left_by().map(|left| left.host.as_str()), left);
            assert_eq!(held(folder.path()).unwrap().process, std::process::id());
        }
    }

    #[test]
    fn a_lock_on_a_removed_file_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FolderLock::FILE_NAME);
        let (opened, _) = open(&path).unwrap();
        assert!(is_at(&opened, &path).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(!is_at(&opened, &path).unwrap());
        let _lock = FolderLock::acquire(folder.path()).unwrap();
        assert!(!is_at(&opened, &path).unwrap());
    }

    #[test]
    fn special_files_are_no_locks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FolderLock::FILE_NAME);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let error = FolderLock::acquire(folder.path()).unwrap_err().to_string();
        assert_eq!(error, "cannot lock: is a FIFO, not a plain file");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        FolderLock::acquire(folder.path()).unwrap_err();
        assert!(!folder.path().join("elsewhere").exists());
    }
}
