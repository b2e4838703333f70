use crate::{Prediction, Queue, Simulation};

/// The resource that limits a plan's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The GPU computes all the time, and recomputes nothing.
    Compute,
    /// The GPU computes all the time, but recomputes some of it for lack of memory.
    Memory,
    /// The GPU waits for copies.
    Bus,
    /// The GPU waits for copies that wait for the disk.
    Disk,
    /// The GPU waits for the host to issue work.
    Launches,
    /// The GPU waits for the data of the next step.
    Data,
}

/// If the compute queue is busy for less than this fraction, what it waits for is the bottleneck.
const BUSY: f64 = 0.9;

/// Recomputation below this fraction is ignored.
const AGAIN: f64 = 0.02;

impl Bottleneck {
    /// The bottleneck of a simulated step.
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

    /// The name in reports: `compute`, `pcie`.
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
