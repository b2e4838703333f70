//! Records that cannot be packed: an error, or skipped and counted.

use crate::{DataError, RecordPlace};
use std::path::Path;

/// How many problems are reported individually.
const TOLD: usize = 5;

/// The records that were skipped.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    skip_bad: bool,
    pub(super) count: u64,
    /// Messages of the first few.
    pub(super) told: Vec<String>,
}

impl Skipped {
    pub(super) fn new(skip_bad: bool) -> Skipped {
        Skipped { skip_bad, ..Skipped::default() }
    }

    /// Adds a record, or several consecutive ones, that cannot be packed. Returns the error unless
    /// bad records are skipped.
    pub(super) fn add(
        &mut self,
        path: &Path,
        place: RecordPlace,
        problem: String,
    ) -> Result<(), DataError> {
        let error = DataError::Record { path: path.to_owned(), place, problem };
        self.add_several(place.count(), error)
    }

    pub(super) fn add_error(&mut self, error: DataError) -> Result<(), DataError> {
        self.add_several(1, error)
    }

    fn add_several(&mut self, count: u64, error: DataError) -> Result<(), DataError> {
        if !self.skip_bad {
            return Err(error);
        }
        self.count = self.count.saturating_add(count);
        if self.told.len() < TOLD {
            self.told.push(error.to_string());
        }
        Ok(())
    }

    /// Adds what was skipped later.
    pub(super) fn extend(&mut self, other: Skipped) {
        self.count = self.count.saturating_add(other.count);
        let room = TOLD - self.told.len();
        self.told.extend(other.told.into_iter().take(room));
    }

    pub(super) fn first(&self) -> Option<&str> {
        self.told.first().map(String::as_str)
    }
}
