//! The pictures that a run leaves: `report.html` and the trace of a step.

use super::launch;
use super::setup::Setup;
use crate::model::grouped;
use anyhow::Result;
use std::io;
use std::path::{Path, PathBuf};
use storm_exec::trace::write_chrome;
use storm_files::{StagedFile, replace_file};
use storm_plan::{Plan, Tier};
use storm_train::{History, Measure, Part, RunError, RunFacts, write_report};

/// Writes both, and says where the report is; none if no step was looked at.
pub(super) fn write(
    setup: &Setup,
    plan: &Plan,
    measure: &Measure,
    history: &History,
    part: &Part,
) -> Result<Option<PathBuf>> {
    let Some(trace) = measure.trace() else { return Ok(None) };
    write_file(&setup.folder.join("trace.json"), |out| write_chrome(plan, trace, out))?;
    let report = setup.folder.join("report.html");
    let facts = facts(setup, history);
    write_file(&report, |out| write_report(&facts, history, part, plan, trace, out))?;
    Ok(Some(report))
}

fn facts(setup: &Setup, history: &History) -> RunFacts {
    let (plan, options) = (setup.launch.plan(), setup.launch.options());
    let row = |what: &str, value: String| (what.to_owned(), value);
    let shape = format!("{} × {} of {} tokens", plan.batch, plan.accumulate, options.sequence);
    let mut rows = vec![
        row("model", setup.model.name.clone()),
        row("parameters", grouped(setup.model.config.parameter_count())),
        row("layers", setup.model.config.layer_count.to_string()),
        row("step", shape),
        row("hardware", setup.launch.profile().name.clone()),
    ];
    if setup.splits.len() > 1 {
        rows.push(row("micro-batches tried", launch::shown(&setup.splits)));
    }
    if let Some(last) = history.last() {
        rows.push(row("steps", grouped(last.step)));
        rows.push(row("tokens", grouped(last.tokens)));
        rows.push(row("last loss", format!("{:.4}", last.loss)));
    }
    rows.extend(history.best_loss().map(|loss| row("best held-out loss", format!("{loss:.4}"))));
    rows.push(row("storm", env!("CARGO_PKG_VERSION").to_owned()));
    RunFacts {
        title: format!("Run {}", setup.settings.name.as_deref().unwrap_or_default()),
        rows,
        device_budget: setup.launch.budget()[Tier::DEVICE],
        host_budget: setup.request.ram.bytes,
        prediction: plan.planned.prediction.clone(),
    }
}

fn write_file(
    path: &Path,
    fill: impl FnOnce(&mut StagedFile) -> io::Result<()>,
) -> Result<(), RunError> {
    replace_file(path, fill).map_err(RunError::write(path))
}
