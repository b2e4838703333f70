//! Where a run computes, what that can do, and how much memory it may take.

use super::options::Settings;
use super::output::Style;
use super::ranks::Crew;
use super::values::DeviceArg;
use crate::disk_tier::{self, DiskArgs, DiskTier};
use crate::hardware;
use crate::memory_limits::{self, Limit};
use crate::model::grouped;
use crate::{UsageError, doctor, host_memory, progress, size, tuning};
use anyhow::{Result, anyhow};
use std::num::NonZeroUsize;
use std::sync::Arc;
use storm_device::cpu::{Bf16Products, CpuPlanDevice, CpuPlanOptions, probe_cpu};
use storm_device::cuda::{CudaDevice, CudaPlanDevice, CudaPlanOptions};
use storm_device::{Collectives, DiskOptions, PlanDevice};
use storm_plan::{Budget, HardwareProfile, Tier};

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    Cpu,
    Cuda,
}

/// A device with its limits.
pub(crate) struct Machine {
    pub(crate) kind: DeviceKind,
    pub(crate) profile: HardwareProfile,
    pub(crate) vram: Limit,
    pub(crate) ram: Limit,
    /// What optimizer state may use.
    pub(crate) disk: Option<DiskTier>,
    /// Of the CPU device.
    pub(crate) cpu: CpuUse,
}

/// How the CPU device computes. A card has no use for it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CpuUse {
    pub(crate) threads: usize,
    pub(crate) products: Bf16Products,
}

/// What one of several ranks has of its machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// How many ranks are on it.
    pub(super) local_ranks: usize,
    /// Host memory that every rank has at least, as it was before any of them took some.
    pub(super) ram_bytes: u64,
}

/// A model with more parameters trains on the CPU only if that is asked for: a step would take minutes.
const CPU_PARAMETERS_MAX: u64 = 500_000_000;

/// What is asked for of a device; what is not given follows from the machine.
pub(crate) struct Asked<'a> {
    pub(crate) device: DeviceArg,
    pub(crate) vram_bytes: Option<u64>,
    pub(crate) ram_bytes: Option<u64>,
    pub(crate) disk: DiskArgs<'a>,
    pub(crate) hardware: Option<&'a str>,
    pub(crate) threads: Option<usize>,
    /// On the CPU.
    pub(crate) products: Bf16Products,
}

impl<'a> From<&'a Settings> for Asked<'a> {
    fn from(settings: &'a Settings) -> Asked<'a> {
        Asked {
            device: settings.device,
            vram_bytes: settings.vram.map(|size| size.0),
            ram_bytes: settings.ram.map(|size| size.0),
            disk: DiskArgs {
                folder: settings.disk.as_deref(),
                space_bytes: settings.disk_space.map(|size| size.0),
                endurance_bytes: settings.disk_endurance.map(|size| size.0),
                drives: None,
            },
            hardware: settings.hardware.as_deref(),
            threads: settings.threads.map(NonZeroUsize::get),
            products: settings.cpu_products.into(),
        }
    }
}

/// The device that is asked for; else the GPU if it can be used. Says which, and why. A GPU that is asked for and
/// cannot be used is an error, with what would mend it.
pub(super) fn find(device: DeviceArg, style: Style) -> Result<DeviceKind> {
    if device == DeviceArg::Cpu {
        return Ok(DeviceKind::Cpu);
    }
    match (CudaDevice::new(0, 1 << 20), device) {
        (Ok(_), DeviceArg::Auto) => {
            style.say("device cuda: found a usable GPU");
            Ok(DeviceKind::Cuda)
        }
        (Ok(_), _) => Ok(DeviceKind::Cuda),
        (Err(problem), DeviceArg::Cuda) => {
            let remedies = doctor::gpu_remedies();
            Err(anyhow!("no GPU can be used: {problem}{remedies}\n--device cpu uses the CPU"))
        }
        (Err(problem), _) => {
            eprintln!(
                "warning: this runs on the CPU, since no GPU can be used: {problem}. `storm doctor` says what is \
                 missing; --device cpu uses the CPU without this warning"
            );
            Ok(DeviceKind::Cpu)
        }
    }
}

/// [`find`], for a model of that many parameters.
pub(crate) fn find_for(device: DeviceArg, parameters: u64, style: Style) -> Result<DeviceKind> {
    let kind = find(device, style)?;
    check_size(device, kind, parameters)?;
    Ok(kind)
}

/// Refuses a model that is too large for a CPU that was not asked for.
pub(super) fn check_size(device: DeviceArg, kind: DeviceKind, parameters: u64) -> Result<()> {
    let is_found = (device, kind) == (DeviceArg::Auto, DeviceKind::Cpu);
    if !is_found || parameters <= CPU_PARAMETERS_MAX {
        return Ok(());
    }
    Err(UsageError(format!(
        "no GPU can be used, and {} parameters are too many for a CPU; `storm doctor` says what is missing, and \
         --device cpu uses the CPU anyway",
        grouped(parameters)
    ))
    .into())
}

impl Machine {
    pub(crate) fn new(asked: &Asked<'_>, parameters: u64, style: Style) -> Result<Machine> {
        let kind = find(asked.device, style)?;
        check_size(asked.device, kind, parameters)?;
        Machine::of_kind(kind, asked)
    }

    /// A device that is known to be there. What is not known of it is measured, which takes seconds.
    pub(super) fn of_kind(kind: DeviceKind, asked: &Asked<'_>) -> Result<Machine> {
        Machine::shared(kind, asked, None, None)
    }

    /// The same for one of several ranks. What was not asked for is divided among those on this machine, and measured with
    /// this rank's share. A profile that is known is not measured.
    pub(super) fn shared(
        kind: DeviceKind,
        asked: &Asked<'_>,
        share: Option<Share>,
        known: Option<HardwareProfile>,
    ) -> Result<Machine> {
        let ram = match (share, asked.ram_bytes) {
            // 0 if a machine does not say.
            (Some(Share { ram_bytes: bytes @ 1.., .. }), None) => {
                let origin = "the least that a rank has, by what its machine had available";
                Limit { bytes, origin: Some(origin.to_owned()) }
            }
            (_, asked) => memory_limits::host(asked)?,
        };
        let local_ranks = share.map_or(1, |share| share.local_ranks);
        let vram = asked.vram_bytes;
        let opened = disk_tier::open(asked.disk)?;
        let disk_with =
            |profile: &HardwareProfile| opened.or_else(|| disk_tier::assume(asked.disk, profile));
        if kind == DeviceKind::Cuda {
            let mut profile = match known {
                Some(known) => known,
                None => hardware::named_or_found(asked.hardware)?,
            };
            let vram = memory_limits::device(vram, &profile);
            let disk = disk_with(&profile);
            DiskTier::in_profile(disk.as_ref(), &mut profile);
            return Ok(Machine { kind, profile, vram, ram, disk, cpu: CpuUse::default() });
        }
        let mut threads = host_memory::threads(asked.threads, ram.bytes)?;
        if asked.threads.is_none() {
            threads = (threads / local_ranks).max(1);
        }
        let cpu = CpuUse { threads, products: asked.products };
        let vram = match vram {
            Some(bytes) => Limit { bytes, origin: None },
            None => {
                let bytes = ram.bytes / 2;
                let origin = format!("half of the {} of host memory", size::show(ram.bytes));
                Limit { bytes, origin: Some(origin) }
            }
        };
        let mut profile = match (known, asked.hardware) {
            (Some(known), _) => known,
            (None, Some(_)) => hardware::named_or_found(asked.hardware)?,
            (None, None) => probe_cpu(vram.bytes, Some(threads), asked.products)?,
        };
        let disk = disk_with(&profile);
        DiskTier::in_profile(disk.as_ref(), &mut profile);
        Ok(Machine { kind, profile, vram, ram, disk, cpu })
    }
}

/// A device that runs train on.
pub(crate) trait Trains: PlanDevice {
    /// Options for a device within a budget, which computes like this if it is the CPU. A GPU may take `tune_seconds` for
    /// finding the fastest algorithms. A device that ran before may have something to keep, and one of several ranks is
    /// connected to the others.
    fn options(
        cpu: CpuUse,
        budget: Budget,
        disk: Option<DiskOptions>,
        tune_seconds: f64,
        before: Option<Self>,
        crew: Option<&Crew>,
    ) -> Self::Options;

    /// The same for a run that gives memory back between steps. A CPU can always do that.
    fn releasing(options: Self::Options) -> Self::Options {
        options
    }
}

impl Trains for CpuPlanDevice {
    fn options(
        cpu: CpuUse,
        _: Budget,
        disk: Option<DiskOptions>,
        _: f64,
        _: Option<Self>,
        crew: Option<&Crew>,
    ) -> CpuPlanOptions {
        CpuPlanOptions {
            threads: Some(cpu.threads),
            trace: true,
            disk,
            products: cpu.products,
            ranks: crew.map(|crew| Arc::new(crew.ranks.clone()) as Arc<dyn Collectives>),
            ..CpuPlanOptions::default()
        }
    }
}

impl Trains for CudaPlanDevice {
    fn options(
        _: CpuUse,
        budget: Budget,
        disk: Option<DiskOptions>,
        tune_seconds: f64,
        before: Option<Self>,
        crew: Option<&Crew>,
    ) -> CudaPlanOptions {
        let cards = crew.and_then(Crew::cards);
        CudaPlanOptions {
            ordinal: cards.map_or(0, |cards| cards.ordinal),
            ranks: cards.map(|cards| Arc::clone(&cards.ranks)),
            trace: true,
            vram_bytes: Some(budget[Tier::DEVICE]),
            disk,
            tune_seconds,
            progress: Some(Box::new(|preparing| progress::show(&tuning::describe(preparing)))),
            // Host memory is slow to get. After an error of the card there is nothing to keep.
            kept: before.and_then(|device| device.keep().ok()),
            ..CudaPlanOptions::default()
        }
    }

    fn releasing(options: CudaPlanOptions) -> CudaPlanOptions {
        CudaPlanOptions { releases_idle: true, ..options }
    }
}
