//! Records in the rows of a Parquet file.

use super::records::{Raw, Records};
use crate::table::Table;
use crate::{DataError, RecordPlace, WorkerCommand};
use std::path::Path;

/// The rows of a file, counted from one.
pub(super) struct TableRows {
    table: Table,
    file_bytes: u64,
    number: u64,
}

impl TableRows {
    pub(super) fn open(
        path: &Path,
        file_bytes: u64,
        worker: &WorkerCommand,
    ) -> Result<TableRows, DataError> {
        Ok(TableRows { table: Table::open(path, worker)?, file_bytes, number: 0 })
    }
}

impl Records for TableRows {
    /// The share of the rows: which bytes they come from is not known here.
    fn taken(&self) -> u64 {
        let share = u128::from(self.file_bytes) * u128::from(self.number);
        let taken = share / u128::from(self.table.rows().max(1));
        u64::try_from(taken).map_or(self.file_bytes, |taken| taken.min(self.file_bytes))
    }

    fn next(&mut self) -> Result<Option<Raw>, DataError> {
        let Some(json) = self.table.next()? else { return Ok(None) };
        self.number += 1;
        let bytes = json.as_ref().map_or(0, |json| json.len() as u64);
        Ok(Some(Raw { place: RecordPlace::Row(self.number), bytes, json }))
    }
}
