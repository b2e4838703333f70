//! What a session did, in numbers.

use storm_device::DeviceError;
use storm_device::foreign::{CopyTime, Stall};

/// Sums over the life of a session, and the last step that ended or is running.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SavedReport {
    /// Steps that began.
    pub steps: u64,
    /// Of those: recorded.
    pub recorded_steps: u64,
    /// Of those: run to the end by a plan.
    pub planned_steps: u64,
    /// Copied to the host, all steps.
    pub stored_bytes: u64,
    /// Copied back, all steps.
    pub fetched_bytes: u64,
    /// Copies in both directions.
    pub copies: u64,
    /// How long they took, one by one.
    pub copy_seconds: f64,
    /// How long the compute stream waited for copies.
    pub stall_seconds: f64,
    /// Waits of the compute stream that took time.
    pub stalls: u64,
    /// Last step: pieces and bytes that stayed.
    pub kept: (u64, u64),
    /// Last step: pieces and bytes that were offloaded.
    pub moved: (u64, u64),
    /// Last step: saved again while already saved, with the bytes that this avoided.
    pub shared: (u64, u64),
    /// Host memory held now.
    pub host_bytes: u64,
    /// Host memory in use at most, in any step.
    pub host_used_bytes: u64,
    /// Predicted by the plan in use; 0 without one.
    pub planned_peak_bytes: u64,
    /// The least peak with everything offloaded, by the plan in use; 0 without one.
    pub least_peak_bytes: u64,
    /// What is allowed, by the plan in use; 0 without one.
    pub allowed_bytes: u64,
}

/// Times that are known only when the device is done.
#[derive(Debug, Default)]
pub(super) struct Clock {
    copies: Vec<CopyTime>,
    stalls: Vec<Stall>,
}

/// A wait shorter than this is the overhead of two events.
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
