//! Progress of a run: a bar on a terminal, lines elsewhere, JSON objects for programs.

use super::output::{Style, print};
use super::predictions;
use super::progress_line::{self, COLUMNS_DEFAULT, Figures};
use super::setup::Setup;
use crate::size;
use crate::streams::{columns, plain};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::io::IsTerminal;
use std::time::Instant;
use storm_plan::Tier;
use storm_train::{Event, Part, RunError, Sink, StepRecord, StopReason};

/// A small bar, shown only on terminals wide enough for it beside the numbers.
const BAR_COLUMNS: usize = 8;
const BAR_FROM_COLUMNS: usize = 100;

/// Columns left for the numbers on a terminal of this width.
fn figure_columns(columns: usize) -> usize {
    if columns < BAR_FROM_COLUMNS { columns } else { columns - BAR_COLUMNS - 1 }
}

/// The progress display of a run.
pub(super) struct Progress {
    style: Style,
    bar: Option<ProgressBar>,
    log_every: u64,
    steps: u64,
    started: Instant,
    started_at: u64,
    device_budget: u64,
    host_budget: u64,
    /// Epochs per step.
    epochs_per_step: f64,
    eval_loss: Option<f64>,
    eval_accuracy: Option<f64>,
    loss: Smooth,
    accuracy: Smooth,
    part: Part,
}

/// An exponential moving average.
#[derive(Default)]
struct Smooth {
    value: Option<f64>,
}

impl Smooth {
    fn add(&mut self, value: f32) -> f64 {
        let value = f64::from(value);
        let smooth = self.value.map_or(value, |before| 0.9 * before + 0.1 * value);
        self.value = Some(smooth);
        smooth
    }
}

impl Progress {
    pub(super) fn new(setup: &Setup) -> Self {
        Progress {
            style: setup.style,
            bar: None,
            log_every: setup.settings.log_every.get(),
            steps: 0,
            started: Instant::now(),
            started_at: 0,
            device_budget: setup.launch.budget()[Tier::DEVICE],
            host_budget: setup.request.ram.bytes,
            epochs_per_step: setup.epochs_of(1),
            eval_loss: None,
            eval_accuracy: None,
            loss: Smooth::default(),
            accuracy: Smooth::default(),
            part: Part::new(),
        }
    }

    /// Statistics since the present plan started.
    pub(super) fn part(&self) -> &Part {
        &self.part
    }

    /// Sets the budget after the run continued with another one.
    pub(super) fn set_device_budget(&mut self, bytes: u64) {
        self.device_budget = bytes;
    }

    fn start(&mut self, step: u64, steps: u64) {
        (self.steps, self.started_at, self.started) = (steps, step, Instant::now());
        if self.style == Style::People && std::io::stderr().is_terminal() {
            let bar = ProgressBar::new(steps).with_position(step);
            let columns = columns(std::io::stderr()).unwrap_or(COLUMNS_DEFAULT);
            let template = match columns < BAR_FROM_COLUMNS {
                true => "{msg}".to_owned(),
                false => format!("{{bar:{BAR_COLUMNS}}} {{msg}}"),
            };
            let style = ProgressStyle::with_template(&template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("━╸ "));
            self.bar = Some(bar);
        }
    }

    fn figures(&mut self, record: &StepRecord) -> Figures {
        Figures {
            step: record.step,
            steps: self.steps,
            loss: self.loss.add(record.loss),
            held_out_loss: self.eval_loss,
            accuracy: record.accuracy.map(|accuracy| self.accuracy.add(accuracy)),
            held_out_accuracy: self.eval_accuracy,
            learning_rate: record.learning_rate,
            gradient_norm: record.gradient_norm,
            epochs: self.epochs_per_step * record.step as f64,
            unit: self.part.unit(),
            units_per_second: self.part.units_per_second().unwrap_or(0.0),
            seconds_left: self.seconds_left(record.step),
            device_bytes: [record.device_bytes, self.device_budget],
            host_bytes: [record.host_bytes, self.host_budget],
            hidden_share: record.hidden_share,
            phase: record.phase,
        }
    }

    fn seconds_left(&self, step: u64) -> f64 {
        let done = step.saturating_sub(self.started_at).max(1) as f64;
        let left = self.steps.saturating_sub(step) as f64;
        self.started.elapsed().as_secs_f64() / done * left
    }

    /// Prints a permanent line, above the bar if there is one.
    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(&*plain(text)),
            None => self.style.say(text),
        }
    }

    fn object(&self, object: serde_json::Value) {
        if self.style == Style::Json {
            print(&object.to_string());
        }
    }
}

impl Sink for Progress {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.part.step(record)?;
        let figures = self.figures(record);
        if let Some(bar) = &self.bar {
            let columns = columns(std::io::stderr()).unwrap_or(COLUMNS_DEFAULT);
            bar.set_position(record.step);
            bar.set_message(progress_line::line(&figures, figure_columns(columns)));
        } else if self.style == Style::People
            && (record.step.is_multiple_of(self.log_every) || record.step == self.steps)
        {
            let columns = columns(std::io::stdout()).unwrap_or(COLUMNS_DEFAULT);
            print(&progress_line::line(&figures, columns));
        }
        if self.style == Style::Json {
            let mut object = json!(record);
            object["event"] = "step".into();
            object["epoch"] = figures.epochs.into();
            self.object(object);
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        self.part.event(event)?;
        match event {
            Event::Started { step, steps } => {
                self.start(*step, *steps);
                self.object(json!({"event": "started", "step": step, "steps": steps}));
            }
            Event::CheckpointSkipped { step, problem } => {
                eprintln!("warning: skipping the checkpoint of step {step}: {problem}");
                let object =
                    json!({"event": "checkpoint_skipped", "step": step, "problem": problem});
                self.object(object);
            }
            Event::DeviceChanged { before, now } => {
                eprintln!(
                    "warning: the run was saved on {before} and resumes on {now}: results may differ in their last \
                     bits"
                );
                self.object(json!({"event": "device_changed", "before": before, "now": now}));
            }
            Event::Evaluated { step, loss, accuracy, is_best, seconds } => {
                (self.eval_loss, self.eval_accuracy) = (Some(*loss), *accuracy);
                let found = accuracy
                    .map_or(String::new(), |share| format!(", accuracy {:.2} %", 100.0 * share));
                let best = if *is_best { ", the best so far" } else { "" };
                self.line(&format!("step {step}: held-out loss {loss:.4}{found}{best}"));
                let mut object = json!({
                    "event": "evaluated", "step": step, "loss": loss, "is_best": is_best,
                    "seconds": seconds,
                });
                if let Some(accuracy) = accuracy {
                    object["accuracy"] = json!(accuracy);
                }
                self.object(object);
            }
            Event::Tested { step, rows, loss, accuracy, seconds } => {
                let found = accuracy
                    .map_or(String::new(), |share| format!(", accuracy {:.2} %", 100.0 * share));
                self.line(&format!("step {step}: test loss {loss:.4}{found}"));
                let mut object = json!({
                    "event": "tested", "step": step, "rows": rows, "loss": loss, "seconds": seconds,
                });
                if let Some(accuracy) = accuracy {
                    object["accuracy"] = json!(accuracy);
                }
                self.object(object);
            }
            Event::Viewed { step, guesses, seconds } => {
                self.object(json!({
                    "event": "viewed", "step": step, "guesses": guesses, "seconds": seconds,
                }));
            }
            Event::PredictionPrepared { step, seconds } => {
                self.object(json!({
                    "event": "prediction_prepared", "step": step, "seconds": seconds,
                }));
            }
            Event::UpdatesSeen { step, updates } => {
                self.object(json!({"event": "updates_seen", "step": step, "updates": updates}));
            }
            Event::Jumped { step, jump } => {
                if let Some(bar) = &self.bar {
                    bar.set_message(predictions::jumped(*step, jump));
                }
                self.object(predictions::jumped_object(*step, jump));
            }
            Event::Predicted { step, prediction } => {
                self.line(&predictions::predicted(*step, prediction));
                self.object(predictions::predicted_object(*step, prediction));
            }
            Event::PredictionJudged { step, judgement } => {
                self.line(&predictions::judged(*step, judgement));
                self.object(predictions::judged_object(*step, judgement));
            }
            Event::DataLimited { step, wait_share, bytes_per_second } => {
                self.line(&format!(
                    "step {step}: the device waits for data {:.0} % of the time: it is read and decoded at {} \
                     a second; the data lane of report.html shows it",
                    100.0 * wait_share,
                    size::show(*bytes_per_second as u64)
                ));
                self.object(json!({
                    "event": "data_limited", "step": step, "wait_share": wait_share,
                    "bytes_per_second": bytes_per_second,
                }));
            }
            Event::Ranks { step, ranks } => {
                self.object(json!({"event": "ranks", "step": step, "ranks": ranks}));
            }
            Event::StopOnRank { step, rank } => {
                eprintln!("\nrank {rank} was told to stop: saving after step {step}");
                self.object(json!({"event": "stop_on_rank", "step": step, "rank": rank}));
            }
            Event::MemoryAlarm { step, rank, alarm } => {
                let of_rank = rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
                eprintln!("warning: step {step}: {of_rank}{alarm}");
                self.object(json!({
                    "event": "memory_alarm", "step": step, "rank": rank, "problem": alarm.to_string(),
                    "is_critical": alarm.is_critical(),
                }));
            }
            Event::Saving { step } => self.object(json!({"event": "saving", "step": step})),
            Event::Saved { step, path, seconds, pause_seconds, before_seconds } => {
                let before = match *before_seconds > 0.0 {
                    true => format!(", {before_seconds:.2} s of it for the one before"),
                    false => String::new(),
                };
                self.line(&format!(
                    "step {step}: saved {} in {seconds:.2} s; steps paused {pause_seconds:.2} s{before}",
                    path.display()
                ));
                self.object(json!({
                    "event": "saved", "step": step, "path": path.display().to_string(),
                    "seconds": seconds, "pause_seconds": pause_seconds,
                    "before_seconds": before_seconds,
                }));
            }
            Event::SaveFailed { step, problem } => {
                eprintln!("warning: the checkpoint of step {step} was not saved: {problem}");
                self.object(json!({"event": "save_failed", "step": step, "problem": problem}));
            }
            Event::Finished(finished) => {
                if let Some(bar) = self.bar.take() {
                    bar.finish_and_clear();
                }
                let reason = reason(finished.reason);
                self.line(&format!("{reason} after {} steps", finished.step));
                // The run makes room and continues: a `started` event follows.
                let event = match finished.reason {
                    StopReason::MemoryShort(_) => "making_room",
                    _ => "finished",
                };
                self.object(json!({
                    "event": event, "reason": reason, "step": finished.step,
                    "loss": finished.loss, "best": finished.best,
                    "checkpoint": finished.checkpoint.display().to_string(),
                }));
            }
            Event::Sampled { prompt, text, .. } => {
                self.style.say(&format!("\nThe model generated:\n\n{prompt}{text}"));
                self.object(json!({"event": "sample", "text": format!("{prompt}{text}")}));
            }
        }
        Ok(())
    }
}

fn reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Completed => "completed",
        StopReason::Requested => "stopped as asked",
        StopReason::NoGain => "stopped for lack of gain",
        StopReason::MemoryShort(_) => "making room",
    }
}
