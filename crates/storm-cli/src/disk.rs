//! Free space, medium and write speed of a disk.

use rustix::fs::{major, minor, stat, statfs};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Most bytes written to measure the write speed.
const TRIAL_BYTES_MAX: u64 = 64 << 20;

/// The storage medium under a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    Nvme,
    SolidState,
    Rotating,
    Network,
    Memory,
    Unknown,
}

impl Medium {
    pub(crate) fn words(self) -> &'static str {
        match self {
            Medium::Nvme => "NVMe",
            Medium::SolidState => "a solid-state disk, or a virtual one",
            Medium::Rotating => "a rotating disk, or a virtual one that says so",
            Medium::Network => "a network file system",
            Medium::Memory => "memory: gone after a restart, and counts against RAM",
            Medium::Unknown => "a disk of unknown kind",
        }
    }

    /// Whether the medium is likely too slow to use during steps.
    pub(crate) fn is_slow(self) -> bool {
        matches!(self, Medium::Rotating | Medium::Network)
    }
}

/// Bytes free for this user on the file system of a directory.
pub(crate) fn free_bytes(dir: &Path) -> io::Result<u64> {
    let status = statfs(dir)?;
    Ok(status.f_bavail.saturating_mul(u64::try_from(status.f_bsize).unwrap_or(0)))
}

/// Bytes free where a path would be created, from its nearest existing ancestor; `None` if that cannot be queried.
pub(crate) fn free_bytes_for(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let above = path.ancestors().find(|folder| folder.is_dir())?;
    free_bytes(above).ok()
}

/// Write speed in bytes per second, including the flush, measured with a file of this size but at most 64 MiB.
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

/// Finds the storage medium under a directory.
pub(crate) fn medium(dir: &Path) -> Medium {
    if let Ok(status) = statfs(dir)
        && let Some(medium) = of_file_system(status.f_type as u32)
    {
        return medium;
    }
    let Ok(status) = stat(dir) else { return Medium::Unknown };
    let device = format!("/sys/dev/block/{}:{}", major(status.st_dev), minor(status.st_dev));
    of_block_device(&device).unwrap_or(Medium::Unknown)
}

/// The medium by file system type (`f_type` of `statfs`).
fn of_file_system(number: u32) -> Option<Medium> {
    match number {
        // tmpfs, ramfs
        0x0102_1994 | 0x8584_58f6 => Some(Medium::Memory),
        // nfs, smb, smb2, cifs, ceph, lustre, 9p, afs
        0x6969 | 0x517b | 0xfe53_4d42 | 0xff53_4d42 | 0x00c3_6400 | 0x0bd0_0bd0 | 0x0102_1997
        | 0x5346_414f => Some(Medium::Network),
        _ => None,
    }
}

/// The medium of a block device or partition, from sysfs.
fn of_block_device(device: &str) -> Option<Medium> {
    let folder = fs::canonicalize(device).ok()?;
    if folder.components().any(|part| part.as_os_str().to_string_lossy().starts_with("nvme")) {
        return Some(Medium::Nvme);
    }
    let rotational = [folder.as_path(), folder.parent()?]
        .into_iter()
        .find_map(|folder| fs::read_to_string(folder.join("queue/rotational")).ok())?;
    match rotational.trim() {
        "0" => Some(Medium::SolidState),
        "1" => Some(Medium::Rotating),
        _ => None,
    }
}

/// A temporary file, deleted on drop.
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

    #[test]
    fn file_systems_by_number() {
        assert_eq!(of_file_system(0x0102_1994), Some(Medium::Memory));
        assert_eq!(of_file_system(0x6969), Some(Medium::Network));
        assert_eq!(of_file_system(0xef53), None);
        assert_eq!(of_block_device("/nonexistent"), None);
    }

    #[test]
    fn block_devices_by_what_the_kernel_says() {
        let folder = tempfile::tempdir().unwrap();
        let device = |name: &str, rotational: &str| {
            let device = folder.path().join(name);
            fs::create_dir_all(device.join("queue")).unwrap();
            fs::create_dir_all(device.join("part1")).unwrap();
            fs::write(device.join("queue/rotational"), rotational).unwrap();
            [device.clone(), device.join("part1")]
                .map(|path| of_block_device(path.to_str().unwrap()))
        };
        assert_eq!(device("sda", "1\n"), [Some(Medium::Rotating); 2]);
        assert_eq!(device("sdb", "0\n"), [Some(Medium::SolidState); 2]);
        assert_eq!(device("nvme0n1", "0\n"), [Some(Medium::Nvme); 2]);
        assert_eq!(device("sdc", "?\n"), [None; 2]);
    }
}
