//! The identity of a file or directory, independent of its name.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Device and inode. They stay the same when the name changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// The identity of the file at the path. Links are not followed.
    pub(crate) fn of(path: &Path) -> io::Result<Identity> {
        let metadata = path.symlink_metadata()?;
        Ok(Identity { device: metadata.dev(), inode: metadata.ino() })
    }

    pub(crate) fn to_text(self) -> String {
        format!("{}:{}", self.device, self.inode)
    }

    pub(crate) fn from_text(text: &str) -> Option<Identity> {
        let (device, inode) = text.split_once(':')?;
        Some(Identity { device: device.parse().ok()?, inode: inode.parse().ok()? })
    }
}
