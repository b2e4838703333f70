//! The files a run writes about itself: `report.html` and the trace of a step.

use super::launch;
use super::setup::Setup;
use crate::model::grouped;
use crate::run_page;
use anyhow::Result;
use std::io;
use std::path::{Path, PathBuf};
use storm_exec::trace::write_chrome;
use storm_files::{StagedFile, replace_file};
use storm_plan::{Plan, Tier};
use storm_train::{History, LastPlan, Measure, Part, Pictures, PlanFacts, RunError, write_report};

/// The contents of the page besides the setup and the history.
pub(super) struct Page<'a> {
    pub(super) pictures: Pictures,
    pub(super) plan: &'a Plan,
    pub(super) measure: &'a Measure,
    /// Data loading throughput, predicted and measured.
    pub(super) data: &'a [(&'a str, String)],
}

impl Page<'_> {
    /// Writes the page and the trace, and returns the page's path; `None` if no step was traced.
    pub(super) fn write(
        &self,
        setup: &Setup,
        history: &History,
        part: &Part,
    ) -> Result<Option<PathBuf>> {
        let Page { pictures, plan, measure, data } = self;
        let Some(trace) = measure.trace() else { return Ok(None) };
        write_file(&setup.folder.join("trace.json"), |out| write_chrome(plan, trace, out))?;
        let report = setup.folder.join("report.html");
        let (device_budget, host_budget) =
            (setup.launch.budget()[Tier::DEVICE], setup.request.ram.bytes);
        let name = setup.settings.name.as_deref().unwrap_or_default();
        let budgets = [Some(device_budget), Some(host_budget)];
        let facts = run_page::facts(name, &setup.record(), budgets, history, pictures.clone());
        let last_plan = LastPlan::Facts(PlanFacts {
            rows: &rows(setup, part, data),
            part,
            prediction: &setup.launch.plan().planned.prediction,
            device_budget,
            host_budget,
            plan,
            trace,
        });
        write_file(&report, |out| write_report(&facts, history, last_plan, out))?;
        Ok(Some(report))
    }
}

fn rows(setup: &Setup, part: &Part, data: &[(&str, String)]) -> Vec<(String, String)> {
    let row = |what: &str, value: String| (what.to_owned(), value);
    let mut rows = vec![
        row("parameters", grouped(setup.model.config.parameter_count())),
        row("layers", setup.model.config.layer_count().to_string()),
        row("hardware", setup.launch.profile().name.clone()),
        row("steps under it", grouped(part.steps())),
    ];
    if setup.splits.len() > 1 {
        rows.push(row("micro-batches tried", launch::shown(&setup.splits)));
    }
    rows.extend(data.iter().map(|(what, words)| row(what, words.clone())));
    rows
}

fn write_file(
    path: &Path,
    fill: impl FnOnce(&mut StagedFile) -> io::Result<()>,
) -> Result<(), RunError> {
    replace_file(path, fill).map_err(RunError::write(path))
}
