//! `storm report`: rebuilds the page of a run from its metrics.

use crate::run_page;
use crate::size;
use crate::source::NoModel;
use crate::train;
use anyhow::Result;
use clap::Args;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use storm_files::{open_plain, replace_file};
use storm_train::{History, LastPlan, Pictures, RunError, read_metrics, write_report};

/// Size limit of an existing page that is read for the section on the last plan.
const PAGE_BYTES_MAX: u64 = 256 << 20;

#[derive(Args)]
pub(crate) struct ReportArgs {
    /// Folder of the run, such as runs/NAME.
    run: PathBuf,
    /// File to write. Default: `report.html` in the run's folder. The parts of that page on the last plan, one step in
    /// detail and pictures are kept.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print JSON: the path of the page and the figures of the run.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ReportArgs) -> Result<()> {
    let shown = args.run.display();
    let metrics = args.run.join("metrics.jsonl");
    if !metrics.exists() {
        let problem =
            format!("{shown} has no metrics.jsonl: name the folder of a run, such as runs/NAME");
        return Err(NoModel::new(problem).into());
    }
    let mut history = History::new();
    read_metrics(&metrics, &mut history)?;
    if history.last().is_none() {
        let problem =
            format!("{shown} has no step in its metrics yet; try again after the first step");
        return Err(NoModel::new(problem).into());
    }
    let own = args.run.join("report.html");
    let before = page_before(&own)?;
    let out = args.out.as_ref().unwrap_or(&own);
    let name = args.run.canonicalize().ok();
    let name = name.as_deref().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    let settings = train::settings_of_run(&args.run);
    let budgets = ["vram", "ram"].map(|key| size::parse(settings.get(key)?).ok());
    // Metrics do not contain the last plan's results or the sample images, so take both from the existing page.
    let pictures = before.clone().map_or(Pictures::None, Pictures::Page);
    let facts = run_page::facts(&name, &settings, budgets, &history, pictures);
    let last_plan = before.as_deref().map_or(LastPlan::Unknown, LastPlan::Page);
    replace_file(out, |file| write_report(&facts, &history, last_plan, file))
        .map_err(RunError::write(out))?;
    if args.json {
        let last = history.last();
        let mut object = serde_json::json!({
            "report": out.display().to_string(),
            "steps": last.map(|last| last.step),
            "loss": last.map(|last| last.loss),
            "best_held_out_loss": history.best_loss(),
        });
        if let Some(read) = last.map(|last| last.throughput) {
            object[read.unit().name()] = read.total().into();
        }
        if let Some(accuracy) = history.best_accuracy() {
            object["best_held_out_accuracy"] = accuracy.into();
        }
        println!("{object}");
        return Ok(());
    }
    println!("{}", out.display());
    Ok(())
}

/// Reads the existing page; `None` if there is none or it is not text.
fn page_before(path: &Path) -> Result<Option<String>, RunError> {
    let file = match open_plain(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(RunError::read(path)(error)),
    };
    let mut bytes = Vec::new();
    file.take(PAGE_BYTES_MAX).read_to_end(&mut bytes).map_err(RunError::read(path))?;
    Ok(String::from_utf8(bytes).ok())
}
