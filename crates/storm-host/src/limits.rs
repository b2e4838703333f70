//! How much host memory is available, and what limits it.

use std::fs;
use std::path::{Path, PathBuf};

/// What limits host memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostLimit {
    /// The machine has less memory available.
    #[error("the machine has {available_bytes} bytes of memory available")]
    Machine {
        /// `MemAvailable`.
        available_bytes: u64,
    },
    /// The control group has less memory left.
    #[error(
        "the control group of this process (a container or service) has {available_bytes} bytes left \
         of {limit_bytes}; raise its memory limit (docker: --memory)"
    )]
    ControlGroup {
        /// What is left.
        available_bytes: u64,
        /// Its memory limit.
        limit_bytes: u64,
    },
    /// The limit on locked memory is lower.
    #[error(
        "the limit on locked memory is {limit_bytes} bytes: raise it with `ulimit -l unlimited`, or \
         for good in /etc/security/limits.conf (docker: --ulimit memlock=-1)"
    )]
    LockedMemory {
        /// `RLIMIT_MEMLOCK`.
        limit_bytes: u64,
    },
    /// The caller's limit.
    #[error("{limit_bytes} bytes were allowed in all, and {available_bytes} are left")]
    Given {
        /// What is left.
        available_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The system or a driver refused for another reason.
    #[error("{reason}")]
    System {
        /// Its message.
        reason: String,
    },
}

/// Available memory on the machine or in its control group, whichever is less. `None` if neither is
/// known.
pub fn host_memory() -> Option<HostLimit> {
    let machine = machine_available().map(|available_bytes| HostLimit::Machine { available_bytes });
    let group = control_group().map(|group| HostLimit::ControlGroup {
        available_bytes: group.available_bytes(),
        limit_bytes: group.limit_bytes,
    });
    [machine, group].into_iter().flatten().min_by_key(|limit| limit.available_bytes())
}

impl HostLimit {
    /// How much can be allocated, if known.
    pub fn available_bytes(&self) -> Option<u64> {
        match *self {
            HostLimit::Machine { available_bytes }
            | HostLimit::ControlGroup { available_bytes, .. }
            | HostLimit::Given { available_bytes, .. } => Some(available_bytes),
            HostLimit::LockedMemory { limit_bytes } => Some(limit_bytes),
            HostLimit::System { .. } => None,
        }
    }
}

/// Whether `bytes` more can be allocated.
pub(crate) fn check(bytes: usize) -> Result<(), HostLimit> {
    let wanted = bytes as u64;
    if let Some(available_bytes) = machine_available().filter(|&available| available < wanted) {
        return Err(HostLimit::Machine { available_bytes });
    }
    match control_group() {
        Some(group) if group.available_bytes() < wanted => Err(HostLimit::ControlGroup {
            available_bytes: group.available_bytes(),
            limit_bytes: group.limit_bytes,
        }),
        _ => Ok(()),
    }
}

/// How much memory this process may lock. `None` if unlimited.
pub fn locked_memory_limit() -> Option<u64> {
    locked_limit(&fs::read_to_string("/proc/self/limits").ok()?)
}

fn machine_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

/// The soft limit in the text of `/proc/PID/limits`. `None` if unlimited.
fn locked_limit(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A control group's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ControlGroup {
    limit_bytes: u64,
    used_bytes: u64,
    /// The part of `used_bytes` in reclaimable file pages.
    reclaimable_bytes: u64,
}

impl ControlGroup {
    fn available_bytes(&self) -> u64 {
        let used = self.used_bytes.saturating_sub(self.reclaimable_bytes);
        self.limit_bytes.saturating_sub(used)
    }
}

/// The tightest of this process's control groups and their ancestors.
fn control_group() -> Option<ControlGroup> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    group_folders(&text)
        .iter()
        .filter_map(|folder| read_group(folder))
        .min_by_key(ControlGroup::available_bytes)
}

/// The folders of the memory controller, from the group itself up to the root, for cgroup v2 or v1.
fn group_folders(cgroup: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            list if list.split(',').any(|name| name == "memory") => "/sys/fs/cgroup/memory",
            _ => continue,
        };
        // In a container the path may be the host's, so only the root exists.
        for ancestor in Path::new(path).ancestors() {
            folders.push(Path::new(root).join(ancestor.strip_prefix("/").unwrap_or(ancestor)));
        }
    }
    folders
}

fn read_group(folder: &Path) -> Option<ControlGroup> {
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok()
    };
    let statistics = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let inactive = |name: &str| {
        let line = statistics.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse::<u64>().ok()
    };
    let version2 = || Some((number("memory.max")?, number("memory.current")?));
    let version1 = || Some((number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?));
    let (limit_bytes, used_bytes) = version2().or_else(version1)?;
    let reclaimable_bytes =
        inactive("total_inactive_file ").or_else(|| inactive("inactive_file ")).unwrap_or(0);
    Some(ControlGroup { limit_bytes, used_bytes, reclaimable_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_process() {
        let text = |value: &str| {
            format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max processes             127235               127235               processes \n\
                 Max locked memory         {value:<20} 8388608              bytes     \n"
            )
        };
        assert_eq!(locked_limit(&text("65536")), Some(65536));
        assert_eq!(locked_limit(&text("unlimited")), None);
        assert_eq!(locked_limit(""), None);
    }

    #[test]
    fn folders_of_control_groups() {
        let folders = |text: &str| -> Vec<String> {
            group_folders(text).iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(
            folders("0::/user.slice/job\n"),
            ["/sys/fs/cgroup/user.slice/job", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup/"]
        );
        assert_eq!(
            folders("7:cpu,cpuacct:/a\n4:memory:/a\n"),
            ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory/"]
        );
        assert!(folders("nonsense").is_empty());
    }

    #[test]
    fn groups_of_both_versions() {
        let folder = std::env::temp_dir().join(format!("storm-cgroup-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).expect("a file");
        assert_eq!(read_group(&folder), None);
        write("memory.limit_in_bytes", "1000\n");
        write("memory.usage_in_bytes", "600\n");
        write("memory.stat", "inactive_file 20\ntotal_inactive_file 100\n");
        let old = read_group(&folder).expect("version 1");
        assert_eq!((old.limit_bytes, old.available_bytes()), (1000, 500));
        write("memory.max", "5000\n");
        write("memory.current", "2000\n");
        write("memory.stat", "anon 5\ninactive_file 300\n");
        let new = read_group(&folder).expect("version 2");
        assert_eq!((new.limit_bytes, new.available_bytes()), (5000, 3300));
        // No limit here, so the version 1 files count if they exist.
        write("memory.max", "max\n");
        assert_eq!(read_group(&folder).map(|group| group.limit_bytes), Some(1000));
        fs::remove_dir_all(&folder).expect("ours");
    }

    #[test]
    fn a_little_is_always_there() {
        assert_eq!(check(1), Ok(()));
        assert!(machine_available().is_some_and(|bytes| bytes > 1 << 20));
        let least = host_memory().and_then(|limit| limit.available_bytes());
        assert!(least.is_some_and(|bytes| bytes > 1 << 20));
    }
}
