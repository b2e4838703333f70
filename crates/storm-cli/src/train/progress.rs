//! A run as it goes: a bar on a terminal, lines elsewhere, objects for programs.

use super::output::{Style, print};
use crate::model::grouped;
use crate::size;
use crate::streams::plain;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::io::IsTerminal;
use std::time::Instant;
use storm_train::{Event, Part, RunError, Sink, StepRecord, StopReason};

/// What a run says while it goes.
pub(super) struct Progress {
    style: Style,
    bar: Option<ProgressBar>,
    log_every: u64,
    steps: u64,
    started: Instant,
    started_at: u64,
    device_budget: u64,
    host_budget: u64,
    eval_loss: Option<f64>,
    loss: Smooth,
    part: Part,
}

/// A mean that forgets.
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
    pub(super) fn new(style: Style, log_every: u64, device_budget: u64, host_budget: u64) -> Self {
        Progress {
            style,
            bar: None,
            log_every,
            steps: 0,
            started: Instant::now(),
            started_at: 0,
            device_budget,
            host_budget,
            eval_loss: None,
            loss: Smooth::default(),
            part: Part::new(),
        }
    }

    /// What was done under the present plan.
    pub(super) fn part(&self) -> &Part {
        &self.part
    }

    /// The run goes on within another budget.
    pub(super) fn set_device_budget(&mut self, bytes: u64) {
        self.device_budget = bytes;
    }

    fn start(&mut self, step: u64, steps: u64) {
        (self.steps, self.started_at, self.started) = (steps, step, Instant::now());
        if self.style == Style::People && std::io::stderr().is_terminal() {
            let bar = ProgressBar::new(steps).with_position(step);
            let template = "{bar:24} {pos}/{len} {msg} {eta} left";
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("━╸ "));
            bar.reset_eta();
            self.bar = Some(bar);
        }
    }

    /// Loss, speed, memory of each tier, hidden copies.
    fn words(&mut self, record: &StepRecord) -> String {
        let loss = self.loss.add(record.loss);
        let mut words = format!("loss {loss:.3}");
        if let Some(eval_loss) = self.eval_loss {
            words.push_str(&format!(" held-out {eval_loss:.3}"));
        }
        words.push_str(&format!(
            " {} tok/s device {}/{} host {}/{}",
            grouped(self.part.tokens_per_second().unwrap_or(0.0).round() as u64),
            size::show(record.device_bytes),
            size::show(self.device_budget),
            size::show(record.host_bytes),
            size::show(self.host_budget),
        ));
        if let Some(hidden) = record.hidden_share {
            words.push_str(&format!(" copies {:.0}% hidden", 100.0 * hidden));
        }
        words
    }

    fn time_left(&self, step: u64) -> String {
        let done = step.saturating_sub(self.started_at).max(1) as f64;
        let left = self.started.elapsed().as_secs_f64() / done * (self.steps - step) as f64;
        format!("{}:{:02} left", left as u64 / 60, left as u64 % 60)
    }

    /// A line that stays, above the bar if there is one.
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
        let words = self.words(record);
        if let Some(bar) = &self.bar {
            bar.set_position(record.step);
            bar.set_message(words);
        } else if self.style == Style::People
            && (record.step.is_multiple_of(self.log_every) || record.step == self.steps)
        {
            let left = self.time_left(record.step);
            print(&format!("step {}/{} {words} {left}", record.step, self.steps));
        }
        if self.style == Style::Json {
            let mut object = json!(record);
            object["event"] = "step".into();
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
                eprintln!("warning: the checkpoint of step {step} is passed over: {problem}");
                let object =
                    json!({"event": "checkpoint_skipped", "step": step, "problem": problem});
                self.object(object);
            }
            Event::DeviceChanged { before, now } => {
                eprintln!(
                    "warning: the run was saved on {before} and goes on on {now}: it is not promised to be \
                     the same bit by bit"
                );
                self.object(json!({"event": "device_changed", "before": before, "now": now}));
            }
            Event::Evaluated { step, loss, is_best, seconds } => {
                self.eval_loss = Some(*loss);
                let best = if *is_best { ", the best so far" } else { "" };
                self.line(&format!("step {step}: held-out loss {loss:.4}{best}"));
                self.object(json!({
                    "event": "evaluated", "step": step, "loss": loss, "is_best": is_best,
                    "seconds": seconds,
                }));
            }
            Event::MemoryAlarm { step, alarm } => {
                eprintln!("warning: step {step}: {alarm}");
                self.object(json!({
                    "event": "memory_alarm", "step": step, "problem": alarm.to_string(),
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
                // A run that makes room goes on: `started` follows.
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
