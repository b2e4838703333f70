//! Training data: pictures or text, from disk or from memory.

use crate::train::{loader_threads, pictures_of};
use crate::{UsageError, progress, size};
use anyhow::Result;
use std::sync::Arc;
use storm_data::records::{RecordLoaderOptions, RecordSet};
use storm_data::{Dataset, LoaderOptions, Order, Split};
use storm_model::AnyModel;
use storm_train::{BatchSource, LoaderSource, RecordSource};

/// A dataset on disk.
pub(super) enum Stock {
    Pictures(Arc<RecordSet>),
    Text(Arc<Dataset>),
}

/// Rows of a batch, and tokens of a row.
#[derive(Clone, Copy)]
pub(super) struct BatchSize {
    pub(super) rows: usize,
    pub(super) sequence: usize,
}

impl Stock {
    /// Its blocks.
    pub(super) fn blocks(&self) -> Result<&Arc<RecordSet>> {
        match self {
            Stock::Pictures(set) => Ok(set),
            Stock::Text(dataset) => {
                dataset.token_blocks().ok_or_else(|| anyhow::anyhow!("the set was just packed"))
            }
        }
    }

    /// The model, adapted to this dataset.
    pub(super) fn model(&self, model: &AnyModel) -> Result<AnyModel> {
        Ok(match (self, model.image()) {
            (Stock::Pictures(set), Some(config)) => {
                let (shape, classes) = pictures_of(&set.manifest().columns, set.dir())?;
                AnyModel::from(config.clone().for_images(shape, classes))
            }
            _ => model.clone(),
        })
    }

    /// The keys of its rates in JSON.
    pub(super) fn rate_key(&self) -> &'static str {
        match self {
            Stock::Pictures(_) => "images_per_second",
            Stock::Text(_) => "tokens_per_second",
        }
    }

    pub(super) fn memory_rate_key(&self) -> &'static str {
        match self {
            Stock::Pictures(_) => "memory_images_per_second",
            Stock::Text(_) => "memory_tokens_per_second",
        }
    }

    /// The number of items, and what they are.
    pub(super) fn count(&self) -> (u64, &'static str) {
        match self {
            Stock::Pictures(set) => (set.manifest().counts.records, "records"),
            Stock::Text(dataset) => (dataset.manifest().counts.tokens, "tokens"),
        }
    }

    /// Compression ratio of the blocks.
    pub(super) fn ratio(&self) -> f64 {
        match self {
            Stock::Pictures(set) => set.manifest().ratio(),
            Stock::Text(dataset) => dataset.manifest().codec().1,
        }
    }

    /// Batches from disk.
    pub(super) fn disk(
        &self,
        order: Order,
        batch: BatchSize,
        data_ram: u64,
    ) -> Result<Box<dyn BatchSource>> {
        Ok(match self {
            Stock::Pictures(set) => {
                Box::new(RecordSource::new(Arc::clone(set), records(order, batch, data_ram))?)
            }
            Stock::Text(dataset) => {
                Box::new(LoaderSource::new(Arc::clone(dataset), tokens(order, batch, data_ram))?)
            }
        })
    }

    /// The same batches from memory. All blocks are read first.
    pub(super) fn memory(
        &self,
        order: Order,
        batch: BatchSize,
        data_ram: u64,
    ) -> Result<Box<dyn BatchSource>> {
        let all = self.blocks()?.data_ram_to_hold(Split::Train);
        if all <= data_ram {
            let problem = "the dataset fits in --data-ram, so the disk would be idle; give a larger --data-size";
            return Err(UsageError(problem.to_owned()).into());
        }
        let show = |done: u64, total: u64| {
            progress::show(&format!("reading into memory, {} %", 100 * done / total.max(1)));
        };
        let (source, is_whole): (Box<dyn BatchSource>, bool) = match self {
            Stock::Pictures(set) => {
                let source = RecordSource::new(Arc::clone(set), records(order, batch, all))?;
                let is_whole = source.loader().preload(&show)?;
                (Box::new(source), is_whole)
            }
            Stock::Text(dataset) => {
                let source = LoaderSource::new(Arc::clone(dataset), tokens(order, batch, all))?;
                let is_whole = source.loader().preload(&show)?;
                (Box::new(source), is_whole)
            }
        };
        anyhow::ensure!(is_whole, "{} do not hold the set", size::show(all));
        Ok(source)
    }
}

fn records(order: Order, batch: BatchSize, data_ram: u64) -> RecordLoaderOptions {
    let workers = loader_threads();
    RecordLoaderOptions { order, workers, ..RecordLoaderOptions::training(batch.rows, 0, data_ram) }
}

fn tokens(order: Order, batch: BatchSize, data_ram: u64) -> LoaderOptions {
    let BatchSize { rows, sequence } = batch;
    let workers = loader_threads();
    LoaderOptions { order, data_ram, workers, ..LoaderOptions::training(rows, sequence, 0) }
}
