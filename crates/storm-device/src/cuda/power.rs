//! The energy use and the clock of a card, from NVML if available.

use super::memory::MemoryMeter;
use nvml_wrapper::enum_wrappers::device::Clock;

/// A reading at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerReading {
    /// Energy since the driver was loaded.
    pub joules: f64,
    /// Clock of the multiprocessors.
    pub clock_mhz: u32,
    /// The card's power limit.
    pub limit_watts: Option<f64>,
}

impl MemoryMeter {
    /// The card's energy use so far and its clock now. `None` if NVML does not report them.
    pub(super) fn power(&self) -> Option<PowerReading> {
        let card = self.nvml_card()?;
        Some(PowerReading {
            joules: card.total_energy_consumption().ok()? as f64 / 1e3,
            clock_mhz: card.clock_info(Clock::SM).ok()?,
            limit_watts: card
                .enforced_power_limit()
                .ok()
                .map(|milliwatts| f64::from(milliwatts) / 1e3),
        })
    }
}
