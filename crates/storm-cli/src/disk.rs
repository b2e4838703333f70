//! What a disk has room for, and how fast it writes.

use rustix::fs::statfs;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The most that is written to see how fast that goes.
const TRIAL_BYTES_MAX: u64 = 64 << 20;

/// Room for files of this user below a directory.
pub(crate) fn free_bytes(dir: &Path) -> io::Result<u64> {
    let status = statfs(dir)?;
    Ok(status.f_bavail.saturating_mul(u64::try_from(status.f_bsize).unwrap_or(0)))
}

/// Room where a path is to be made: that of the nearest folder above it that is there; none if the disk does not say.
pub(crate) fn free_bytes_for(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let above = path.ancestors().find(|folder| folder.is_dir())?;
    free_bytes(above).ok()
}

/// Bytes per second, flushed to disk, of a file of this size, or of 64 MiB if that is less.
pub(crate) fn write_speed(dir: &Path, file_bytes: u64) -> io::Result<u64> {
    let trial = Trial(dir.join(format!(".storm-trial-{}", std::process::id())));
    let mut file = File::create_new(&trial.0)?;
    // Not zeros: some disks compress.
    let block: Vec<u8> =
        (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let bytes = file_bytes.clamp(1, TRIAL_BYTES_MAX);
    let start = Instant::now();
    let mut left = bytes as usize;
    while left > 0 {
        let count = left.min(block.len());
        file.write_all(&block[..count])?;
        left -= count;
    }
    file.sync_all()?;
    Ok((bytes as f64 / start.elapsed().as_secs_f64()) as u64)
}

/// A file that is gone afterwards.
struct Trial(PathBuf);

impl Drop for Trial {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_speed(folder.path(), u64::MAX).unwrap() > 0);
        assert!(write_speed(folder.path(), 3 << 19).unwrap() > 0);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(free_bytes(folder.path()).unwrap() > 0);
        assert!(free_bytes_for(&folder.path().join("not/there")).unwrap() > 0);
    }
}
