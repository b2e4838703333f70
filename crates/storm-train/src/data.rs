//! Micro-batches from a token dataset.

use crate::{AnyBatch, BatchSource, RunError};
use std::sync::Arc;
use storm_data::records::LoaderStatistics;
use storm_data::{Dataset, Loader, LoaderOptions, Position, Samples};

/// The micro-batches of a run, from a dataset on disk.
#[derive(Debug)]
pub struct LoaderSource {
    loader: Loader,
    samples: Samples,
    sequence: usize,
}

impl LoaderSource {
    /// A source at the start of the data.
    ///
    /// # Errors
    /// The part is empty, or sizes are invalid.
    pub fn new(dataset: Arc<Dataset>, options: LoaderOptions) -> Result<LoaderSource, RunError> {
        let loader = Loader::new(dataset, options)?;
        Ok(LoaderSource { loader, samples: Samples::default(), sequence: options.sequence })
    }

    /// The underlying loader.
    pub fn loader(&self) -> &Loader {
        &self.loader
    }
}

impl BatchSource for LoaderSource {
    fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError> {
        let rows = self.loader.next_batch(&mut self.samples)?;
        batch.as_tokens().swap(&mut self.samples, self.sequence);
        Ok(rows)
    }

    fn statistics(&self) -> Option<LoaderStatistics> {
        self.loader.statistics()
    }

    fn position(&self) -> serde_json::Value {
        serde_json::json!(self.loader.position())
    }

    fn resume(&mut self, position: &serde_json::Value) -> Result<(), RunError> {
        let position: Position = serde_json::from_value(position.clone())
            .map_err(|error| RunError::Position { problem: error.to_string() })?;
        Ok(self.loader.resume(&position)?)
    }
}
