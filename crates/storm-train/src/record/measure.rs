use super::Throughput;
use crate::{Observed, Phase, RunError, StepEvent};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use storm_device::Trace;
use storm_exec::trace::{Summary, summarize};
use storm_plan::{Queue, Tier};

/// How often to sample memory and queues: often enough to be useful, rarely enough to cost nothing.
const INTERVAL: Duration = Duration::from_millis(500);

/// The measurements of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Step number, from 1.
    pub step: u64,
    /// Before the update.
    pub loss: f32,
    /// Fraction of targets predicted correctly, for a classifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f32>,
    /// Before clipping.
    pub gradient_norm: f32,
    /// Learning rate of the update.
    pub learning_rate: f32,
    /// Tokens or images read.
    #[serde(flatten)]
    pub throughput: Throughput,
    /// Time of the step.
    pub seconds: f64,
    /// Part of `seconds` spent waiting for data.
    #[serde(default)]
    pub data_wait_seconds: f64,
    /// Device memory held by the process, as last sampled.
    pub device_bytes: u64,
    /// Host memory of the plan.
    pub host_bytes: u64,
    /// Resident memory of the process; `None` where the system does not report it.
    pub process_bytes: Option<u64>,
    /// Fraction of copy time that overlapped with kernels, as last sampled.
    pub hidden_share: Option<f64>,
    /// Fraction of time in which kernels ran, as last sampled.
    pub compute_share: Option<f64>,
    /// Phase of the step, in a run that predicts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
}

/// Measures steps.
#[derive(Debug, Default)]
pub struct Measure {
    /// When a step was last sampled.
    looked: Option<Instant>,
    /// Whether steps go unrecorded until the interval is over.
    is_waiting: bool,
    /// Whether memory and queues of the last step were sampled.
    looks: bool,
    device_bytes: u64,
    process_bytes: Option<u64>,
    shares: Option<(f64, f64)>,
    trace: Option<Trace>,
}

impl Measure {
    /// The trace of the last sampled step.
    pub fn trace(&self) -> Option<&Trace> {
        self.trace.as_ref()
    }

    /// Whether memory and queues of the last measured step were sampled.
    pub(super) fn looks(&self) -> bool {
        self.looks
    }

    /// Discards earlier samples: the next steps may run under another plan.
    pub(super) fn restart(&mut self) {
        (self.looked, self.is_waiting) = (None, false);
        (self.device_bytes, self.shares) = (0, None);
    }

    pub(super) fn step(
        &mut self,
        step: &StepEvent,
        observed: &mut dyn Observed,
    ) -> Result<StepRecord, RunError> {
        // Devices record by default, so the first step is recorded, and after it one per interval.
        self.looks = !self.is_waiting;
        if self.looks {
            self.look(observed)?;
            observed.set_recording(false);
            self.is_waiting = true;
        } else if self.looked.is_none_or(|looked| looked.elapsed() >= INTERVAL) {
            observed.set_recording(true);
            self.is_waiting = false;
        }
        Ok(StepRecord {
            step: step.step,
            loss: step.loss,
            accuracy: step.accuracy,
            gradient_norm: step.gradient_norm,
            learning_rate: step.learning_rate,
            throughput: Throughput::new(
                step.unit,
                step.units,
                step.step_units as f64 / step.seconds.max(1e-9),
            ),
            seconds: step.seconds,
            data_wait_seconds: step.data_wait_seconds,
            device_bytes: self.device_bytes,
            host_bytes: observed.memory_taken()[Tier::HOST] as u64,
            process_bytes: self.process_bytes,
            hidden_share: self.shares.map(|(hidden, _)| hidden),
            compute_share: self.shares.map(|(_, compute)| compute),
            phase: step.phase,
        })
    }

    /// Samples memory and the queues of the last step, whether or not it is due.
    ///
    /// # Errors
    /// From the device.
    pub fn look(&mut self, observed: &mut dyn Observed) -> Result<(), RunError> {
        self.device_bytes = observed.device_bytes_in_use()?;
        self.process_bytes = process_bytes();
        if let Some(trace) = observed.trace()? {
            let summary = summarize(observed.plan(), &trace);
            self.shares = Some((hidden_share(&summary), summary.busy_share(Queue::COMPUTE)));
            self.trace = Some(trace);
        }
        self.looked = Some(Instant::now());
        Ok(())
    }
}

/// The fraction of copy time that overlapped with kernels.
fn hidden_share(summary: &Summary) -> f64 {
    let busy_ns: u64 = summary.transfers.iter().map(|transfer| transfer.busy_ns).sum();
    let hidden_ns: u64 = summary.transfers.iter().map(|transfer| transfer.hidden_ns).sum();
    match busy_ns {
        0 => 1.0,
        busy_ns => hidden_ns as f64 / busy_ns as f64,
    }
}

/// Resident memory of this process, from `/proc`.
pub(crate) fn process_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
