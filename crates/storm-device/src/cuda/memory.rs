//! Which processes hold how much of a card's memory, from NVML if available.

use cudarc::driver::sys;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::MemoryInfo;
use std::ffi::{CStr, OsStr};
use std::fmt;
use storm_host::show_bytes;

/// Memory of the card that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInUse {
    /// How much.
    pub bytes: u64,
    /// What the figure covers.
    pub counted: Counted,
}

/// What a figure of memory covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// This process, context and code included, from NVML.
    Process,
    /// The increase of the whole card's use since before this process's context, from NVML. It
    /// includes changes by other processes.
    CardSinceStart,
    /// The whole card, all processes together, from the driver.
    Card,
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Counted::Process => "of this process, by NVML",
            Counted::CardSinceStart => "more on the whole card than before the start, by NVML",
            Counted::Card => "on the whole card, other processes included, by the driver",
        })
    }
}

/// Another process on the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryHolder {
    /// The process ID.
    pub process: u32,
    /// Its program, if visible from here.
    pub program: Option<String>,
    /// The memory that it holds, if NVML reports it.
    pub bytes: Option<u64>,
}

impl fmt::Display for MemoryHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.process)?;
        if let Some(program) = &self.program {
            write!(f, " ({program})")?;
        }
        match self.bytes {
            Some(bytes) => write!(f, " holds {}", show_bytes(bytes)),
            None => f.write_str(" holds some"),
        }
    }
}

/// Reads the memory of one card.
#[derive(Debug)]
pub(super) struct MemoryMeter {
    /// NVML and the card's address in it. `None` if NVML is missing.
    nvml: Option<(Nvml, String)>,
    /// Memory in use on the whole card before this process's context was created.
    used_before: Option<u64>,
}

impl MemoryMeter {
    /// Must be called before the context is created.
    pub(super) fn new(device: sys::CUdevice) -> MemoryMeter {
        let mut meter = MemoryMeter { nvml: None, used_before: None };
        // The versioned name exists without the development files.
        let library = Nvml::builder().lib_path(OsStr::new("libnvidia-ml.so.1")).init();
        if let (Ok(library), Some(address)) = (library, bus_address(device)) {
            meter.nvml = Some((library, address));
            meter.used_before = meter.card_used();
        }
        meter
    }

    /// Memory in use, as precisely as it can be known. `None` if NVML does not report it.
    pub(super) fn in_use(&self) -> Option<MemoryInUse> {
        let own = std::process::id();
        let process = self.processes().into_iter().find(|(process, _)| *process == own);
        if let Some((_, Some(bytes))) = process {
            return Some(MemoryInUse { bytes, counted: Counted::Process });
        }
        let bytes = self.card_used()?.saturating_sub(self.used_before?);
        Some(MemoryInUse { bytes, counted: Counted::CardSinceStart })
    }

    /// Other processes with compute work on the card, largest first.
    pub(super) fn other_holders(&self) -> Vec<MemoryHolder> {
        let own = std::process::id();
        let mut holders: Vec<MemoryHolder> = self
            .processes()
            .into_iter()
            .filter(|(process, _)| *process != own)
            .map(|(process, bytes)| MemoryHolder { process, program: program(process), bytes })
            .collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        holders
    }

    /// Free memory, if NVML reports it.
    pub(super) fn card_free(&self) -> Option<u64> {
        Some(self.card()?.free)
    }

    fn card_used(&self) -> Option<u64> {
        Some(self.card()?.used)
    }

    fn card(&self) -> Option<MemoryInfo> {
        self.nvml_card()?.memory_info().ok()
    }

    /// The card in NVML.
    pub(super) fn nvml_card(&self) -> Option<nvml_wrapper::Device<'_>> {
        let (library, address) = self.nvml.as_ref()?;
        library.device_by_pci_bus_id(address.as_str()).ok()
    }

    fn processes(&self) -> Vec<(u32, Option<u64>)> {
        let list = || self.nvml_card()?.running_compute_processes().ok();
        let bytes = |used| match used {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        list().unwrap_or_default().into_iter().map(|p| (p.pid, bytes(p.used_gpu_memory))).collect()
    }
}

/// The card's address on the bus, such as `0000:0f:00.0`. Needed because the driver and NVML number
/// cards differently.
pub(super) fn bus_address(device: sys::CUdevice) -> Option<String> {
    let mut text = [0u8; 32];
    // SAFETY: the device is valid; the call writes at most the buffer's size, including the NUL.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, device) }
        .result()
        .ok()?;
    Some(CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?.to_owned())
}

fn program(process: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
    Some(name.trim().to_owned())
}
