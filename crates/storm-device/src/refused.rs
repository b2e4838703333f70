use std::fmt;
use storm_host::{HostMemoryRefused, show_bytes};
use storm_plan::Tier;

/// Memory of a tier could not be allocated, for any reason.
///
/// A planner can handle this without knowing the device: it plans with less of the tier, by the
/// missing amount.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct MemoryRefused {
    /// The tier.
    pub tier: Tier,
    /// The requested size.
    pub wanted_bytes: u64,
    /// The available size; `None` if unknown.
    pub available_bytes: Option<u64>,
    /// Who refused it, and what to do.
    pub reason: String,
}

impl MemoryRefused {
    /// How much less to request. If the available amount is unknown, an eighth less.
    pub fn missing_bytes(&self) -> u64 {
        match self.available_bytes {
            Some(available) => self.wanted_bytes.saturating_sub(available),
            None => self.wanted_bytes / 8,
        }
    }
}

impl fmt::Display for MemoryRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryRefused { tier, wanted_bytes, available_bytes, reason } = self;
        write!(f, "{} of {tier} memory are needed, and ", show_bytes(*wanted_bytes))?;
        match available_bytes {
            Some(available) => write!(f, "{} can be had: {reason}", show_bytes(*available)),
            None => write!(f, "cannot be had: {reason}"),
        }
    }
}

impl From<HostMemoryRefused> for MemoryRefused {
    fn from(refused: HostMemoryRefused) -> MemoryRefused {
        MemoryRefused {
            tier: Tier::HOST,
            wanted_bytes: refused.wanted_bytes as u64,
            available_bytes: refused.limit.available_bytes(),
            reason: refused.limit.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_host::HostLimit;

    fn host(limit: HostLimit) -> MemoryRefused {
        HostMemoryRefused { wanted_bytes: 8 << 30, limit }.into()
    }

    #[test]
    fn every_limit_of_the_host_says_what_is_missing() {
        let (available_bytes, limit_bytes) = (6 << 30, 7 << 30);
        for (limit, available, missing) in [
            (HostLimit::Machine { available_bytes }, Some(6), 2),
            (HostLimit::ControlGroup { available_bytes, limit_bytes }, Some(6), 2),
            (HostLimit::Given { available_bytes, limit_bytes }, Some(6), 2),
            (HostLimit::LockedMemory { limit_bytes }, Some(7), 1),
            (HostLimit::System { reason: "no".to_owned() }, None, 1),
        ] {
            let refused = host(limit);
            assert_eq!((refused.tier, refused.wanted_bytes), (Tier::HOST, 8 << 30));
            assert_eq!(refused.available_bytes, available.map(|gib: u64| gib << 30));
            assert_eq!(refused.missing_bytes(), missing << 30, "{refused}");
        }
    }

    #[test]
    fn tier_and_sizes_and_reason_are_said() {
        assert_eq!(
            host(HostLimit::System { reason: "the driver cannot lock it".to_owned() }).to_string(),
            "8.00 GiB of host memory are needed, and cannot be had: the driver cannot lock it"
        );
        let locked = host(HostLimit::LockedMemory { limit_bytes: 1 << 20 }).to_string();
        let start =
            "8.00 GiB of host memory are needed, and 1.00 MiB can be had: the limit on locked";
        assert!(locked.starts_with(start) && locked.contains("ulimit -l"), "{locked}");
    }
}
