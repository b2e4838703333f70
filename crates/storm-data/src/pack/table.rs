//! Records in a Parquet file.

use super::records::{Raw, Records};
use crate::table::{IfDamaged, Table, TableItem};
use crate::{DataError, RecordPlace, WorkerCommand};
use std::path::Path;

/// The rows of a file, counted from 1.
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
        if_damaged: IfDamaged,
    ) -> Result<TableRows, DataError> {
        Ok(TableRows { table: Table::open(path, worker, if_damaged)?, file_bytes, number: 0 })
    }
}

impl Records for TableRows {
    /// Estimated from the number of rows, because their bytes in the file are not known here.
    fn taken(&self) -> u64 {
        let share = u128::from(self.file_bytes) * u128::from(self.number);
        let taken = share / u128::from(self.table.rows().max(1));
        u64::try_from(taken).map_or(self.file_bytes, |taken| taken.min(self.file_bytes))
    }

    fn next(&mut self) -> Result<Option<Raw>, DataError> {
        let Some(item) = self.table.next()? else { return Ok(None) };
        let first = self.number.saturating_add(1);
        Ok(Some(match item {
            TableItem::Row(json) => {
                self.number = first;
                let bytes = json.as_ref().map_or(0, |json| json.len() as u64);
                Raw { place: RecordPlace::Row(first), bytes, json }
            }
            TableItem::Lost { rows, problem } => {
                self.number = self.number.saturating_add(rows);
                let place = RecordPlace::Rows { first, last: self.number };
                Raw { place, bytes: 0, json: Err(problem) }
            }
        }))
    }
}
