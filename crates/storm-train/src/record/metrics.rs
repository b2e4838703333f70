//! `metrics.jsonl`: one object per line and step, evaluation or checkpoint.

use super::{Sink, StepRecord};
use crate::{Event, RunError};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A longer line is none of ours.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// A file of metrics that is being written.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl MetricsFile {
    /// Goes on with the metrics of a run that stands after `step`: what a stopped process wrote of
    /// later steps is dropped, and so is half a line at the end.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(path: &Path, step: u64) -> Result<MetricsFile, RunError> {
        let rewritten = path.with_extension("jsonl.partial");
        let mut file =
            BufWriter::new(File::create(&rewritten).map_err(RunError::write(&rewritten))?);
        for_each_line(path, |line| match step_of(line) {
            Some(of) if of <= step => writeln!(file, "{line}"),
            _ => Ok(()),
        })
        .and_then(|()| file.flush())
        .and_then(|()| std::fs::rename(&rewritten, path))
        .map_err(RunError::write(path))?;
        let file = OpenOptions::new().append(true).open(path).map_err(RunError::write(path))?;
        Ok(MetricsFile { path: path.to_owned(), file: BufWriter::new(file) })
    }

    /// Every step and evaluation that a file has, handed to `sink`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn replay(path: &Path, sink: &mut dyn Sink) -> Result<(), RunError> {
        let mut found = Vec::new();
        for_each_line(path, |line| {
            found.extend(serde_json::from_str::<Value>(line));
            Ok(())
        })
        .map_err(RunError::write(path))?;
        for line in found {
            if let Ok(record) = serde_json::from_value::<StepRecord>(line.clone()) {
                sink.step(&record)?;
            } else if let (Some(step), Some(loss)) =
                (line["step"].as_u64(), line["eval_loss"].as_f64())
            {
                sink.event(&Event::Evaluated { step, loss, is_best: false, seconds: 0.0 })?;
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &Value) -> Result<(), RunError> {
        writeln!(self.file, "{line}").map_err(RunError::write(&self.path))
    }

    fn flush(&mut self) -> Result<(), RunError> {
        self.file.flush().map_err(RunError::write(&self.path))
    }
}

fn step_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?["step"].as_u64()
}

/// Every whole line of a file that may not be there.
fn for_each_line(
    path: &Path,
    mut each: impl FnMut(&str) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut lines = match File::open(path) {
        Ok(file) => BufReader::new(file),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut limited = std::io::Read::take(&mut lines, LINE_BYTES_MAX);
        if limited.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let text = line.strip_suffix(b"\n").map(std::str::from_utf8);
        if let Some(Ok(text)) = text {
            each(text)?;
        }
    }
}

impl Sink for MetricsFile {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.line(&json!(record))
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match event {
            Event::Evaluated { step, loss, is_best, seconds } => self.line(&json!({
                "step": step, "eval_loss": loss, "is_best": is_best, "seconds": seconds,
            }))?,
            Event::Saved { step, path, seconds, pause_seconds, .. } => self.line(&json!({
                "step": step, "checkpoint": path.display().to_string(), "seconds": seconds,
                "pause_seconds": pause_seconds,
            }))?,
            _ => {}
        }
        self.flush()
    }
}
