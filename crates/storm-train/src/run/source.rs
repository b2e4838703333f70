use super::RunError;
use crate::AnyBatch;
use storm_data::records::LoaderStatistics;

/// The source of a run's micro-batches. A separate thread reads ahead.
pub trait BatchSource: Send {
    /// Fills a micro-batch and returns how many rows hold data; the other rows have no targets. A
    /// source for training never ends.
    ///
    /// # Errors
    /// Data cannot be read.
    fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError>;

    /// Loading statistics so far, if they are counted.
    fn statistics(&self) -> Option<LoaderStatistics> {
        None
    }

    /// The current position, for checkpoints.
    fn position(&self) -> serde_json::Value;

    /// Continues from a position.
    ///
    /// # Errors
    /// The position belongs to other data.
    fn resume(&mut self, position: &serde_json::Value) -> Result<(), RunError>;
}
