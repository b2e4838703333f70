//! `metrics.jsonl`: one JSON object per line, for each step, evaluation, test, image view, prediction, checkpoint,
//! sample, and timing of ranks.

use super::{Sink, StepRecord};
use crate::{Event, Guess, Judgement, Jump, Prediction, RankFigures, RunError, UpdatesSeen};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use storm_files::{append_plain, open_plain, replace_file, sync_directory};

/// Longest line. Longer ones were not written by STORM.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// Limit for prompts and samples, so that even with escapes both fit in a line.
const TEXT_BYTES_MAX: usize = 5 << 10;

/// A metrics file being written.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl MetricsFile {
    /// Continues the metrics of a run that is at `step`. Replays the lines up to that step to `sink`. Drops lines of
    /// later steps, which a stopped process wrote, and an incomplete line at the end. Memory use does not depend on the
    /// size of the file.
    ///
    /// # Errors
    /// The file cannot be read or written, or from `sink`.
    pub fn open(path: &Path, step: u64, sink: &mut dyn Sink) -> Result<MetricsFile, RunError> {
        let source = match open_plain(path) {
            Ok(file) => Some(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(RunError::read(path)(error)),
        };
        if let Some(mut source) = source
            && let Some(bytes) = replay(path, &source, step, sink)?
        {
            replace_file(path, |out| copy_kept(&mut source, bytes, step, out))
                .map_err(RunError::write(path))?;
        }
        let file = append_plain(path).map_err(RunError::write(path))?;
        // A bare file name is in the current directory.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        sync_directory(folder.unwrap_or(".".as_ref())).map_err(RunError::write(path))?;
        Ok(MetricsFile { path: path.to_owned(), file: BufWriter::new(file) })
    }

    fn line(&mut self, line: &Value) -> Result<(), RunError> {
        writeln!(self.file, "{line}").map_err(RunError::write(&self.path))
    }
}

/// Replays a metrics file to `sink`, line by line. Skips invalid lines, such as an incomplete one still being written.
/// Does not change the file.
///
/// # Errors
/// The file cannot be read, or from `sink`.
pub fn read_metrics(path: &Path, sink: &mut dyn Sink) -> Result<(), RunError> {
    let source = open_plain(path).map_err(RunError::read(path))?;
    replay(path, &source, u64::MAX, sink).map(drop)
}

/// Replays all lines up to `step` to `sink`. If some lines are to be dropped, returns the offset of the first of them.
fn replay(
    path: &Path,
    source: &File,
    step: u64,
    sink: &mut dyn Sink,
) -> Result<Option<u64>, RunError> {
    let mut lines = Lines::new(source);
    let mut kept_bytes = None;
    loop {
        let start = lines.position;
        let Some(line) = lines.next().map_err(RunError::read(path))? else { return Ok(kept_bytes) };
        match Recorded::parse(line).filter(|recorded| recorded.step() <= step) {
            Some(Recorded::Step(record)) => sink.step(&record)?,
            Some(Recorded::Other(other)) => other.tell(sink)?,
            None => {
                kept_bytes.get_or_insert(start);
            }
        }
    }
}

/// Copies the first `bytes` of a file, and of the lines after them those up to `step`.
fn copy_kept(source: &mut File, bytes: u64, step: u64, out: &mut impl Write) -> io::Result<()> {
    source.seek(SeekFrom::Start(0))?;
    // From file to file, the kernel copies without passing the bytes through this process.
    io::copy(&mut Read::take(&mut *source, bytes), out)?;
    source.seek(SeekFrom::Start(bytes))?;
    let mut lines = Lines::new(source);
    while let Some(line) = lines.next()? {
        if Recorded::parse(line).is_some_and(|recorded| recorded.step() <= step) {
            out.write_all(line)?;
            out.write_all(b"\n")?;
        }
    }
    Ok(())
}

/// A parsed line.
enum Recorded {
    Step(StepRecord),
    Other(Box<Other>),
}

/// Any line other than a step.
#[derive(Deserialize)]
struct Other {
    step: u64,
    eval_loss: Option<f64>,
    eval_accuracy: Option<f64>,
    test_loss: Option<f64>,
    #[serde(default)]
    test_rows: [u64; 2],
    test_accuracy: Option<f64>,
    guesses: Option<Vec<Guess>>,
    checkpoint: Option<PathBuf>,
    sample: Option<String>,
    jump: Option<Jump>,
    prediction: Option<Prediction>,
    judgement: Option<Judgement>,
    ranks: Option<Vec<RankFigures>>,
    prepared_seconds: Option<f64>,
    updates: Option<UpdatesSeen>,
    #[serde(default)]
    prompt: String,
    #[serde(default)]
    seconds: f64,
    #[serde(default)]
    pause_seconds: f64,
}

impl Other {
    fn tell(&self, sink: &mut dyn Sink) -> Result<(), RunError> {
        let Other { step, seconds, pause_seconds, ref prompt, .. } = *self;
        if let Some(loss) = self.eval_loss {
            let (accuracy, is_best) = (self.eval_accuracy, false);
            sink.event(&Event::Evaluated { step, loss, accuracy, is_best, seconds })?;
        }
        if let Some(loss) = self.test_loss {
            let (rows, accuracy) = (self.test_rows, self.test_accuracy);
            sink.event(&Event::Tested { step, rows, loss, accuracy, seconds })?;
        }
        if let Some(guesses) = &self.guesses {
            sink.event(&Event::Viewed { step, guesses, seconds })?;
        }
        if let Some(path) = &self.checkpoint {
            let before_seconds = 0.0;
            sink.event(&Event::Saved { step, path, seconds, pause_seconds, before_seconds })?;
        }
        if let Some(seconds) = self.prepared_seconds {
            sink.event(&Event::PredictionPrepared { step, seconds })?;
        }
        if let Some(updates) = self.updates {
            sink.event(&Event::UpdatesSeen { step, updates })?;
        }
        if let Some(jump) = self.jump {
            sink.event(&Event::Jumped { step, jump })?;
        }
        if let Some(prediction) = self.prediction {
            sink.event(&Event::Predicted { step, prediction })?;
        }
        if let Some(judgement) = self.judgement {
            sink.event(&Event::PredictionJudged { step, judgement })?;
        }
        if let Some(ranks) = &self.ranks {
            sink.event(&Event::Ranks { step, ranks })?;
        }
        if let Some(text) = &self.sample {
            sink.event(&Event::Sampled { step, prompt, text })?;
        }
        Ok(())
    }
}

/// Truncates a text to the limit.
fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(TEXT_BYTES_MAX);
    format!("{}{}", &text[..end], if end < text.len() { "…" } else { "" })
}

impl Recorded {
    fn parse(line: &[u8]) -> Option<Recorded> {
        let record = serde_json::from_slice(line).map(Recorded::Step);
        record.or_else(|_| serde_json::from_slice(line).map(Recorded::Other)).ok()
    }

    fn step(&self) -> u64 {
        match self {
            Recorded::Step(record) => record.step,
            Recorded::Other(other) => other.step,
        }
    }
}

/// The lines of a file from its current position.
struct Lines<'a> {
    reader: BufReader<&'a File>,
    line: Vec<u8>,
    /// Bytes read.
    position: u64,
}

impl<'a> Lines<'a> {
    fn new(file: &'a File) -> Lines<'a> {
        Lines { reader: BufReader::with_capacity(1 << 16, file), line: Vec::new(), position: 0 }
    }

    /// The next line; empty for an incomplete last line or one that is too long.
    fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.line.clear();
        let mut limited = Read::take(&mut self.reader, LINE_BYTES_MAX);
        let bytes = limited.read_until(b'\n', &mut self.line)?;
        self.position += bytes as u64;
        if bytes == 0 {
            return Ok(None);
        }
        if self.line.pop() != Some(b'\n') {
            self.line.clear();
            self.position += self.reader.skip_until(b'\n')? as u64;
        }
        Ok(Some(&self.line))
    }
}

impl Sink for MetricsFile {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.line(&json!(record))
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match event {
            Event::Evaluated { step, loss, accuracy, is_best, seconds } => {
                let mut line = json!({
                    "step": step, "eval_loss": loss, "is_best": is_best, "seconds": seconds,
                });
                if let Some(accuracy) = accuracy {
                    line["eval_accuracy"] = json!(accuracy);
                }
                self.line(&line)?;
            }
            Event::Tested { step, rows, loss, accuracy, seconds } => {
                let mut line = json!({
                    "step": step, "test_loss": loss, "test_rows": rows, "seconds": seconds,
                });
                if let Some(accuracy) = accuracy {
                    line["test_accuracy"] = json!(accuracy);
                }
                self.line(&line)?;
            }
            Event::Viewed { step, guesses, seconds } => {
                self.line(&json!({"step": step, "guesses": guesses, "seconds": seconds}))?;
            }
            Event::PredictionPrepared { step, seconds } => {
                self.line(&json!({"step": step, "prepared_seconds": seconds}))?;
            }
            Event::UpdatesSeen { step, updates } => {
                self.line(&json!({"step": step, "updates": updates}))?;
            }
            Event::Jumped { step, jump } => {
                self.line(&json!({"step": step, "jump": jump}))?;
            }
            Event::Predicted { step, prediction } => {
                self.line(&json!({"step": step, "prediction": prediction}))?;
            }
            Event::PredictionJudged { step, judgement } => {
                self.line(&json!({"step": step, "judgement": judgement}))?;
            }
            Event::Ranks { step, ranks } => {
                self.line(&json!({"step": step, "ranks": ranks}))?;
            }
            Event::Saved { step, path, seconds, pause_seconds, .. } => self.line(&json!({
                "step": step, "checkpoint": path.display().to_string(), "seconds": seconds,
                "pause_seconds": pause_seconds,
            }))?,
            Event::Sampled { step, prompt, text } => self.line(&json!({
                "step": step, "sample": shortened(text), "prompt": shortened(prompt),
            }))?,
            _ => {}
        }
        self.file.flush().map_err(RunError::write(&self.path))?;
        // Metrics of all earlier steps must be durable before the checkpoint is.
        if matches!(event, Event::Saving { .. } | Event::Finished(_)) {
            self.file.get_ref().sync_data().map_err(RunError::write(&self.path))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::tests::record;
    use super::super::{History, Tested, View};
    use super::*;
    use crate::{ParameterGroup, Phase, UpdateSeen};

    #[test]
    fn times_and_text_are_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let mut history = History::new();
        let mut metrics = MetricsFile::open(&path, 0, &mut history).expect("a file");
        // All that JSON must escape, and longer than a line may be.
        let long = "\u{1}\"\u{7f}ä".repeat(100_000);
        let prediction = Prediction {
            accepted: 2,
            made: 3,
            tau: 2.0,
            loss_before: 2.5,
            loss: 2.25,
            seconds: 4.0,
            device_bytes: 77,
        };
        // Written as null.
        let judgement = Judgement { loss: f64::NAN, expected: 2.0, kept: false, seconds: 0.5 };
        let seen = UpdateSeen { cosine: 0.75, ratio: 0.5 };
        let updates = UpdatesSeen([None, Some(seen), None, None, None]);
        let guesses = [Guess { class: 7, probability: 0.25 }, Guess { class: 0, probability: 1.0 }];
        let events = [
            Event::Evaluated {
                step: 1,
                loss: 2.5,
                accuracy: Some(0.5),
                is_best: true,
                seconds: 2.0,
            },
            Event::Saved {
                step: 1,
                path: &path,
                seconds: 9.0,
                pause_seconds: 0.5,
                before_seconds: 0.0,
            },
            Event::Sampled { step: 1, prompt: &long, text: &long },
            Event::Tested {
                step: 1,
                rows: [16, 72],
                loss: 2.625,
                accuracy: Some(0.25),
                seconds: 1.5,
            },
            Event::Viewed { step: 1, guesses: &guesses, seconds: 0.125 },
            Event::PredictionPrepared { step: 1, seconds: 0.25 },
            Event::UpdatesSeen { step: 1, updates },
            Event::Predicted { step: 1, prediction },
            Event::PredictionJudged { step: 1, judgement },
        ];
        let full = StepRecord { phase: Some(Phase::Full), ..record(1) };
        metrics.step(&full).expect("written");
        events.iter().try_for_each(|event| metrics.event(event)).expect("written");
        drop(metrics);
        let before = std::fs::read(&path).expect("a file");
        for resumes in [false, true] {
            let mut history = History::new();
            match resumes {
                true => drop(MetricsFile::open(&path, 1, &mut history).expect("a file")),
                false => read_metrics(&path, &mut history).expect("a file"),
            }
            assert_eq!((history.step_seconds(), history.other_seconds()), (1.0, 8.875));
            let tested = Tested { step: 1, rows: [16, 72], loss: 2.625, accuracy: Some(0.25) };
            assert_eq!(history.test(), Some(tested));
            let views: Vec<&View> = history.views().collect();
            assert_eq!(views, [&View { step: 1, guesses: guesses.to_vec() }]);
            let predictions = history.predictions();
            assert_eq!((predictions.accepted, predictions.refused), (2, 1));
            assert_eq!((predictions.kept, predictions.undone), (0, 1));
            assert_eq!(predictions.updates(ParameterGroup::Attention), Some((seen, seen)));
            assert_eq!(predictions.updates(ParameterGroup::Mlp), None);
            let seconds = Phase::ALL.map(|phase| predictions.of(phase).seconds);
            assert_eq!(seconds, [0.0, 1.25, 4.0, 0.5]);
            assert_eq!(predictions.of(Phase::Predict).device_bytes_peak, 77);
            let sample = history.sample().expect("a sample");
            for text in [&sample.prompt, &sample.text] {
                let kept = text.strip_suffix('…').expect("it was cut");
                assert!(long.starts_with(kept) && kept.len() > TEXT_BYTES_MAX - 4);
            }
            assert!(std::fs::read(&path).expect("a file") == before, "a line was dropped");
        }
        assert_eq!(shortened("as it is"), "as it is");
    }
}
