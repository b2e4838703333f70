//! A batch of records, column by column.

use super::column::{Column, ColumnKind, ColumnType, Place, RecordLayout, check_range};

/// A batch in reusable buffers. Rows from [`RecordBatch::rows`] on are padding: they are zero, and
/// classes are [`storm_graph::IGNORE_INDEX`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordBatch {
    /// Rows that hold data.
    pub rows: usize,
    /// For each row: the number of its record in the dataset, as low and high half, and the epoch.
    pub samples: Vec<[i32; 3]>,
    columns: Vec<BatchColumn>,
}

/// One column of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchColumn {
    /// Its name, element type and shape, without the row dimension.
    pub column: Column,
    /// The rows, concatenated and little-endian.
    pub bytes: Vec<u8>,
    /// For columns of varying size: where each row ends in `bytes`.
    pub ends: Vec<usize>,
}

impl RecordBatch {
    /// A column by name.
    pub fn column(&self, name: &str) -> Option<&BatchColumn> {
        self.columns.iter().find(|column| column.column.name == name)
    }

    /// All columns, in the dataset's order.
    pub fn columns(&self) -> &[BatchColumn] {
        &self.columns
    }

    /// All columns. The caller may take their bytes, because the loader allocates them again.
    pub fn columns_mut(&mut self) -> &mut [BatchColumn] {
        &mut self.columns
    }

    /// Makes room for this many rows, all empty.
    pub(super) fn prepare(&mut self, layout: &RecordLayout, rows: usize) {
        let same = self.columns.iter().map(|column| &column.column).eq(layout.columns());
        if !same {
            let empty = |column: &Column| BatchColumn {
                column: column.clone(),
                bytes: Vec::new(),
                ends: Vec::new(),
            };
            self.columns = layout.columns().iter().map(empty).collect();
        }
        self.rows = 0;
        self.samples.clear();
        self.samples.resize(rows, [0; 3]);
        for column in &mut self.columns {
            column.ends.clear();
            match column.column.record_bytes() {
                Some(bytes) => column.bytes.resize(rows * bytes, 0),
                None => column.bytes.clear(),
            }
        }
    }

    /// Appends a record as the next row.
    pub(super) fn push(&mut self, record: &[u8], layout: &RecordLayout) -> Result<(), String> {
        for (column, place) in self.columns.iter_mut().zip(layout.places()) {
            match *place {
                Place::Fixed { at, bytes } => {
                    let value = &record[at..at + bytes];
                    check_range(&column.column, value)?;
                    column.bytes[self.rows * bytes..][..bytes].copy_from_slice(value);
                }
                Place::Varying { number } => {
                    let value = layout.varying(record, number);
                    let value = value.ok_or("the lengths in a record exceed it")?;
                    column.bytes.extend_from_slice(value);
                    column.ends.push(column.bytes.len());
                }
            }
        }
        self.rows += 1;
        Ok(())
    }

    /// Appends a row of i32 columns. `values` may have more columns than the batch.
    pub(super) fn push_ids<'a>(&mut self, values: impl IntoIterator<Item = &'a [i32]>) {
        for (column, values) in self.columns.iter_mut().zip(values) {
            let bytes = 4 * values.len();
            let row = &mut column.bytes[self.rows * bytes..][..bytes];
            for (four, value) in row.as_chunks_mut().0.iter_mut().zip(values) {
                *four = value.to_le_bytes();
            }
        }
        self.rows += 1;
    }

    /// Fills the remaining rows with padding.
    pub(super) fn finish(&mut self) {
        let rows = self.samples.len();
        for column in &mut self.columns {
            match column.column.record_bytes() {
                Some(bytes) => {
                    let rest = &mut column.bytes[self.rows * bytes..];
                    match column.column.below {
                        Some(_) => {
                            let ignored = storm_graph::IGNORE_INDEX.to_le_bytes();
                            rest.as_chunks_mut().0.fill(ignored);
                        }
                        None => rest.fill(0),
                    }
                }
                None => column.ends.resize(rows, column.bytes.len()),
            }
        }
    }
}

impl BatchColumn {
    /// The bytes of one row.
    pub fn row(&self, row: usize) -> &[u8] {
        match self.column.kind {
            ColumnKind::Fixed => {
                let bytes = self.column.record_bytes().unwrap_or(0);
                &self.bytes[row * bytes..][..bytes]
            }
            ColumnKind::Bytes => {
                let start = if row == 0 { 0 } else { self.ends[row - 1] };
                &self.bytes[start..self.ends[row]]
            }
        }
    }

    /// The values, if this is a column of i32.
    pub fn to_i32(&self) -> Option<Vec<i32>> {
        let is_i32 = self.column.dtype == ColumnType::I32;
        is_i32.then(|| self.values().collect())
    }

    /// The values of a column of i32.
    pub(crate) fn values(&self) -> impl Iterator<Item = i32> {
        self.bytes.as_chunks().0.iter().map(|four| i32::from_le_bytes(*four))
    }
}
