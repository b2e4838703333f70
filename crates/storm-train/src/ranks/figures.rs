//! What every rank says of itself at the end of a step: time and memory.

use crate::MemoryReading;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// How often a rank asks for its memory.
const INTERVAL: Duration = Duration::from_millis(500);

/// Stands for memory that the system does not tell.
const UNKNOWN: u64 = u64::MAX;

/// One rank in one step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankFigures {
    /// Its number.
    pub rank: u32,
    /// Its part of the step took.
    pub seconds: f64,
    /// Of these, how long its collectives sent, received or waited for other ranks. Kernels may have run meanwhile.
    pub collective_seconds: f64,
    /// Device memory that it holds, when it was last asked for.
    pub device_bytes: u64,
    /// What is free on its device; none if no other process shares that memory.
    pub device_free_bytes: Option<u64>,
    /// Host memory that its plan holds.
    pub host_bytes: u64,
    /// Memory of the process as the system counts it; none where it does not say.
    pub process_bytes: Option<u64>,
}

impl RankFigures {
    pub(super) const BYTES: usize = 6 * size_of::<u64>();

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let RankFigures { seconds, collective_seconds, device_bytes, host_bytes, .. } = self;
        let process_bytes = self.process_bytes.unwrap_or(UNKNOWN);
        let free_bytes = self.device_free_bytes.unwrap_or(UNKNOWN);
        let (seconds, collective) = (seconds.to_bits(), collective_seconds.to_bits());
        let all = [seconds, collective, device_bytes, free_bytes, host_bytes, process_bytes];
        all.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    pub(super) fn of_bytes(rank: u32, bytes: &[u8]) -> RankFigures {
        let mut numbers = bytes.as_chunks().0.iter().map(|chunk| u64::from_le_bytes(*chunk));
        let mut next = || numbers.next().unwrap_or(0);
        RankFigures {
            rank,
            seconds: f64::from_bits(next()),
            collective_seconds: f64::from_bits(next()),
            device_bytes: next(),
            device_free_bytes: Some(next()).filter(|&bytes| bytes != UNKNOWN),
            host_bytes: next(),
            process_bytes: Some(next()).filter(|&bytes| bytes != UNKNOWN),
        }
    }
}

/// Memory of a rank, which is asked for now and then.
#[derive(Debug, Default)]
pub(super) struct Memory {
    asked: Option<Instant>,
    pub(super) device: MemoryReading,
    pub(super) process_bytes: Option<u64>,
}

impl Memory {
    /// Asks if it is time for it.
    pub(super) fn look<E>(
        &mut self,
        device: impl FnOnce() -> Result<MemoryReading, E>,
    ) -> Result<(), E> {
        if self.asked.is_none_or(|asked| asked.elapsed() >= INTERVAL) {
            self.device = device()?;
            self.process_bytes = crate::record::process_bytes();
            self.asked = Some(Instant::now());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_arrive_as_they_were_sent() {
        for process_bytes in [None, Some(0), Some(7 << 40)] {
            let figures = RankFigures {
                rank: 3,
                seconds: 0.1 + 0.2,
                collective_seconds: 1e-9,
                device_bytes: 5,
                device_free_bytes: process_bytes.map(|bytes| bytes + 1),
                host_bytes: 1 << 50,
                process_bytes,
            };
            let bytes = figures.to_bytes();
            assert_eq!(bytes.len(), RankFigures::BYTES);
            assert_eq!(RankFigures::of_bytes(3, &bytes), figures);
        }
    }
}
