//! Default memory budgets.

use crate::size;
use anyhow::{Result, bail};
use storm_host::{HostLimit, host_memory};
use storm_plan::HardwareProfile;

/// A budget in bytes, and how it was derived if the user did not give it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) bytes: u64,
    pub(crate) origin: Option<String>,
}

/// One part in this many of GPU memory is left to the display, other processes and the driver.
const DEVICE_HEADROOM: u64 = 50;

/// One part in this many of host memory is left free, up to a maximum.
const HOST_HEADROOM: u64 = 8;
const HOST_HEADROOM_MAX: u64 = 4 << 30;

/// Device memory budget: as given, or all of the GPU's memory minus 1/50.
pub(crate) fn device(asked: Option<u64>, profile: &HardwareProfile) -> Limit {
    if let Some(bytes) = asked {
        return Limit { bytes, origin: None };
    }
    let headroom = profile.memory_bytes / DEVICE_HEADROOM;
    let origin =
        format!("the card's {} less {}", size::show(profile.memory_bytes), size::show(headroom));
    Limit { bytes: profile.memory_bytes - headroom, origin: Some(origin) }
}

/// Host memory budget: as given, or what is available on the machine or in its cgroup, minus 1/8 but at most 4 GiB.
pub(crate) fn host(asked: Option<u64>) -> Result<Limit> {
    match asked {
        Some(bytes) => Ok(Limit { bytes, origin: None }),
        None => of_machine(host_memory()),
    }
}

fn of_machine(limit: Option<HostLimit>) -> Result<Limit> {
    let (owner, available) = match limit {
        Some(HostLimit::Machine { available_bytes }) => ("this machine's", available_bytes),
        Some(HostLimit::ControlGroup { available_bytes, .. }) => {
            ("this control group's", available_bytes)
        }
        _ => bail!("cannot tell how much memory this machine has; give --ram"),
    };
    let headroom = (available / HOST_HEADROOM).min(HOST_HEADROOM_MAX);
    let origin =
        format!("{owner} {} available less {}", size::show(available), size::show(headroom));
    Ok(Limit { bytes: available - headroom, origin: Some(origin) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_taken() {
        let profile = HardwareProfile::builtin("reference").unwrap();
        let asked = Limit { bytes: 7, origin: None };
        assert_eq!(device(Some(7), &profile), asked);
        assert_eq!(host(Some(7)).unwrap(), asked);
    }

    #[test]
    fn headroom_is_left_and_named() {
        let profile = HardwareProfile::builtin("reference").unwrap();
        let all = device(None, &profile);
        assert_eq!(all.bytes, 141_000_000_000 - 2_820_000_000);
        let small = of_machine(Some(HostLimit::Machine { available_bytes: 8 << 30 })).unwrap();
        assert_eq!(small.bytes, 7 << 30);
        assert!(small.origin.unwrap().contains("this machine's 8.00 GiB"));
        let group = HostLimit::ControlGroup { available_bytes: 100 << 30, limit_bytes: 200 << 30 };
        let large = of_machine(Some(group)).unwrap();
        assert_eq!(large.bytes, 96 << 30);
        assert!(large.origin.unwrap().contains("control group"));
        assert!(of_machine(None).unwrap_err().to_string().contains("--ram"));
    }
}
