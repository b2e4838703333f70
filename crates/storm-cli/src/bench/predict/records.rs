//! Finished runs: one line of JSON each, so that a later command continues where this one ended.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use storm_files::{append_plain, open_plain};

/// Maximum bytes read of the file.
const BYTES_MAX: u64 = 64 << 20;

/// A finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Finished {
    /// Hash of the config.
    pub(super) config: String,
    /// Flags of `storm train`, without the config and the seed.
    pub(super) flags: Vec<String>,
    pub(super) seed: u64,
    pub(super) steps: u64,
    /// Loss on the held-out rows that choose the learning rate.
    pub(super) validation_loss: f64,
    /// Loss on held-out rows that nothing else reads.
    pub(super) test_loss: f64,
    /// Time of all steps and predictions with all overheads, without evaluations and checkpoints.
    pub(super) seconds: f64,
    /// The part for steps.
    pub(super) step_seconds: f64,
    pub(super) accepted: u64,
    pub(super) refused: u64,
    /// Corrections after which jumps were kept, or undone.
    pub(super) kept: u64,
    pub(super) undone: u64,
    /// The smallest distance by which an accepted jump moved the weights, if there is one.
    pub(super) distance_min: Option<f64>,
    /// Brier score of a controller that learns: the mean square of the acceptance probability minus
    /// the outcome.
    #[serde(default)]
    pub(super) brier: Option<f64>,
    /// Cost of a prediction in steps, as that controller measured it. A run with this number in its config makes the
    /// same choices.
    #[serde(default)]
    pub(super) cost: Option<f64>,
    /// Time of the whole process, with what `seconds` leaves out.
    #[serde(default)]
    pub(super) whole_seconds: Option<f64>,
}

impl Finished {
    /// Its cost in steps of its own. A machine that is slow for a while slows both.
    pub(super) fn cost_steps(&self) -> f64 {
        self.steps as f64 * self.seconds / self.step_seconds.max(f64::MIN_POSITIVE)
    }
}

/// All finished runs, in a file.
pub(super) struct Records {
    path: PathBuf,
    all: Vec<Finished>,
}

impl Records {
    /// Reads them. A line that cannot be parsed, such as the last one of a killed command, counts
    /// as an unfinished run.
    pub(super) fn open(folder: &Path) -> Result<Records> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let path = folder.join("finished.jsonl");
        let cannot = || format!("cannot read {}", path.display());
        let mut text = String::new();
        match open_plain(&path) {
            Ok(file) => {
                file.take(BYTES_MAX).read_to_string(&mut text).with_context(cannot)?;
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(cannot),
        }
        let all = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let records = Records { path, all };
        if !text.is_empty() && !text.ends_with('\n') {
            // The next record begins on a line of its own.
            records.append("\n")?;
        }
        Ok(records)
    }

    pub(super) fn find(&self, config: &str, flags: &[String], seed: u64) -> Option<&Finished> {
        let is_it = |f: &&Finished| f.config == config && f.flags == flags && f.seed == seed;
        self.all.iter().find(is_it)
    }

    /// The time that a run with these flags is expected to take as a whole: the mean over its other seeds, or else over all
    /// runs of the config. `None` before the first.
    pub(super) fn whole_seconds(&self, config: &str, flags: &[String]) -> Option<f64> {
        let mean = |is_like: &dyn Fn(&&Finished) -> bool| {
            let like = self.all.iter().filter(|f| f.config == config).filter(is_like);
            let seconds: Vec<f64> = like.filter_map(|f| f.whole_seconds).collect();
            (!seconds.is_empty()).then(|| seconds.iter().sum::<f64>() / seconds.len() as f64)
        };
        mean(&|f| f.flags == flags).or_else(|| mean(&|_| true))
    }

    pub(super) fn push(&mut self, finished: Finished) -> Result<()> {
        let line = serde_json::to_string(&finished).context("a run as JSON")?;
        self.append(&format!("{line}\n"))?;
        self.all.push(finished);
        Ok(())
    }

    fn append(&self, text: &str) -> Result<()> {
        let cannot = || format!("cannot write {}", self.path.display());
        let mut file = append_plain(&self.path).with_context(cannot)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_data()).with_context(cannot)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn finished(seed: u64, steps: u64, test_loss: f64) -> Finished {
        Finished {
            config: "c".to_owned(),
            flags: vec![format!("--steps={steps}")],
            seed,
            steps,
            validation_loss: test_loss,
            test_loss,
            seconds: steps as f64 * 0.01,
            step_seconds: steps as f64 * 0.01,
            accepted: 0,
            refused: 0,
            kept: 0,
            undone: 0,
            distance_min: None,
            brier: None,
            cost: None,
            whole_seconds: Some(steps as f64 * 0.02),
        }
    }

    #[test]
    fn what_is_finished_is_found_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut records = Records::open(folder.path()).expect("none yet");
        let (first, second) = (finished(0, 10, 0.1 + 0.2), finished(1, 10, 2.0));
        records.push(first.clone()).expect("written");
        // The command was killed here.
        records.append("{\"config\":\"c\",\"fla").expect("written");
        let mut records = Records::open(folder.path()).expect("one, and half a line");
        assert_eq!(records.find("c", &first.flags, 0), Some(&first), "to the bit");
        assert_eq!(records.find("c", &first.flags, 1), None);
        assert_eq!(records.find("d", &first.flags, 0), None);
        records.push(second.clone()).expect("written");
        let records = Records::open(folder.path()).expect("two");
        assert_eq!(records.find("c", &second.flags, 1), Some(&second));
    }

    #[test]
    fn runs_take_as_long_as_those_like_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut records = Records::open(folder.path()).expect("none yet");
        let [short, long] = [10, 30].map(|steps| finished(0, steps, 2.0));
        assert_eq!(records.whole_seconds("c", &short.flags), None);
        let old = Finished { whole_seconds: None, ..finished(1, 10, 2.0) };
        for run in [&short, &long, &old] {
            records.push(run.clone()).expect("written");
        }
        let of = |flags: &[String]| records.whole_seconds("c", flags).expect("runs");
        assert!((of(&short.flags) - 0.2).abs() < 1e-9);
        assert!((of(&long.flags) - 0.6).abs() < 1e-9);
        assert!((of(&[]) - 0.4).abs() < 1e-9);
        assert_eq!(records.whole_seconds("d", &[]), None);
    }

    #[test]
    fn costs_are_in_steps_of_the_run_itself() {
        let mut run = finished(0, 100, 1.0);
        run.seconds *= 1.2;
        assert!((run.cost_steps() - 120.0).abs() < 1e-9);
    }
}
