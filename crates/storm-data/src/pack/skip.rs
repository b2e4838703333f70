//! What cannot be packed: an error, or skipped and counted.

use crate::{DataError, RecordPlace};
use std::path::Path;

/// Problems that are told one by one.
const TOLD: usize = 5;

/// What was skipped.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    skip_bad: bool,
    pub(super) count: u64,
    /// The first few, in words.
    pub(super) told: Vec<String>,
}

impl Skipped {
    pub(super) fn new(skip_bad: bool) -> Skipped {
        Skipped { skip_bad, ..Skipped::default() }
    }

    /// A record that cannot be packed, or several neighbours: an error unless such are skipped.
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

    /// What was skipped after this.
    pub(super) fn extend(&mut self, other: Skipped) {
        self.count = self.count.saturating_add(other.count);
        let room = TOLD - self.told.len();
        self.told.extend(other.told.into_iter().take(room));
    }

    pub(super) fn first(&self) -> Option<&str> {
        self.told.first().map(String::as_str)
    }
}
