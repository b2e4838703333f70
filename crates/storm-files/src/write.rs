//! Writes plain files so that a reader never sees a partial one.

use crate::open::check_plain;
use crate::{IfPresent, StageError, StagedFile};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file under another name, flushes it to disk, and renames it to `path`. After an error
/// or a crash at any moment, `path` is either unchanged or complete.
///
/// # Errors
/// From `fill` or the file system, or `path` is not a plain file.
pub fn replace_file(
    path: &Path,
    fill: impl FnOnce(&mut StagedFile) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = StagedFile::create(path, IfPresent::Replace).map_err(StageError::into_io)?;
    fill(&mut out)?;
    out.finish().map_err(StageError::into_io)
}

/// Opens a plain file for appending. Creates it if it does not exist.
///
/// # Errors
/// From the file system, or `path` is not a plain file.
pub fn append_plain(path: &Path) -> io::Result<File> {
    // Without O_NONBLOCK, opening a FIFO would block until there is a reader.
    let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
    let file =
        OpenOptions::new().append(true).create(true).custom_flags(flags as i32).open(path)?;
    check_plain(file.metadata()?.file_type())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::fs;
    use std::io::Write;

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        replace_file(&path, |out| out.write_all(b"first")).unwrap();
        replace_file(&path, |out| out.write_all(b"second")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        let failed = replace_file(&path, |out| {
            out.write_all(b"third")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn special_files_are_neither_written_nor_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        append_plain(&path).unwrap_err();
        let error = replace_file(&path, |out| out.write_all(b"text")).unwrap_err();
        assert!(error.to_string().contains("FIFO"), "{error}");
        append_plain(Path::new("/dev/null")).unwrap_err();
        fs::remove_file(&path).unwrap();
        replace_file(&path, |out| out.write_all(b"text")).unwrap();
        append_plain(&path).unwrap().write_all(b" and more").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "text and more");
    }
}
