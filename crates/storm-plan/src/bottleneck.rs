use crate::{Prediction, Queue, Simulation};

/// The resource that limits a plan's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The card computes all the time, and recomputes nothing.
    Compute,
    /// The card computes all the time, but recomputes some of it for lack of memory.
    Memory,
    /// The card waits for copies.
    Bus,
    /// The card waits for copies that wait for the disk.
    Disk,
    /// The card waits for the host to issue work.
    Launches,
    /// The card waits for the data of the next step.
    Data,
}

/// A compute queue busy for less than this share waits for something worth naming.
const BUSY: f64 = 0.9;

/// Recomputation below this share is not worth naming.
const AGAIN: f64 = 0.02;

impl Bottleneck {
    /// Of a simulated step.
    pub fn of(prediction: &Prediction, simulation: &Simulation) -> Bottleneck {
        if prediction.busy[Queue::COMPUTE] >= BUSY {
            return match prediction.recompute_fraction > AGAIN {
                true => Bottleneck::Memory,
                false => Bottleneck::Compute,
            };
        }
        let stalls = &simulation.stalls;
        let is_most = |seconds: f64| seconds > stalls.total_seconds() / 2.0;
        if is_most(stalls.data_seconds) {
            return Bottleneck::Data;
        }
        if is_most(stalls.disk_seconds) {
            return Bottleneck::Disk;
        }
        match is_most(stalls.launch_seconds) {
            true => Bottleneck::Launches,
            false => Bottleneck::Bus,
        }
    }

    /// `pcie`.
    pub fn name(self) -> &'static str {
        match self {
            Bottleneck::Compute => "compute",
            Bottleneck::Memory => "memory",
            Bottleneck::Bus => "pcie",
            Bottleneck::Disk => "disk",
            Bottleneck::Launches => "launches",
            Bottleneck::Data => "data",
        }
    }
}
