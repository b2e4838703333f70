//! Named parts of a command: run in order, timed, and listed in a table.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// One part of a command.
pub(crate) struct Stage {
    name: &'static str,
    action: Box<dyn FnOnce() -> Result<Verdict>>,
}

/// How a stage ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    Failed,
    /// Something that the stage needs is not on this machine. The stage prints what.
    Skipped,
}

impl Stage {
    pub(crate) fn new(name: &'static str, action: impl FnOnce() -> Result<()> + 'static) -> Self {
        Self::skippable(name, || action().map(|()| Verdict::Passed))
    }

    /// A stage that may be skipped.
    pub(crate) fn skippable(
        name: &'static str,
        action: impl FnOnce() -> Result<Verdict> + 'static,
    ) -> Self {
        Self { name, action: Box::new(action) }
    }
}

/// The outcome of a stage that ran.
struct Outcome {
    verdict: Verdict,
    took: Duration,
}

/// Runs the stages in order up to the first that fails, then prints the table.
pub(crate) fn run_all(stages: Vec<Stage>) -> Result<()> {
    let start = Instant::now();
    let names: Vec<&str> = stages.iter().map(|stage| stage.name).collect();
    let mut outcomes = Vec::new();
    let mut result = Ok(());
    for stage in stages {
        let (at, of) = (outcomes.len() + 1, names.len());
        let elapsed = seconds(start.elapsed());
        eprintln!("\n==> [{at}/{of}] {} ({elapsed} so far)", stage.name);
        let stage_start = Instant::now();
        let ended = (stage.action)().with_context(|| format!("stage `{}` failed", stage.name));
        let verdict = *ended.as_ref().unwrap_or(&Verdict::Failed);
        outcomes.push(Outcome { verdict, took: stage_start.elapsed() });
        result = ended.map(drop);
        if result.is_err() {
            break;
        }
    }
    eprint!("\n{}", table(&names, &outcomes, start.elapsed()));
    result
}

fn table(names: &[&str], outcomes: &[Outcome], total: Duration) -> String {
    let width = names.iter().map(|name| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (index, name) in names.iter().enumerate() {
        let (verdict, took) = match outcomes.get(index) {
            Some(outcome) => (word(outcome.verdict), seconds(outcome.took)),
            None => ("not run", String::new()),
        };
        _ = writeln!(text, "{name:width$}  {took:>9}  {verdict}");
    }
    _ = writeln!(text, "{:width$}  {:>9}", "total", seconds(total));
    text
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "PASS",
        Verdict::Failed => "FAIL",
        Verdict::Skipped => "skipped",
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn stops_at_the_first_failure() {
        let ran = Rc::new(Cell::new(0));
        let stage = |name, passes: bool| {
            let ran = Rc::clone(&ran);
            Stage::new(name, move || {
                ran.set(ran.get() + 1);
                anyhow::ensure!(passes, "no");
                Ok(())
            })
        };
        let stages = vec![stage("a", true), stage("b", false), stage("c", true)];
        let error = run_all(stages).unwrap_err();
        assert_eq!(format!("{error:#}"), "stage `b` failed: no");
        assert_eq!(ran.get(), 2);
    }

    #[test]
    fn table_shows_every_stage() {
        let outcome = |verdict| Outcome { verdict, took: Duration::from_millis(1500) };
        let text = table(
            &["format", "audit", "docs", "tidy"],
            &[outcome(Verdict::Passed), outcome(Verdict::Skipped), outcome(Verdict::Failed)],
            Duration::from_secs(3),
        );
        let expected = "\
format      1.5 s  PASS
audit       1.5 s  skipped
docs        1.5 s  FAIL
tidy               not run
total       3.0 s
";
        assert_eq!(text, expected);
    }
}
