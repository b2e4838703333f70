//! Tables in the Parquet format, read by a worker process.
//!
//! The worker sends each row as the equivalent JSONL object, so no later stage depends on Parquet.

mod client;
mod json;
mod worker;

pub(crate) use client::{IfDamaged, Table, TableItem};
pub(crate) use worker::{MEMORY_BYTES_MAX, OpenTable, SECONDS_MAX, serve};

/// The first byte of a frame: its type.
mod frame {
    /// The number of rows, as `u64`.
    pub(super) const OPENED: u8 = 0;
    /// A row, as JSON.
    pub(super) const ROW: u8 = 1;
    /// The problem with a row.
    pub(super) const BAD_ROW: u8 = 2;
    /// The error that ended the stream.
    pub(super) const FAILED: u8 = 3;
    /// The end of the rows.
    pub(super) const END: u8 = 4;
    /// The start of a row group: its number of rows, as `u64`.
    pub(super) const GROUP: u8 = 5;
    /// Why the rest of the row group cannot be read. The next group follows.
    pub(super) const DAMAGED: u8 = 6;
}
