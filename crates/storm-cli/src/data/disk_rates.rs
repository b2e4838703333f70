//! How fast a disk reads records, measured on synthetic records that are removed afterwards.

use crate::train::loader_threads;
use anyhow::Result;
use std::path::Path;
use std::sync::Arc;
use storm_data::records::{
    Codec, Estimator, RecordInput, RecordLoaderOptions, RecordPackOptions, RecordRates, RecordSet,
    Synthetic, pack_records,
};
use storm_data::{DataError, IfExists};
use storm_plan::DiskProfile;
use tempfile::TempDir;

/// Bytes of records to write.
const TRIAL_BYTES: u64 = 64 << 20;
/// Number of compressed records to write, to measure decoding.
const COMPRESSED_RECORDS: u64 = 2048;
/// A record that spans one or two pages.
const SHAPE: [usize; 3] = [32, 32, 3];
/// Records in a batch.
const BATCH: usize = 256;
/// Enough for all threads.
const DATA_RAM: u64 = 1 << 30;

/// Measures reading in a directory, with the threads of a run, for about three seconds.
pub(crate) fn measure(directory: &Path) -> Result<DiskProfile> {
    let raw = Trial::new(directory, &SHAPE, u64::MAX, Codec::None)?;
    let (rates, reading_path) = rates(&raw)?;
    let compressed = Trial::new(directory, &SHAPE, COMPRESSED_RECORDS, Codec::Zstd)?;
    let (decoding, _) = self::rates(&compressed)?;
    Ok(DiskProfile {
        directory: std::path::absolute(directory)?.display().to_string(),
        reading_path,
        sequential_bytes_per_second: rates.sequential_bytes_per_second,
        random_reads_per_second: rates.random_reads_per_second,
        decode_bytes_per_second: decoding.decoding_bytes_per_second,
    })
}

/// Measures reading of a trial. Returns the rates and the reading path.
fn rates(trial: &Trial) -> Result<(RecordRates, String)> {
    let workers = loader_threads();
    let options =
        RecordLoaderOptions { workers, ..RecordLoaderOptions::training(BATCH, 0, DATA_RAM) };
    let estimator = Estimator::of_records(Arc::new(RecordSet::open(&trial.dir())?), options)?;
    Ok((estimator.measure()?, estimator.reading_path().to_string()))
}

/// The rates in words.
pub(crate) fn words(disk: &DiskProfile) -> String {
    format!(
        "{:.2} GB/s in long reads, {:.0} short reads a second ({}); a core decodes {:.2} GB/s of zstd",
        disk.sequential_bytes_per_second / 1e9,
        disk.random_reads_per_second,
        disk.reading_path,
        disk.decode_bytes_per_second / 1e9
    )
}

/// Synthetic records, removed when this is dropped.
pub(super) struct Trial(TempDir);

impl Trial {
    /// Writes at most `records_max` records of a shape, and at most 64 MiB.
    pub(super) fn new(
        at: &Path,
        shape: &[usize],
        records_max: u64,
        codec: Codec,
    ) -> Result<Trial, DataError> {
        let folder = tempfile::Builder::new()
            .prefix(".storm-trial-")
            .tempdir_in(at)
            .map_err(|source| DataError::Io { path: at.to_owned(), source })?;
        let record = shape.iter().try_fold(1u64, |bytes, &side| bytes.checked_mul(side as u64));
        let count = (TRIAL_BYTES / record.unwrap_or(0).max(1)).clamp(1, records_max);
        let trial = Trial(folder);
        let options = RecordPackOptions {
            input: RecordInput::Synthetic(Synthetic { count, shape: shape.to_vec(), classes: 10 }),
            out: trial.dir(),
            if_exists: IfExists::Refuse,
            codec,
            held_out: 0.0,
            skip_bad: false,
            size: None,
        };
        pack_records(&options, &|_| {})?;
        Ok(trial)
    }

    pub(super) fn dir(&self) -> std::path::PathBuf {
        self.0.path().join("trial")
    }
}
