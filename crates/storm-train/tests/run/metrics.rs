//! Metrics of a resumed run: what is kept, and how much memory that takes.

use serde_json::json;
use std::fs;
use std::path::PathBuf;
use storm_host::allocation::peak_bytes;
use storm_model::Unit;
use storm_train::{Event, History, MetricsFile, RunError, Sink, StepRecord, Throughput};
use tempfile::TempDir;

/// Records what it hears.
#[derive(Default)]
struct Heard {
    steps: Vec<u64>,
    evaluations: Vec<(u64, f64)>,
}

impl Sink for Heard {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.steps.push(record.step);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        if let Event::Evaluated { step, loss, .. } = event {
            self.evaluations.push((*step, *loss));
        }
        Ok(())
    }
}

fn record(step: u64) -> StepRecord {
    StepRecord {
        step,
        loss: 1.0 / step as f32,
        gradient_norm: 0.5,
        learning_rate: 1e-3,
        accuracy: None,
        throughput: Throughput::new(Unit::Tokens, 64 * step, 518.400_005),
        seconds: 0.123_456_789,
        device_bytes: 1 << 30,
        host_bytes: 1 << 31,
        process_bytes: Some(1 << 32),
        hidden_share: Some(0.987_654_321),
        data_wait_seconds: 0.012_345,
        compute_share: Some(0.876_543_21),
        phase: None,
    }
}

fn step_line(step: u64) -> String {
    format!("{}\n", json!(record(step)))
}

fn evaluation_line(step: u64) -> String {
    let line = json!({"step": step, "eval_loss": 2.5, "is_best": true, "seconds": 0.1});
    format!("{line}\n")
}

fn save_line(step: u64) -> String {
    let line = json!({"step": step, "checkpoint": "there", "seconds": 1.0, "pause_seconds": 0.1});
    format!("{line}\n")
}

fn file(folder: &TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("metrics.jsonl");
    fs::write(&path, text).expect("a file");
    path
}

#[test]
fn what_was_written_of_later_steps_is_dropped_and_the_rest_is_heard() {
    let folder = TempDir::new().expect("a folder");
    let kept = [
        step_line(1),
        evaluation_line(1),
        step_line(2),
        // A checkpoint is reported when it is on the disk, which may be after later steps.
        save_line(2),
    ];
    let [step_1, evaluation_1, step_2, save_2] = &kept;
    let too_long = format!("{}{}", " ".repeat((1 << 16) + 7), step_line(1));
    let half = &step_line(2)[..40];
    let later = [step_line(3), evaluation_line(3), save_line(3)].concat();
    for (text, expected) in [
        (kept.concat(), kept.concat()),
        ([step_1, evaluation_1, step_2, &later, save_2, half].concat(), kept.concat()),
        ([step_1, half].concat(), step_1.clone()),
        (
            [step_1, "\n[1]\n\u{0}\n{\"loss\":1}\n", &too_long, step_2].concat(),
            [step_1, step_2.as_str()].concat(),
        ),
        (String::new(), String::new()),
    ] {
        let path = file(&folder, &text);
        let mut heard = Heard::default();
        let mut metrics = MetricsFile::open(&path, 2, &mut heard).expect("a file");
        assert_eq!(fs::read_to_string(&path).expect("a file"), expected);
        let steps = expected.lines().filter(|line| line.contains("gradient_norm")).count() as u64;
        assert_eq!(heard.steps, (1..=steps).collect::<Vec<_>>());
        let evaluations = expected.lines().filter(|line| line.contains("eval_loss")).count();
        assert_eq!(heard.evaluations, vec![(1, 2.5); evaluations]);
        // It continues at the end.
        metrics.step(&record(3)).expect("a line");
        metrics.event(&Event::Saving { step: 3 }).expect("flushed");
        assert_eq!(fs::read_to_string(&path).expect("a file"), expected + &step_line(3));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}

#[test]
fn long_metrics_take_no_more_memory_than_short_ones() {
    const STEPS: u64 = 60_000;
    const BYTES_MAX: isize = 2 << 20;
    let folder = TempDir::new().expect("a folder");
    let text: String =
        (1..=STEPS).flat_map(|step| [step_line(step), evaluation_line(step)]).collect();
    let path = file(&folder, &text);
    assert!(text.len() as isize > 10 * BYTES_MAX, "{} bytes", text.len());
    // First all of it stays, then half of it belongs to later steps.
    for last in [STEPS, STEPS / 2] {
        let mut history = History::new();
        let (metrics, peak) = peak_bytes(|| MetricsFile::open(&path, last, &mut history));
        metrics.expect("a file");
        assert!(peak < BYTES_MAX, "{peak} bytes");
        assert_eq!(history.last().map(|record| record.step), Some(last));
        assert_eq!(history.best_loss(), Some(2.5));
    }
}

#[test]
fn metrics_must_be_a_plain_file() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("metrics.jsonl");
    std::os::unix::fs::symlink("/dev/zero", &path).expect("a link");
    let error = MetricsFile::open(&path, 2, &mut Heard::default()).expect_err("a device");
    assert!(error.to_string().ends_with("is a device, not a plain file"), "{error}");
}
