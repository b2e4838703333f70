//! What a card consumes and how fast it runs, from NVML where available.

use super::memory::MemoryMeter;
use nvml_wrapper::enum_wrappers::device::Clock;

/// A card at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerReading {
    /// Energy since the driver was loaded.
    pub joules: f64,
    /// Clock of the multiprocessors.
    pub clock_mhz: u32,
    /// The most power that the card may take.
    pub limit_watts: Option<f64>,
}

impl MemoryMeter {
    /// What the card has consumed and how fast it runs now; none if NVML does not say.
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
