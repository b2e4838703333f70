use super::RunError;
use crate::AnyBatch;
use storm_data::records::LoaderStatistics;

/// Where the micro-batches of a run come from. A thread of its own reads ahead.
pub trait BatchSource: Send {
    /// Fills a micro-batch and says how many of its rows hold data; rows without have no targets. A
    /// source for training never ends.
    ///
    /// # Errors
    /// Data cannot be had.
    fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError>;

    /// What loading has cost so far, if it is counted.
    fn statistics(&self) -> Option<LoaderStatistics> {
        None
    }

    /// Where it is, for checkpoints.
    fn position(&self) -> serde_json::Value;

    /// Goes on from there.
    ///
    /// # Errors
    /// The position is of other data.
    fn resume(&mut self, position: &serde_json::Value) -> Result<(), RunError>;
}
