//! Micro-batches from a dataset of records.

use crate::{AnyBatch, BatchSource, NamedInputs, RunError};
use std::sync::Arc;
use storm_data::records::{
    BatchColumn, ColumnType, LoaderStatistics, RecordBatch, RecordLoader, RecordLoaderOptions,
    RecordPosition, RecordSet,
};
use storm_graph::IGNORE_INDEX;

/// The input with the class of each sample.
const TARGETS: &str = "targets";

/// The input with the index and epoch of each sample.
const SAMPLES: &str = "samples";

/// The micro-batches of a run, from a dataset of records on disk. Each column becomes an input of the same name.
#[derive(Debug)]
pub struct RecordSource {
    loader: RecordLoader,
    batch: RecordBatch,
}

impl RecordSource {
    /// A source at the start of the data.
    ///
    /// # Errors
    /// The part is empty, or an option is invalid.
    pub fn new(
        set: Arc<RecordSet>,
        options: RecordLoaderOptions,
    ) -> Result<RecordSource, RunError> {
        let loader = RecordLoader::new(set, options)?;
        Ok(RecordSource { loader, batch: RecordBatch::default() })
    }

    /// The underlying loader.
    pub fn loader(&self) -> &RecordLoader {
        &self.loader
    }
}

impl BatchSource for RecordSource {
    fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError> {
        let rows = self.loader.next_batch(&mut self.batch)?;
        let inputs = batch.as_columns();
        for column in self.batch.columns_mut() {
            fill(inputs, column);
        }
        let samples = inputs.ids_mut(SAMPLES);
        samples.clear();
        samples.extend(self.batch.samples.iter().flatten());
        let targets = inputs.ids_mut(TARGETS);
        let counted = match targets.is_empty() {
            true => rows,
            false => targets.iter().filter(|&&target| target != IGNORE_INDEX).count(),
        };
        inputs.set_counted(counted);
        Ok(rows)
    }

    fn statistics(&self) -> Option<LoaderStatistics> {
        Some(self.loader.statistics())
    }

    fn position(&self) -> serde_json::Value {
        serde_json::json!(self.loader.position())
    }

    fn resume(&mut self, position: &serde_json::Value) -> Result<(), RunError> {
        let position: RecordPosition = serde_json::from_value(position.clone())
            .map_err(|error| RunError::Position { problem: error.to_string() })?;
        Ok(self.loader.resume(&position)?)
    }
}

/// Moves or copies a column into the input of its name. Columns of other types are not supported as inputs.
fn fill(inputs: &mut NamedInputs, column: &mut BatchColumn) {
    let name = column.column.name.as_str();
    match column.column.dtype {
        ColumnType::U8 => std::mem::swap(inputs.bytes_mut(name), &mut column.bytes),
        ColumnType::I32 => {
            let ids = inputs.ids_mut(name);
            ids.clear();
            let words = column.bytes.as_chunks::<4>().0.iter();
            ids.extend(words.map(|word| i32::from_le_bytes(*word)));
        }
        ColumnType::I8 | ColumnType::F32 | ColumnType::Bf16 => {}
    }
}
