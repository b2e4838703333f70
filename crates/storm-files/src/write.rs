//! Writing plain files so that a reader never finds half of one.

use crate::open::check_plain;
use crate::place::sync_directory;
use rustix::fs::OFlags;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Writes a file under another name, waits until it is on the disk, and puts it in the place of `path`. After
/// an error, or a crash at any moment, `path` is what it was.
///
/// One process at a time may do so for the same path.
///
/// # Errors
/// From `fill` or the file system, or what is at `path` is not a plain file.
pub fn replace_file(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let partial = partial_of(path);
    remove_if_there(&partial)?;
    let write = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create_new(&partial)?);
        fill(&mut out)?;
        out.flush()?;
        out.get_ref().sync_all()?;
        if let Ok(metadata) = fs::metadata(path) {
            check_plain(metadata.file_type())?;
        }
        fs::rename(&partial, path)
    };
    let written = write();
    if written.is_err() {
        // The error that matters is the one above.
        let _ = fs::remove_file(&partial);
    }
    written?;
    sync_directory(path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(".".as_ref()))
}

/// Opens a plain file to write at its end; makes it if it is not there.
///
/// # Errors
/// From the file system, or what is at `path` is not a plain file.
pub fn append_plain(path: &Path) -> io::Result<File> {
    // Without the flag, opening a FIFO would block until a reader comes.
    let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
    let file =
        OpenOptions::new().append(true).create(true).custom_flags(flags as i32).open(path)?;
    check_plain(file.metadata()?.file_type())?;
    Ok(file)
}

fn partial_of(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".partial");
    name.into()
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        replace_file(&path, |out| out.write_all(b"first")).unwrap();
        // Left by a process that was killed.
        fs::write(partial_of(&path), "half").unwrap();
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
        assert_eq!(error.to_string(), "is a FIFO, not a plain file");
        append_plain(Path::new("/dev/null")).unwrap_err();
        // A FIFO under the name that is written first is no obstacle.
        fs::rename(&path, partial_of(&path)).unwrap();
        replace_file(&path, |out| out.write_all(b"text")).unwrap();
        append_plain(&path).unwrap().write_all(b" and more").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "text and more");
    }
}
