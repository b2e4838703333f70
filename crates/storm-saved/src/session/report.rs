//! Statistics of a session.

use storm_device::DeviceError;
use storm_device::foreign::{CopyTime, Stall};

/// Totals over a session, and figures of the latest step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SavedReport {
    /// Steps begun.
    pub steps: u64,
    /// Of those, recorded steps.
    pub recorded_steps: u64,
    /// Of those, steps that followed a plan to the end.
    pub planned_steps: u64,
    /// Bytes copied to the host, in all steps.
    pub stored_bytes: u64,
    /// Bytes copied back, in all steps.
    pub fetched_bytes: u64,
    /// Copies in both directions.
    pub copies: u64,
    /// Sum of the durations of all copies.
    pub copy_seconds: f64,
    /// How long the compute stream waited for copies.
    pub stall_seconds: f64,
    /// Waits of the compute stream that took time.
    pub stalls: u64,
    /// Latest step: pieces and bytes that stayed.
    pub kept: (u64, u64),
    /// Latest step: pieces and bytes that were offloaded.
    pub moved: (u64, u64),
    /// Latest step: saves of memory that was already saved, and the bytes that this avoided.
    pub shared: (u64, u64),
    /// Host memory held now.
    pub host_bytes: u64,
    /// Peak host memory in use, over all steps.
    pub host_used_bytes: u64,
    /// Peak predicted by the current plan. 0 without one.
    pub planned_peak_bytes: u64,
    /// The least peak with everything offloaded, by the current plan. 0 without one.
    pub least_peak_bytes: u64,
    /// The memory limit of the current plan. 0 without one.
    pub allowed_bytes: u64,
}

/// Timings that are known only when the device is done.
#[derive(Debug, Default)]
pub(super) struct Clock {
    copies: Vec<CopyTime>,
    stalls: Vec<Stall>,
}

/// A shorter wait is only the overhead of two events.
const STALL_SECONDS_MIN: f64 = 20e-6;

impl Clock {
    pub(super) fn copy(&mut self, time: CopyTime) {
        self.copies.push(time);
    }

    pub(super) fn stall(&mut self, stall: Stall) {
        self.stalls.push(stall);
    }

    /// Adds the times that are known so far.
    pub(super) fn read(&mut self, report: &mut SavedReport) -> Result<(), DeviceError> {
        let mut unread = Vec::new();
        for time in self.copies.drain(..) {
            match time.seconds()? {
                Some(seconds) => report.copy_seconds += seconds,
                None => unread.push(time),
            }
        }
        self.copies = unread;
        let mut unread = Vec::new();
        for stall in self.stalls.drain(..) {
            match stall.seconds()? {
                Some(seconds) if seconds >= STALL_SECONDS_MIN => {
                    report.stall_seconds += seconds;
                    report.stalls += 1;
                }
                Some(_) => {}
                None => unread.push(stall),
            }
        }
        self.stalls = unread;
        Ok(())
    }
}
