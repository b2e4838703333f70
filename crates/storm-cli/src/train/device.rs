//! Where a run computes, what that can do, and how much memory it may take.

use super::options::Settings;
use super::values::DeviceArg;
use crate::hardware;
use crate::memory_limits::{self, Limit};
use crate::size;
use anyhow::Result;
use storm_device::cpu::probe_cpu;
use storm_device::cuda::CudaDevice;
use storm_plan::HardwareProfile;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceKind {
    Cpu,
    Cuda,
}

/// A device with its limits.
pub(super) struct Machine {
    pub(super) kind: DeviceKind,
    pub(super) profile: HardwareProfile,
    pub(super) vram: Limit,
    pub(super) ram: Limit,
}

impl Machine {
    pub(super) fn new(settings: &Settings) -> Result<Machine> {
        let kind = match settings.device {
            DeviceArg::Cpu => DeviceKind::Cpu,
            DeviceArg::Cuda => DeviceKind::Cuda,
            DeviceArg::Auto => match CudaDevice::new(0, 1 << 20) {
                Ok(_) => DeviceKind::Cuda,
                Err(_) => DeviceKind::Cpu,
            },
        };
        let ram = memory_limits::host(settings.ram.map(|size| size.0))?;
        let vram = settings.vram.map(|size| size.0);
        if kind == DeviceKind::Cuda {
            let name = settings.hardware.as_deref().unwrap_or_else(|| hardware::default_hardware());
            let profile = hardware::resolve(name)?;
            let vram = memory_limits::device(vram, &profile);
            return Ok(Machine { kind, profile, vram, ram });
        }
        let vram = match vram {
            Some(bytes) => Limit { bytes, origin: None },
            None => {
                let bytes = ram.bytes / 2;
                let origin = format!("half of the {} of host memory", size::show(ram.bytes));
                Limit { bytes, origin: Some(origin) }
            }
        };
        let profile = match &settings.hardware {
            Some(name) => hardware::resolve(name)?,
            None => probe_cpu(vram.bytes)?,
        };
        Ok(Machine { kind, profile, vram, ram })
    }
}
