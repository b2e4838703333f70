//! The directory that runs are written to: room, and what kind of disk it is on.

use super::Finding;
use crate::data::disk_rates;
use crate::disk::{free_bytes, write_speed};
use crate::size;
use rustix::fs::{major, minor, stat, statfs};
use std::fs;
use std::path::Path;

/// Less does not hold a checkpoint of a small model.
const FREE_BYTES_MIN: u64 = 1 << 30;

/// What a directory is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    Nvme,
    SolidState,
    Rotating,
    Network,
    Memory,
    Unknown,
}

impl Medium {
    fn words(self) -> &'static str {
        match self {
            Medium::Nvme => "NVMe",
            Medium::SolidState => "a solid-state disk, or a virtual one",
            Medium::Rotating => "a rotating disk, or a virtual one that says so",
            Medium::Network => "a network file system",
            Medium::Memory => "memory: gone after a restart, and counts against RAM",
            Medium::Unknown => "a disk of unknown kind",
        }
    }
}

pub(super) fn look(dir: &Path) -> Vec<Finding> {
    let name = "run directory";
    let shown = dir.display();
    if !dir.is_dir() {
        let remedy = format!("`mkdir -p {shown}`");
        return vec![Finding::missing(name, format!("{shown} is no directory"), &remedy)];
    }
    let mut findings = Vec::new();
    match free_bytes(dir) {
        Ok(free) => {
            let what = format!("{shown} has {} free", size::show(free));
            findings.push(match free >= FREE_BYTES_MIN {
                true => Finding::good(name, what),
                false => Finding::missing(name, what, "free some, or choose another with --dir"),
            });
        }
        Err(error) => {
            let what = format!("{shown}: {error}");
            findings.push(Finding::missing(name, what, "choose another with --dir"));
        }
    }
    findings.push(speed(dir));
    findings.push(reading(dir));
    findings
}

/// How fast the disk writes, and what it is.
fn speed(dir: &Path) -> Finding {
    let name = "disk";
    let medium = medium(dir);
    match write_speed(dir, u64::MAX) {
        Ok(bytes_per_second) => {
            let what = format!("{}; writes {}/s", medium.words(), size::show(bytes_per_second));
            match medium {
                Medium::Rotating | Medium::Network if bytes_per_second < 500 << 20 => {
                    let remedy = "checkpoints and data will be slow; prefer a local NVMe disk";
                    Finding::limited(name, what, remedy)
                }
                Medium::Memory => {
                    Finding::limited(name, what, "choose a directory on disk with --dir")
                }
                _ => Finding::good(name, what),
            }
        }
        Err(error) => {
            let what = format!("{} cannot be written to: {error}", dir.display());
            Finding::missing(name, what, "choose another with --dir")
        }
    }
}

/// How fast datasets are read there.
fn reading(dir: &Path) -> Finding {
    let name = "reading data";
    match disk_rates::measure(dir) {
        Ok(disk) => Finding::good(name, disk_rates::words(&disk)),
        Err(error) => {
            let what = format!("cannot be measured in {}: {error:#}", dir.display());
            Finding::limited(name, what, "free some room, or choose another with --dir")
        }
    }
}

fn medium(dir: &Path) -> Medium {
    if let Ok(status) = statfs(dir)
        && let Some(medium) = of_file_system(status.f_type as u32)
    {
        return medium;
    }
    let Ok(status) = stat(dir) else { return Medium::Unknown };
    let device = format!("/sys/dev/block/{}:{}", major(status.st_dev), minor(status.st_dev));
    of_block_device(&device).unwrap_or(Medium::Unknown)
}

/// By the number that Linux gives a file system.
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

/// By what the kernel says of a disk, or of the disk that a partition is on.
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

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn directories_that_cannot_be_used() {
        let missing = &look(Path::new("/nonexistent/runs"))[0];
        assert!(missing.state == State::Missing);
        assert!(missing.remedy.as_ref().is_some_and(|remedy| remedy.contains("mkdir")));
        let file = look(Path::new("/proc/self/status"));
        assert!(file[0].state == State::Missing);
        // There, but not writable.
        let read_only = speed(Path::new("/proc"));
        assert!(read_only.state == State::Missing, "{}", read_only.what);
    }

    #[test]
    fn file_systems_by_number() {
        assert_eq!(of_file_system(0x0102_1994), Some(Medium::Memory));
        assert_eq!(of_file_system(0x6969), Some(Medium::Network));
        assert_eq!(of_file_system(0xef53), None);
        assert_eq!(of_block_device("/nonexistent"), None);
    }
}
