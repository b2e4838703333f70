//! The training and evaluation settings recorded in a run's folder.

use super::config;
use super::data;
use super::values::{DeviceArg, OverlongArg};
use crate::cpu_products::CpuProductsArg;
use crate::precision::PrecisionArg;
use anyhow::{Context, Result};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// The settings of a run, from its `config.toml`.
pub(crate) struct Recorded {
    pub(crate) data: PathBuf,
    pub(crate) seq: usize,
    pub(crate) overlong: OverlongArg,
    /// Sequences per micro-batch; `accumulate` counts micro-batches per step.
    pub(crate) batch: usize,
    pub(crate) accumulate: usize,
    /// Size of an evaluation, in steps' worth of held-out data.
    pub(crate) eval_steps: u64,
    pub(crate) precision: PrecisionArg,
    pub(crate) cpu_products: CpuProductsArg,
    pub(crate) chunk_rows: usize,
    /// Label smoothing, which is part of the run's losses.
    pub(crate) label_smoothing: f32,
    pub(crate) device: DeviceArg,
}

impl Recorded {
    /// Reads the settings from a run's folder; `None` if the folder is not a run's.
    pub(crate) fn of_folder(folder: &Path) -> Result<Option<Recorded>> {
        let config = folder.join("config.toml");
        if !config.exists() {
            return Ok(None);
        }
        let settings = config::read(&config)?.resolve();
        let data = settings.data.as_deref().with_context(|| {
            format!("{} does not name the data of the run; give --data", config.display())
        })?;
        Ok(Some(Recorded {
            data: data::dataset_of(data, folder),
            seq: settings.seq.get(),
            overlong: settings.overlong,
            batch: settings.batch.map_or(1, NonZeroUsize::get),
            accumulate: settings.accumulate.map_or(1, NonZeroUsize::get),
            eval_steps: settings.eval_steps.get(),
            precision: settings.precision,
            cpu_products: settings.cpu_products,
            chunk_rows: settings.chunk_rows.get(),
            label_smoothing: settings.label_smoothing as f32,
            device: settings.device,
        }))
    }
}
