//! The device a run trains on, its profile and its memory budgets.

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
use storm_device::cuda::{
    CudaDevice, CudaPlanDevice, CudaPlanOptions, GraphUse, SECOND_DEVICE_BYTES,
};
use storm_device::{Collectives, DiskOptions, PlanDevice};
use storm_plan::{Budget, HardwareProfile, Idle, Tier};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    Cpu,
    Cuda,
}

/// A device with its memory budgets.
pub(crate) struct Machine {
    pub(crate) kind: DeviceKind,
    pub(crate) profile: HardwareProfile,
    pub(crate) vram: Limit,
    pub(crate) ram: Limit,
    /// Disk space for optimizer state.
    pub(crate) disk: Option<DiskTier>,
    /// Settings of the CPU device.
    pub(crate) cpu: CpuUse,
}

/// How the CPU device computes. GPUs ignore this.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CpuUse {
    pub(crate) threads: usize,
    pub(crate) products: Bf16Products,
}

/// This rank's share of its machine, in a run with several ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// Number of ranks on this machine.
    pub(super) local_ranks: usize,
    /// Host memory available to every rank (the minimum over ranks), measured before any rank allocated.
    pub(super) ram_bytes: u64,
}

/// Larger models train on the CPU only with an explicit `--device cpu`: a step would take minutes.
const CPU_PARAMETERS_MAX: u64 = 500_000_000;

/// The device options of a command. Defaults come from the machine.
pub(crate) struct Asked<'a> {
    pub(crate) device: DeviceArg,
    pub(crate) vram_bytes: Option<u64>,
    pub(crate) ram_bytes: Option<u64>,
    pub(crate) disk: DiskArgs<'a>,
    pub(crate) hardware: Option<&'a str>,
    pub(crate) threads: Option<usize>,
    /// Only for the CPU.
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

/// Finds the requested device; with `auto`, the GPU if it is usable, else the CPU. Prints which and why. A requested
/// GPU that is not usable is an error that says how to fix it.
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

/// [`find`], which also checks the number of parameters.
pub(crate) fn find_for(device: DeviceArg, parameters: u64, style: Style) -> Result<DeviceKind> {
    let kind = find(device, style)?;
    check_size(device, kind, parameters)?;
    Ok(kind)
}

/// Refuses a large model if `auto` fell back to the CPU.
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

    /// A device of a kind known to exist. Measures a missing profile, which takes seconds.
    pub(super) fn of_kind(kind: DeviceKind, asked: &Asked<'_>) -> Result<Machine> {
        Machine::shared(kind, asked, None, None)
    }

    /// The same for one of several ranks. Divides defaults among the ranks of this machine, and measures with this
    /// rank's share. A given profile is not measured.
    pub(super) fn shared(
        kind: DeviceKind,
        asked: &Asked<'_>,
        share: Option<Share>,
        known: Option<HardwareProfile>,
    ) -> Result<Machine> {
        let ram = match (share, asked.ram_bytes) {
            // 0 if a machine does not report its memory.
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

/// Device memory that a run which releases this keeps for its second device, also during steps.
pub(super) fn probe_overhead_bytes(kind: DeviceKind, idle: Option<Idle>) -> u64 {
    match (kind, idle) {
        (DeviceKind::Cuda, Some(Idle::WithParameters)) => SECOND_DEVICE_BYTES,
        _ => 0,
    }
}

/// A device that can train.
pub(crate) trait Trains: PlanDevice {
    /// Device options for a budget. `cpu` applies only to the CPU. A GPU may spend `tune_seconds` on finding the
    /// fastest algorithms. A device from an earlier part of the run may pass on its host memory, and a rank's device is
    /// connected to the others.
    fn options(
        cpu: CpuUse,
        budget: Budget,
        disk: Option<DiskOptions>,
        tune_seconds: f64,
        before: Option<Self>,
        crew: Option<&Crew>,
    ) -> Self::Options;

    /// The same for a device that releases this memory between steps. The CPU always can.
    fn releasing(options: Self::Options, _: Idle) -> Self::Options {
        options
    }

    /// The same for the second device of a run, with which it probes in 8 bits. It records no trace.
    fn probing(options: Self::Options) -> Self::Options;
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

    fn probing(options: CpuPlanOptions) -> CpuPlanOptions {
        CpuPlanOptions { trace: false, ..options }
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
            // Pinning host memory is slow, so keep what the last device had. After a GPU error there is nothing to
            // keep.
            kept: before.and_then(|device| device.keep().ok()),
            ..CudaPlanOptions::default()
        }
    }

    /// With parameters, memory for the probe's device stays free, see [`probe_overhead_bytes`].
    fn releasing(options: CudaPlanOptions, idle: Idle) -> CudaPlanOptions {
        let reserved = probe_overhead_bytes(DeviceKind::Cuda, Some(idle));
        let vram_bytes = options.vram_bytes.map(|bytes| bytes.saturating_sub(reserved));
        CudaPlanOptions { releases: Some(idle), vram_bytes, ..options }
    }

    /// Without graphs: they would keep memory that steps take back.
    fn probing(options: CudaPlanOptions) -> CudaPlanOptions {
        CudaPlanOptions {
            releases: Some(Idle::WithParameters),
            trace: false,
            graphs: GraphUse::Never,
            ..options
        }
    }
}
