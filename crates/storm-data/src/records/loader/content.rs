//! The rows that a loader iterates over.

use super::memory::Load;
use super::rows::{RowsOf, TokenRows};
use crate::records::order::Part;
use crate::records::set::RecordSet;
use crate::{DataError, Split};
use std::sync::Arc;

/// Rows of a part of a dataset.
#[derive(Clone, Debug)]
pub(in crate::records) struct Content {
    pub(super) rows: Arc<RowsOf>,
    pub(in crate::records) part: Arc<Part>,
    pub(in crate::records) load: Load,
}

impl Content {
    /// Each record is a row.
    pub(in crate::records) fn records(set: &RecordSet, part: Split) -> Result<Content, DataError> {
        let blocks = set.nonempty_blocks_of(part)?;
        let records = blocks.iter().map(|&block| set.block(block).records()).collect();
        let part = Part::new(blocks, records);
        let load = Load::records(set, part.blocks.len() as u64);
        Ok(Content { rows: Arc::new(RowsOf::Records), part: Arc::new(part), load })
    }

    /// Rows of tokens, whose stream is in `set`.
    pub(in crate::records) fn tokens(set: &RecordSet, rows: TokenRows) -> Content {
        let (rows, part) = rows.spread(set);
        let load = rows.load(&part);
        Content { rows: Arc::new(RowsOf::Tokens(rows)), part: Arc::new(part), load }
    }

    /// Average number of records that a row spans.
    pub(in crate::records) fn wanted_per_row(&self) -> f64 {
        match &*self.rows {
            RowsOf::Records => 1.0,
            RowsOf::Tokens(rows) => rows.records_per_row(self.part.rows),
        }
    }

    /// Pretends that it is a small part of a much larger dataset.
    pub(in crate::records) fn of_many_blocks(mut self) -> Content {
        self.load.blocks = u64::MAX;
        self
    }
}
