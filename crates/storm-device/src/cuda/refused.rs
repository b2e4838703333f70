//! Errors for card memory that could not be allocated: which processes hold it, and what to do.

use super::memory::{MemoryHolder, MemoryInUse};
use crate::MemoryRefused;
use storm_host::show_bytes;
use storm_plan::Tier;

/// The error if the driver has less memory free than requested. `holders` are the other processes
/// on the card, largest first. It is empty if there are none or NVML is missing.
pub(super) fn out_of_memory(
    wanted_bytes: usize,
    free_bytes: usize,
    total_bytes: usize,
    holders: &[MemoryHolder],
) -> MemoryRefused {
    let (wanted, free, total) = (wanted_bytes as u64, free_bytes as u64, total_bytes as u64);
    let advice = advice(wanted, free, total, holders);
    MemoryRefused {
        tier: Tier::DEVICE,
        wanted_bytes: wanted,
        available_bytes: Some(free),
        reason: format!("the GPU has {} in all; {advice}", show_bytes(total)),
    }
}

fn advice(wanted: u64, free: u64, total: u64, holders: &[MemoryHolder]) -> String {
    if wanted > total {
        return "choose a smaller model, batch or budget".into();
    }
    if !holders.is_empty() {
        let names: Vec<String> = holders.iter().map(ToString::to_string).collect();
        return format!("{}: end it or choose a smaller budget", names.join(", "));
    }
    if free < total / 10 * 9 {
        return "another process holds the rest: `nvidia-smi` names it; end it or choose a smaller \
                budget"
            .into();
    }
    "choose a smaller batch or budget".into()
}

/// The error if more card memory is in use than allowed. The plan's block is `block_bytes` of it.
pub(super) fn over_budget(
    in_use: MemoryInUse,
    budget_bytes: u64,
    block_bytes: u64,
) -> MemoryRefused {
    MemoryRefused {
        tier: Tier::DEVICE,
        wanted_bytes: in_use.bytes,
        available_bytes: Some(budget_bytes),
        reason: format!(
            "the budget allows no more; of what is in use ({}) {} are the plan's, the rest is context, code \
             and workspaces; plan for a smaller block or allow more",
            in_use.counted,
            show_bytes(block_bytes)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Counted, CudaError};
    use super::*;
    use crate::DeviceError;

    fn full(wanted: usize, free: usize, holders: &[MemoryHolder]) -> String {
        out_of_memory(wanted << 30, free << 30, 80 << 30, holders).to_string()
    }

    #[test]
    fn who_holds_the_memory() {
        let holder = |process, program: Option<&str>, bytes| MemoryHolder {
            process,
            program: program.map(str::to_owned),
            bytes,
        };
        let holders = [holder(41, Some("python"), Some(50 << 30)), holder(42, None, None)];
        assert_eq!(
            full(40, 30, &holders),
            "40.00 GiB of device memory are needed, and 30.00 GiB can be had: the GPU has 80.00 GiB in \
             all; process 41 (python) holds 50.00 GiB, process 42 holds some: end it or choose a smaller \
             budget"
        );
        assert!(full(40, 30, &[]).contains("`nvidia-smi` names it"));
        assert!(full(79, 78, &[]).contains("choose a smaller batch or budget"));
        assert!(full(100, 78, &[]).contains("choose a smaller model, batch or budget"));
    }

    #[test]
    fn who_passes_the_budget() {
        let in_use = MemoryInUse { bytes: 9 << 30, counted: Counted::Process };
        assert_eq!(
            over_budget(in_use, 8 << 30, 7 << 30).to_string(),
            "9.00 GiB of device memory are needed, and 8.00 GiB can be had: the budget allows no more; of \
             what is in use (of this process, by NVML) 7.00 GiB are the plan's, the rest is context, code \
             and workspaces; plan for a smaller block or allow more"
        );
    }

    /// Callers handle a refusal without knowing which device it came from.
    #[test]
    fn a_refusal_of_the_card_is_one_of_any_device() {
        let refused = out_of_memory(3, 2, 9, &[]);
        assert_eq!(refused.missing_bytes(), 1);
        let error = DeviceError::from(CudaError::Memory(refused.clone()));
        assert_eq!(error, DeviceError::Memory(refused));
        let other = DeviceError::from(CudaError::NoDriver);
        assert_eq!(other, DeviceError::Cuda(CudaError::NoDriver));
    }
}
