//! Tables in the Parquet format, read by a worker process.
//!
//! The process sends each row as the JSON object that a line of JSONL would have, so that nothing after this knows
//! about Parquet.

mod client;
mod json;
mod worker;

pub(crate) use client::{IfDamaged, Table, TableItem};
pub(crate) use worker::{MEMORY_BYTES_MAX, OpenTable, SECONDS_MAX, serve};

/// The first byte of a frame: what the rest of it is.
mod frame {
    /// JSON: how many rows there are.
    pub(super) const OPENED: u8 = 0;
    /// A row, as JSON.
    pub(super) const ROW: u8 = 1;
    /// Why a row cannot be packed.
    pub(super) const BAD_ROW: u8 = 2;
    /// Why nothing more comes.
    pub(super) const FAILED: u8 = 3;
    /// There are no more rows.
    pub(super) const END: u8 = 4;
    /// A row group begins: how many rows it has.
    pub(super) const GROUP: u8 = 5;
    /// Why the rest of the row group cannot be read; the next group follows.
    pub(super) const DAMAGED: u8 = 6;
}
