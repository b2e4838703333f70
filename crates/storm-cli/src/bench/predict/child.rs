//! One run: a separate `storm train` process, and a `storm eval` on rows that nothing else reads.

use super::records::Finished;
use crate::train::Recorded;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use storm_files::open_plain;
use storm_train::{Event, Jump, RunError, Sink, StepRecord, Verdict, read_metrics};

/// Maximum bytes read of a config. `storm train` refuses longer ones.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A run to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    /// Name shown to users.
    pub(super) name: String,
    /// Flags for `storm train`.
    pub(super) flags: Vec<String>,
    pub(super) seed: u64,
    pub(super) steps: u64,
}

/// Makes runs of one config.
pub(super) struct Runner<'a> {
    config: &'a Path,
    folder: &'a Path,
    /// Micro-batches at the end of the held-out rows that predictions use, in runs that predict.
    probe_batches: u64,
}

impl<'a> Runner<'a> {
    pub(super) fn new(config: &'a Path, folder: &'a Path, probe_batches: usize) -> Runner<'a> {
        Runner { config, folder, probe_batches: probe_batches as u64 }
    }

    /// Hash of the config, so that runs of another config are not mistaken for runs of this one.
    pub(super) fn hash(&self) -> Result<String> {
        let cannot = || format!("cannot read {}", self.config.display());
        let mut text = Vec::new();
        let file = open_plain(self.config).with_context(cannot)?;
        file.take(CONFIG_BYTES_MAX).read_to_end(&mut text).with_context(cannot)?;
        Ok(hex(&Sha256::digest(&text)))
    }

    /// Trains and tests, then deletes the run.
    pub(super) fn run(&self, job: &Job, config: &str) -> Result<Finished> {
        let name = format!("{config}-{}-{}", hex(&Sha256::digest(job.flags.join("\n"))), job.seed);
        let folder = self.folder.join(&name);
        // Left by a command that was killed. A resumed run would not be timed as a whole.
        delete(&folder)?;
        let mut command = storm()?;
        command.arg("train").arg(self.config).arg("--quiet").args(["--name", &name]);
        command.arg("--runs").arg(self.folder).args(["--seed", &job.seed.to_string()]);
        command.args(&job.flags);
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
        let status = status.context("cannot start storm train")?;
        if !status.success() {
            bail!("the run {} of \"{}\" ended early ({status})", folder.display(), job.name);
        }
        let mut totals = Totals::default();
        let metrics = folder.join("metrics.jsonl");
        read_metrics(&metrics, &mut totals)?;
        let (Some(validation_loss), true) = (totals.validation_loss, totals.steps == job.steps)
        else {
            bail!(
                "{}: {} of {} steps, or no held-out loss; the config needs held-out data, and no patience",
                metrics.display(),
                totals.steps,
                job.steps
            );
        };
        let test_loss = self.test(&folder)?;
        delete(&folder)?;
        Ok(Finished {
            config: config.to_owned(),
            flags: job.flags.clone(),
            seed: job.seed,
            steps: job.steps,
            validation_loss,
            test_loss,
            seconds: totals.step_seconds + totals.other_seconds,
            step_seconds: totals.step_seconds,
            accepted: totals.accepted,
            refused: totals.refused,
            kept: totals.kept,
            undone: totals.undone,
            distance_min: totals.distance_min,
            brier: totals.brier(),
        })
    }

    /// The loss on the held-out rows between those for evaluations and those for predictions. Runs
    /// that do not predict use the same rows.
    fn test(&self, folder: &PathBuf) -> Result<f64> {
        let recorded = Recorded::of_folder(folder)?.context("the run left no config.toml")?;
        let step = (recorded.batch * recorded.accumulate) as u64;
        let skip = recorded.eval_steps * step;
        let leave = 2 * self.probe_batches * recorded.batch as u64;
        let mut command = storm()?;
        command.arg("eval").arg(folder).arg("--json");
        command.args(["--skip-rows", &skip.to_string(), "--leave-rows", &leave.to_string()]);
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let output = output.context("cannot start storm eval")?;
        let found: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        match found.as_ref().and_then(|found| found["loss"].as_f64()) {
            Some(loss) if output.status.success() => Ok(loss),
            _ => bail!(
                "cannot test {}; {skip} held-out rows are for validation and {leave} for predictions, and the rest must be \
                 enough to test on",
                folder.display()
            ),
        }
    }
}

fn storm() -> Result<Command> {
    Ok(Command::new(std::env::current_exe().context("cannot find storm itself")?))
}

/// Deletes a folder that one of our runs made.
fn delete(folder: &Path) -> Result<()> {
    match folder.is_dir() {
        true => std::fs::remove_dir_all(folder)
            .with_context(|| format!("cannot delete {}", folder.display())),
        false => Ok(()),
    }
}

fn hex(hash: &[u8]) -> String {
    hash[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Totals of a run's metrics.
#[derive(Debug, Default, PartialEq)]
struct Totals {
    steps: u64,
    step_seconds: f64,
    other_seconds: f64,
    validation_loss: Option<f64>,
    accepted: u64,
    refused: u64,
    kept: u64,
    undone: u64,
    distance_min: Option<f64>,
    /// Jumps with an expected acceptance, and the sum of its squared differences from the outcome.
    expected: u64,
    squares: f64,
}

impl Totals {
    fn brier(&self) -> Option<f64> {
        (self.expected > 0).then(|| self.squares / self.expected as f64)
    }

    fn jump(&mut self, jump: &Jump) {
        let is_accepted = jump.verdict == Verdict::Accepted;
        match is_accepted {
            true => {
                self.accepted += 1;
                let least = self.distance_min.map_or(jump.distance, |d| d.min(jump.distance));
                self.distance_min = Some(least);
            }
            false => self.refused += 1,
        }
        if let Some(expected) = jump.expected {
            self.expected += 1;
            self.squares += (expected.acceptance - if is_accepted { 1.0 } else { 0.0 }).powi(2);
        }
    }
}

impl Sink for Totals {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.steps = record.step;
        self.step_seconds += record.seconds;
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match *event {
            Event::Evaluated { loss, .. } => self.validation_loss = Some(loss),
            Event::PredictionPrepared { seconds, .. } => self.other_seconds += seconds,
            Event::Predicted { prediction, .. } => self.other_seconds += prediction.seconds,
            Event::PredictionJudged { judgement, .. } => {
                self.other_seconds += judgement.seconds;
                match judgement.kept {
                    true => self.kept += 1,
                    false => self.undone += 1,
                }
            }
            Event::Jumped { jump, .. } => self.jump(&jump),
            _ => {}
        }
        Ok(())
    }
}
