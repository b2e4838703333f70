//! The statistics of a session, for Python.

use pyo3::prelude::*;
use storm_saved::SavedReport;

/// Statistics of an engine: sums over all steps, and the pieces of the last step.
#[pyclass(frozen, get_all, module = "storm._native")]
pub(crate) struct Report {
    steps: u64,
    recorded_steps: u64,
    planned_steps: u64,
    stored_bytes: u64,
    fetched_bytes: u64,
    copies: u64,
    copy_seconds: f64,
    stall_seconds: f64,
    stalls: u64,
    kept: (u64, u64),
    moved: (u64, u64),
    shared: (u64, u64),
    host_bytes: u64,
    host_used_bytes: u64,
    planned_peak_bytes: u64,
    least_peak_bytes: u64,
    allowed_bytes: u64,
}

impl Report {
    pub(crate) fn new(report: SavedReport) -> Report {
        let SavedReport {
            steps,
            recorded_steps,
            planned_steps,
            stored_bytes,
            fetched_bytes,
            copies,
            copy_seconds,
            stall_seconds,
            stalls,
            kept,
            moved,
            shared,
            host_bytes,
            host_used_bytes,
            planned_peak_bytes,
            least_peak_bytes,
            allowed_bytes,
        } = report;
        Report {
            steps,
            recorded_steps,
            planned_steps,
            stored_bytes,
            fetched_bytes,
            copies,
            copy_seconds,
            stall_seconds,
            stalls,
            kept,
            moved,
            shared,
            host_bytes,
            host_used_bytes,
            planned_peak_bytes,
            least_peak_bytes,
            allowed_bytes,
        }
    }
}
