//! One run: a separate `storm train` process, which also tests on rows that nothing else reads.

use super::records::Finished;
use crate::predict::PredictArg;
use crate::train;
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
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
}

impl<'a> Runner<'a> {
    pub(super) fn new(config: &'a Path, folder: &'a Path) -> Runner<'a> {
        Runner { config, folder }
    }

    /// Hash of the config, so that runs of another config are not mistaken for runs of this one.
    pub(super) fn hash(&self) -> Result<String> {
        let cannot = || format!("cannot read {}", self.config.display());
        let mut text = Vec::new();
        let file = open_plain(self.config).with_context(cannot)?;
        file.take(CONFIG_BYTES_MAX).read_to_end(&mut text).with_context(cannot)?;
        Ok(hex(&Sha256::digest(&text)))
    }

    /// Trains and tests, then deletes the run. Its test loss is that of the held-out rows between those for evaluations
    /// and those for predictions.
    pub(super) fn run(&self, job: &Job, config: &str) -> Result<Finished> {
        let name = format!("{config}-{}-{}", hex(&Sha256::digest(job.flags.join("\n"))), job.seed);
        let folder = self.folder.join(&name);
        // Left by a command that was killed. A resumed run would not be timed as a whole.
        delete(&folder)?;
        let begun = Instant::now();
        let storm = std::env::current_exe().context("cannot find storm itself")?;
        let mut command = Command::new(storm);
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
        let (Some(validation_loss), Some(test_loss), true) =
            (totals.validation_loss, totals.test_loss, totals.steps == job.steps)
        else {
            bail!(
                "{}: {} of {} steps, or no held-out loss; the config needs held-out data, and no patience",
                metrics.display(),
                totals.steps,
                job.steps
            );
        };
        let recorded = train::settings_of(&folder.join("config.toml"))?;
        let cost = recorded.predict.as_ref().and_then(PredictArg::cost_steps);
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
            cost,
            whole_seconds: Some(begun.elapsed().as_secs_f64()),
        })
    }
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
    test_loss: Option<f64>,
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
            Event::Tested { loss, .. } => self.test_loss = Some(loss),
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
