use crate::limits::{self, HostLimit};
use crate::size::show_bytes;

/// Host memory could not be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} of host memory cannot be had: {limit}", show_bytes(*.wanted_bytes as u64))]
pub struct HostMemoryRefused {
    /// Requested size.
    pub wanted_bytes: usize,
    /// What the limit was, and how to raise it.
    pub limit: HostLimit,
}

impl HostMemoryRefused {
    /// A driver could not pin resident pages. It does not report why, so this checks whether the
    /// limit on locked memory is below what was requested. `reason` is the driver's message.
    pub fn to_lock(wanted_bytes: usize, reason: impl Into<String>) -> HostMemoryRefused {
        HostMemoryRefused::within(wanted_bytes, limits::locked_memory_limit(), reason)
    }

    fn within(
        wanted_bytes: usize,
        locked_limit: Option<u64>,
        reason: impl Into<String>,
    ) -> HostMemoryRefused {
        let limit = match locked_limit.filter(|&limit_bytes| limit_bytes < wanted_bytes as u64) {
            Some(limit_bytes) => HostLimit::LockedMemory { limit_bytes },
            None => HostLimit::System { reason: reason.into() },
        };
        HostMemoryRefused { wanted_bytes, limit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_lock_is_blamed_on_the_limit_only_if_that_is_too_low() {
        let refused = |locked_limit| HostMemoryRefused::within(5000, locked_limit, "no more");
        assert_eq!(refused(Some(4999)).limit, HostLimit::LockedMemory { limit_bytes: 4999 });
        for locked_limit in [Some(5000), None] {
            let limit = HostLimit::System { reason: "no more".to_owned() };
            assert_eq!(refused(locked_limit).limit, limit);
        }
    }

    #[test]
    fn who_refuses_is_named() {
        let error = |limit| HostMemoryRefused { wanted_bytes: 3 << 30, limit }.to_string();
        let locked = error(HostLimit::LockedMemory { limit_bytes: 65536 });
        assert!(locked.starts_with("3.00 GiB of host memory cannot be had: "), "{locked}");
        assert!(locked.contains("ulimit -l"), "{locked}");
        let group = error(HostLimit::ControlGroup { available_bytes: 5, limit_bytes: 9 });
        assert!(group.contains("5 bytes left of 9"), "{group}");
    }
}
