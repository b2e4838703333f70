//! Writes TensorBoard event files, in TensorFlow's record format, with scalars.
//!
//! A record is a length, its checksum, an `Event` message, and the message's checksum. Messages are protocol buffers;
//! the few fields that scalars need are encoded by hand.

use super::{Sink, StepRecord};
use crate::{Event, ParameterGroup, Phase, RunError, UpdateSeen};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use storm_model::Unit;

const BEFORE_NUMBER: &str = "events.out.tfevents.";
const AFTER_NUMBER: &str = ".storm";

/// An event file being written.
#[derive(Debug)]
pub struct TensorBoardFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl TensorBoardFile {
    /// Creates a new file in `folder` for a run that is at `step`. It hides points of later steps in earlier files.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(folder: &Path, step: u64) -> Result<TensorBoardFile, RunError> {
        TensorBoardFile::create_at(folder, step, now())
    }

    fn create_at(folder: &Path, step: u64, now: Duration) -> Result<TensorBoardFile, RunError> {
        std::fs::create_dir_all(folder).map_err(RunError::write(folder))?;
        // TensorBoard reads the files of a run in the order of their names, so the new one must sort last even if the
        // clock was set back.
        let before = newest(folder).map_err(RunError::write(folder))?;
        let number = now.as_nanos().max(before.map_or(0, |before| before.saturating_add(1)));
        let path = folder.join(format!("{BEFORE_NUMBER}{number:020}{AFTER_NUMBER}"));
        let file = File::create_new(&path).map_err(RunError::write(&path))?;
        let mut events = TensorBoardFile { path, file: BufWriter::new(file) };
        events.event(0, &message(|out| bytes_field(out, field::FILE_VERSION, b"brain.Event:2")))?;
        let start = message(|out| varint_field(out, field::STATUS, STATUS_START));
        events.event(step + 1, &message(|out| bytes_field(out, field::SESSION_LOG, &start)))?;
        Ok(events)
    }

    fn scalars(&mut self, step: u64, scalars: &[(&str, f32)]) -> Result<(), RunError> {
        let summary = message(|out| {
            for (tag, value) in scalars {
                let value = message(|out| {
                    bytes_field(out, field::TAG, tag.as_bytes());
                    key(out, field::SIMPLE_VALUE, WIRE_FIXED32);
                    out.extend(value.to_le_bytes());
                });
                bytes_field(out, field::VALUE, &value);
            }
        });
        self.event(step, &message(|out| bytes_field(out, field::SUMMARY, &summary)))
    }

    /// Writes an `Event` with this step, the current time and one more field.
    fn event(&mut self, step: u64, content: &[u8]) -> Result<(), RunError> {
        let event = message(|out| {
            key(out, field::WALL_TIME, WIRE_FIXED64);
            out.extend(now().as_secs_f64().to_le_bytes());
            varint_field(out, field::STEP, step);
            out.extend(content);
        });
        let written = write_record(&mut self.file, &event);
        written.map_err(RunError::write(&self.path))
    }
}

impl Sink for TensorBoardFile {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        let mut scalars = vec![
            ("loss/train", record.loss),
            ("gradient_norm", record.gradient_norm),
            ("learning_rate", record.learning_rate),
            (speed_tag(record.throughput.unit()), record.throughput.per_second() as f32),
            ("memory/device_MiB", mebibytes(record.device_bytes)),
            ("memory/host_MiB", mebibytes(record.host_bytes)),
        ];
        scalars.extend(record.accuracy.map(|accuracy| ("accuracy/train", accuracy)));
        scalars.push(("speed/data_wait_seconds", record.data_wait_seconds as f32));
        scalars.extend(record.hidden_share.map(|share| ("overlap/copies_hidden", share as f32)));
        scalars.extend(record.compute_share.map(|share| ("overlap/compute_busy", share as f32)));
        let number = |phase: Phase| Phase::ALL.iter().position(|known| *known == phase);
        let phase = record.phase.and_then(number);
        scalars.extend(phase.map(|number| ("predict/phase", number as f32)));
        self.scalars(record.step, &scalars)
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        if let Event::Predicted { step, prediction } = event {
            let mut scalars = vec![
                ("predict/accepted", prediction.accepted as f32),
                ("predict/tau", prediction.tau),
                ("predict/seconds", prediction.seconds as f32),
            ];
            // Jumps that are always accepted have no loss.
            if !prediction.loss.is_nan() {
                scalars.push(("loss/probe", prediction.loss as f32));
            }
            self.scalars(*step, &scalars)?;
        }
        if let Event::UpdatesSeen { step, updates } = event {
            let mut tags = Vec::new();
            for (group, seen) in ParameterGroup::ALL.iter().zip(updates.0) {
                let Some(UpdateSeen { cosine, ratio }) = seen else { continue };
                tags.push((format!("updates/{}_cosine", group.name()), cosine));
                tags.push((format!("updates/{}_ratio", group.name()), ratio));
            }
            let scalars: Vec<(&str, f32)> =
                tags.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
            self.scalars(*step, &scalars)?;
        }
        if let Event::PredictionJudged { step, judgement } = event {
            let scalars = [
                ("loss/corrected", judgement.loss as f32),
                ("loss/corrected_expected", judgement.expected as f32),
                ("predict/kept", f32::from(u8::from(judgement.kept))),
            ];
            self.scalars(*step, &scalars)?;
        }
        if let Event::Evaluated { step, loss, accuracy, .. } = event {
            let mut scalars = vec![("loss/held_out", *loss as f32)];
            scalars.extend(accuracy.map(|accuracy| ("accuracy/held_out", accuracy as f32)));
            self.scalars(*step, &scalars)?;
        }
        if let Event::Tested { step, loss, accuracy, .. } = event {
            let mut scalars = vec![("loss/test", *loss as f32)];
            scalars.extend(accuracy.map(|accuracy| ("accuracy/test", accuracy as f32)));
            self.scalars(*step, &scalars)?;
        }
        self.file.flush().map_err(RunError::write(&self.path))
    }
}

fn speed_tag(unit: Unit) -> &'static str {
    match unit {
        Unit::Tokens => "speed/tokens_per_second",
        Unit::Images => "speed/images_per_second",
    }
}

/// The highest number of the existing files.
fn newest(folder: &Path) -> std::io::Result<Option<u128>> {
    let mut newest = None;
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| {
            name.strip_prefix(BEFORE_NUMBER)?.strip_suffix(AFTER_NUMBER)?.parse::<u128>().ok()
        });
        newest = newest.max(number);
    }
    Ok(newest)
}

fn mebibytes(bytes: u64) -> f32 {
    (bytes as f64 / f64::from(1 << 20)) as f32
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn write_record(out: &mut impl Write, data: &[u8]) -> std::io::Result<()> {
    let length = (data.len() as u64).to_le_bytes();
    out.write_all(&length)?;
    out.write_all(&masked_crc32c(&length).to_le_bytes())?;
    out.write_all(data)?;
    out.write_all(&masked_crc32c(data).to_le_bytes())
}

/// Field numbers of the messages `Event`, `SessionLog`, `Summary` and `Summary.Value`.
mod field {
    pub(super) const WALL_TIME: u64 = 1;
    pub(super) const STEP: u64 = 2;
    pub(super) const FILE_VERSION: u64 = 3;
    pub(super) const SUMMARY: u64 = 5;
    pub(super) const SESSION_LOG: u64 = 7;
    pub(super) const STATUS: u64 = 1;
    pub(super) const VALUE: u64 = 1;
    pub(super) const TAG: u64 = 1;
    pub(super) const SIMPLE_VALUE: u64 = 2;
}

/// `SessionLog.START`: invalidates records of this step and later ones.
const STATUS_START: u64 = 1;

const WIRE_VARINT: u64 = 0;
const WIRE_FIXED64: u64 = 1;
const WIRE_BYTES: u64 = 2;
const WIRE_FIXED32: u64 = 5;

fn message(fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    fill(&mut bytes);
    bytes
}

fn key(out: &mut Vec<u8>, field: u64, wire: u64) {
    varint(out, field << 3 | wire);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn varint_field(out: &mut Vec<u8>, field: u64, value: u64) {
    key(out, field, WIRE_VARINT);
    varint(out, value);
}

fn bytes_field(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    key(out, field, WIRE_BYTES);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// A masked CRC, as in TFRecord: a CRC of data that contains CRCs would be weak.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C: Castagnoli's polynomial, reflected.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_castagnolis() {
        // The check value of the catalogue, and two of RFC 3720.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn a_clock_that_was_set_back_changes_no_order() {
        let folder = tempfile::tempdir().expect("a folder");
        // Before 1970 the clock reads as zero.
        let clock =
            [Duration::ZERO, Duration::ZERO, Duration::from_secs(9), Duration::from_secs(3)];
        let paths = clock
            .map(|now| TensorBoardFile::create_at(folder.path(), 4, now).expect("a new file").path);
        assert!(paths.is_sorted_by(|a, b| a < b), "{paths:?}");
    }

    #[test]
    fn a_record_is_framed_as_tensorflow_frames_it() {
        let mut out = Vec::new();
        write_record(&mut out, b"abc").expect("memory");
        assert_eq!(out.len(), 8 + 4 + 3 + 4);
        assert_eq!(out[..8], 3u64.to_le_bytes());
        assert_eq!(out[8..12], masked_crc32c(&3u64.to_le_bytes()).to_le_bytes());
        assert_eq!(out[15..], masked_crc32c(b"abc").to_le_bytes());
    }

    #[test]
    fn fields_are_protocol_buffers() {
        assert_eq!(message(|out| varint_field(out, 2, 300)), [0x10, 0xac, 0x02]);
        assert_eq!(message(|out| bytes_field(out, 1, b"hi")), [0x0a, 2, b'h', b'i']);
    }
}
