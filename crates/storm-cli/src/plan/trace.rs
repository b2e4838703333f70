//! A simulated step as a trace.

use anyhow::{Context, Result};
use std::path::Path;
use storm_device::{Span, Trace, WaitedFor};
use storm_exec::trace::write_chrome;
use storm_files::{IfPresent, StagedFile};
use storm_plan::{HardwareProfile, Plan, Simulation, simulate_with_timeline};

/// Writes the simulated timeline of every queue, for Chrome and Perfetto.
pub(super) fn write(path: &Path, plan: &Plan, profile: &HardwareProfile) -> Result<()> {
    let trace = trace_of(plan, &simulate_with_timeline(plan, profile));
    let failed = || format!("cannot write {}", path.display());
    let mut out = StagedFile::create(path, IfPresent::Replace).with_context(failed)?;
    write_chrome(plan, &trace, &mut out).with_context(failed)?;
    out.finish().with_context(failed)
}

/// Spans grouped by queue, as devices record them.
fn trace_of(plan: &Plan, simulation: &Simulation) -> Trace {
    let nanoseconds = |seconds: f64| (seconds * 1e9).round() as u64;
    let mut trace = Trace::default();
    for queue in plan.queues() {
        let spans = simulation.timeline.iter().filter(|span| span.queue == queue);
        trace.spans.extend(spans.map(|span| Span {
            instruction: span.instruction,
            waited_for: match span.waited_for {
                Some(instruction) => WaitedFor::Instruction(instruction),
                None => WaitedFor::Nothing,
            },
            ready_ns: nanoseconds(span.start_seconds),
            start_ns: nanoseconds(span.start_seconds),
            end_ns: nanoseconds(span.end_seconds),
        }));
    }
    trace
}
