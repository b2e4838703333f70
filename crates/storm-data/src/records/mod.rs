//! Datasets of records: images with labels, or any other named columns of fixed or varying size.
//!
//! Records are stored in blocks of about [`BLOCK_BYTES`]. Each block is compressed on its own,
//! checksummed and aligned to [`PAGE_BYTES`], so one direct read past the page cache reads it.
//! [`RecordSet::open`] checks such a dataset. A [`RecordLoader`] draws batches of named columns
//! from it: each record once per epoch, in an order that depends only on the options, starting at
//! any position, in bounded memory.

mod batch;
mod block;
mod codec;
mod column;
mod counters;
mod estimate;
mod fault;
mod layout;
mod loader;
mod manifest;
mod order;
mod pack;
mod parallel;
mod queue;
mod rates;
mod read;
mod reading;
mod set;
mod statistics;
mod stream;
mod write;

pub use batch::{BatchColumn, RecordBatch};
pub use codec::Codec;
pub use column::{Column, ColumnKind, ColumnType};
pub use counters::LoaderStatistics;
pub use estimate::{Estimator, RecordDemand, RecordEstimate, RecordStage};
pub use fault::{ReadFault, ReadFaults};
pub use layout::{BLOCK_BYTES, PAGE_BYTES};
pub(crate) use loader::TokenRows;
pub use loader::{RecordLoader, RecordLoaderOptions, RecordPosition};
pub(crate) use manifest::KIND;
pub use manifest::{RecordCounts, RecordManifest, RecordShardInfo};
pub use order::Order;
pub use pack::{
    RecordInput, RecordOutline, RecordPackOptions, RecordPackProgress, RecordPackSummary, Repeated,
    Synthetic, pack_records, resize_image,
};
pub use rates::RecordRates;
pub use reading::{Reading, ReadingPath};
pub use set::RecordSet;
pub use statistics::ImageStatistics;
pub(crate) use stream::{ELEMENTS, Piece, Stream, StreamColumns, StreamWriter};
