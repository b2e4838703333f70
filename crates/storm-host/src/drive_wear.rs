//! The wear that an NVMe drive reports (SMART).

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The health log page, and its size.
const HEALTH_LOG: u32 = 0x02;
const HEALTH_BYTES: usize = 512;

/// The admin command that reads a log page.
const GET_LOG_PAGE: u8 = 0x02;

/// Selects the whole drive.
const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// `_IOWR('N', 0x41, struct nvme_admin_cmd)`.
const ADMIN_COMMAND: libc::c_ulong = 0xc048_4e41;

/// Drives report data written in units of 1000 × 512 bytes.
const UNIT_BYTES: u128 = 512_000;

/// The wear that a drive reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveWear {
    /// Percentage of its rated life that is used. May exceed 100.
    pub used_percent: u8,
    /// Bytes written over its lifetime.
    pub written_bytes: u64,
}

/// `struct nvme_admin_cmd` of `linux/nvme_ioctl.h`.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    dword_2: u32,
    dword_3: u32,
    metadata: u64,
    address: u64,
    metadata_bytes: u32,
    data_bytes: u32,
    dwords_10_to_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

impl DriveWear {
    /// The wear of the drive that holds a folder. `None` if it is not an NVMe drive, or this user
    /// may not query it, which usually takes root.
    pub fn of_folder(folder: &Path) -> Option<DriveWear> {
        let device = fs::metadata(folder).ok()?.dev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let block = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
        let drive = File::open(Path::new("/dev").join(controller(&block)?)).ok()?;
        DriveWear::parse(&health(&drive)?)
    }

    /// The drive's rated endurance in bytes, extrapolated. `None` if too little is used to tell.
    pub fn rated_bytes(&self) -> Option<u64> {
        // The percentage is truncated, so at 5 the result is up to 20% too high.
        let used = u64::from(self.used_percent);
        (used >= 5).then(|| (u128::from(self.written_bytes) * 100 / u128::from(used)) as u64)
    }

    fn parse(log: &[u8; HEALTH_BYTES]) -> Option<DriveWear> {
        let written = u128::from_le_bytes(log[48..64].try_into().ok()?);
        let written_bytes = u64::try_from(written.checked_mul(UNIT_BYTES)?).ok()?;
        // Drives without a log return zeros.
        (written_bytes > 0).then_some(DriveWear { used_percent: log[5], written_bytes })
    }
}

/// The controller of a block device, from its sysfs path: `nvme0` for
/// `…/nvme/nvme0/nvme0n1/nvme0n1p2`.
fn controller(block: &Path) -> Option<PathBuf> {
    let is_controller = |name: &str| {
        let number = name.strip_prefix("nvme");
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let mut names = block.components().filter_map(|part| part.as_os_str().to_str());
    names.rfind(|name| is_controller(name)).map(PathBuf::from)
}

fn health(drive: &File) -> Option<[u8; HEALTH_BYTES]> {
    let mut log = [0; HEALTH_BYTES];
    let dwords = (HEALTH_BYTES / 4 - 1) as u32;
    let mut command = AdminCommand {
        opcode: GET_LOG_PAGE,
        namespace: ALL_NAMESPACES,
        address: log.as_mut_ptr() as u64,
        data_bytes: HEALTH_BYTES as u32,
        dwords_10_to_15: [HEALTH_LOG | dwords << 16, 0, 0, 0, 0, 0],
        ..AdminCommand::default()
    };
    // SAFETY: the command has the layout that the kernel expects. It transfers exactly the bytes of
    // `log`, which outlives the call. A file that is not an NVMe controller rejects the request.
    let status = unsafe { libc::ioctl(drive.as_raw_fd(), ADMIN_COMMAND, &raw mut command) };
    (status == 0).then_some(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_says_what_was_written() {
        let mut log = [0; HEALTH_BYTES];
        assert_eq!(DriveWear::parse(&log), None);
        log[5] = 7;
        // 84 TB.
        log[48..56].copy_from_slice(&164_062_500u64.to_le_bytes());
        let wear = DriveWear::parse(&log).unwrap();
        assert_eq!(wear, DriveWear { used_percent: 7, written_bytes: 84_000_000_000_000 });
        assert_eq!(wear.rated_bytes(), Some(1_200_000_000_000_000));
        assert_eq!(DriveWear { used_percent: 4, ..wear }.rated_bytes(), None);
        assert_eq!(DriveWear { used_percent: 255, ..wear }.rated_bytes(), Some(32_941_176_470_588));
        log[48..64].fill(0xff);
        assert_eq!(DriveWear::parse(&log), None);
    }

    #[test]
    fn controllers_by_their_place() {
        let of = |path: &str| controller(Path::new(path)).map(|found| found.display().to_string());
        let disk = "/sys/devices/pci0000:00/0000:00:1d.0/0000:03:00.0/nvme/nvme12/nvme12n1";
        assert_eq!(of(disk), Some("nvme12".to_owned()));
        assert_eq!(of(&format!("{disk}/nvme12n1p2")), Some("nvme12".to_owned()));
        assert_eq!(of("/sys/devices/virtual/block/dm-0"), None);
        assert_eq!(of("/sys/devices/pci0000:00/virtio2/block/vda"), None);
    }

    #[test]
    fn what_is_no_drive_is_not_asked() {
        assert_eq!(size_of::<AdminCommand>(), 72);
        let file = File::open("/proc/self/status").unwrap();
        assert_eq!(health(&file), None);
        assert_eq!(DriveWear::of_folder(Path::new("/proc")), None);
        assert_eq!(DriveWear::of_folder(Path::new("/nonexistent")), None);
    }
}
