//! Memory tiers, and arrays with one entry per tier.

use crate::per::per;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A memory tier. The tier that kernels work in comes first; each further one is farther from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8")]
pub struct Tier(u8);

impl Tier {
    /// Device memory.
    pub const DEVICE: Tier = Tier(0);
    /// Pinned host memory.
    pub const HOST: Tier = Tier(1);
    /// Scratch space on a disk.
    pub const DISK: Tier = Tier(2);
    /// Most tiers.
    pub const COUNT_MAX: usize = 4;

    /// The next farther tier; `None` after the last.
    pub fn behind(self) -> Option<Tier> {
        (self.index() + 1 < Tier::COUNT_MAX).then_some(Tier(self.0 + 1))
    }

    /// The tier as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    const fn at(index: usize) -> Tier {
        Tier(index as u8)
    }
}

impl TryFrom<u8> for Tier {
    type Error = String;

    fn try_from(index: u8) -> Result<Tier, String> {
        match usize::from(index) < Tier::COUNT_MAX {
            true => Ok(Tier(index)),
            false => Err(format!("there is no tier {index}: the last is {}", Tier::COUNT_MAX - 1)),
        }
    }
}

/// For display: `device`.
impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Tier::DEVICE => f.pad("device"),
            Tier::HOST => f.pad("host"),
            Tier::DISK => f.pad("disk"),
            Tier(index) => f.pad(&format!("tier {index}")),
        }
    }
}

per! {
    /// One entry per tier. Tiers that a machine or a plan does not have count as 0 bytes.
    PerTier by Tier
}

impl<T: Default> PerTier<T> {
    /// Entries for the device and the host; the default for all other tiers.
    pub fn new(device: T, host: T) -> PerTier<T> {
        let mut all = PerTier::default();
        all[Tier::DEVICE] = device;
        all[Tier::HOST] = host;
        all
    }
}

impl<T: Copy + PartialOrd> PerTier<T> {
    /// Whether no tier exceeds its limit.
    pub fn fits(&self, limits: &PerTier<T>) -> bool {
        self.iter().all(|(tier, &bytes)| bytes <= limits[tier])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_lie_one_behind_the_other() {
        assert_eq!(Tier::DEVICE.behind(), Some(Tier::HOST));
        let third = Tier::HOST.behind().unwrap();
        let names = [Tier::DEVICE, Tier::HOST, third].map(|tier| tier.to_string());
        assert_eq!(names, ["device", "host", "disk"]);
        assert_eq!(Tier::DISK.behind().unwrap().to_string(), "tier 3");
        let all: Vec<Tier> = PerTier::<u8>::default().iter().map(|(tier, _)| tier).collect();
        assert_eq!(all.len(), Tier::COUNT_MAX);
        assert_eq!(all.last().unwrap().behind(), None);
    }

    #[test]
    fn every_tier_must_fit() {
        let limits = PerTier::new(10, 20);
        assert!(PerTier::new(10, 20).fits(&limits));
        assert!(!PerTier::new(11, 0).fits(&limits) && !PerTier::new(0, 21).fits(&limits));
        let third = Tier::HOST.behind().unwrap();
        assert!(!limits.with(third, 1).fits(&limits));
        assert!(limits.fits(&PerTier::of_each(20)));
    }
}
