//! Opens plain files and rejects everything else.

use rustix::fs::OFlags;
use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a plain file for reading. On a FIFO or a device, fails immediately with an error that
/// names the kind.
///
/// # Errors
/// The path cannot be opened, or is not a plain file.
pub fn open_plain(path: &Path) -> io::Result<File> {
    // Opening a FIFO for reading blocks until there is a writer, unless O_NONBLOCK is set. Plain
    // files ignore the flag.
    let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags as i32).open(path)?;
    check_plain(file.metadata()?.file_type())?;
    Ok(file)
}

/// Rejects everything but a plain file.
pub(crate) fn check_plain(kind: FileType) -> io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    let problem = format!("is {}, not a plain file", name_of_kind(kind));
    Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
}

pub(crate) fn name_of_kind(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else {
        "something special"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::io::Read;

    /// The error message of opening a path.
    fn refusal(path: &Path) -> String {
        open_plain(path).unwrap_err().to_string()
    }

    #[test]
    fn special_files_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(refusal(&fifo), "is a FIFO, not a plain file");
        assert_eq!(refusal(Path::new("/dev/zero")), "is a device, not a plain file");
        assert_eq!(refusal(folder.path()), "is a directory, not a plain file");
    }

    #[test]
    fn plain_files_are_read_through_links_too() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "text").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let mut text = String::new();
        open_plain(&link).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
    }
}
