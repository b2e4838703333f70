//! The queues of a GPU, and how it fails.

use anyhow::Result;
use storm_device::DeviceError;
use storm_device::cuda::{CudaPlanDevice, CudaPlanOptions, GraphUse};
use storm_exec::ExecError;
use storm_plan::Tier;
use storm_verify::{failure_of_plan, verify_plan_device};

/// One line of the table.
pub(super) struct Check {
    pub(super) what: &'static str,
    pub(super) figure: String,
    pub(super) passed: bool,
}

/// Factor by which copies are slowed.
const SLOWDOWN: f64 = 3.5;

/// Instructions of the compute queue before the one that fails.
const BEFORE_FAILURE: u64 = 20;

/// Runs every check. The card cannot be used by this process afterwards.
pub(super) fn all(seeds: u64) -> Result<Vec<Check>> {
    Ok(vec![
        in_order("small plans with random delays", seeds, 1.0, Issue::OneByOne)?,
        in_order("small plans with slowed copies", seeds, SLOWDOWN, Issue::OneByOne)?,
        in_order("small plans as CUDA graphs", seeds, 1.0, Issue::AsGraphs)?,
        over_budget(),
        failing_kernel(),
    ])
}

/// How kernels are issued.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Issue {
    /// One at a time, each recorded in a trace.
    OneByOne,
    /// In graphs, without a trace, so that only results are checked.
    AsGraphs,
}

fn in_order(what: &'static str, seeds: u64, copy_slowdown: f64, issue: Issue) -> Result<Check> {
    let options = |chaos_seed, before: Option<CudaPlanDevice>| CudaPlanOptions {
        chaos_seed,
        copy_slowdown,
        trace: issue == Issue::OneByOne,
        graphs: GraphUse::Everywhere,
        kept: before.and_then(|device| device.keep().ok()),
        ..CudaPlanOptions::default()
    };
    let reports = verify_plan_device::<CudaPlanDevice>(seeds, options)?;
    let spans: usize = reports.iter().map(|report| report.spans).sum();
    let problem = reports.iter().find_map(|report| {
        let problem = report.problem.as_ref()?;
        Some(format!("delays {:?}: {problem}", report.chaos_seed))
    });
    Ok(Check {
        what,
        passed: problem.is_none(),
        figure: problem.unwrap_or_else(|| match issue {
            Issue::OneByOne => format!("{} plans, {spans} instructions in order", reports.len()),
            Issue::AsGraphs => format!("{} plans", reports.len()),
        }),
    })
}

fn over_budget() -> Check {
    let options = CudaPlanOptions { vram_bytes: Some(1 << 20), ..CudaPlanOptions::default() };
    let failure = failure_of_plan::<CudaPlanDevice>(options);
    let passed = match &failure {
        Some(ExecError::Device(DeviceError::Memory(refused))) => refused.tier == Tier::DEVICE,
        _ => false,
    };
    Check { what: "a budget below the context's own", passed, figure: words(failure) }
}

fn failing_kernel() -> Check {
    let options =
        CudaPlanOptions { fail_after: Some(BEFORE_FAILURE), ..CudaPlanOptions::default() };
    let failure = failure_of_plan::<CudaPlanDevice>(options);
    let passed = matches!(failure, Some(ExecError::Device(DeviceError::Instruction { .. })));
    Check { what: "a kernel that fails is named", passed, figure: words(failure) }
}

fn words(failure: Option<ExecError>) -> String {
    failure.map_or_else(|| "nothing failed".to_owned(), |failure| failure.to_string())
}
