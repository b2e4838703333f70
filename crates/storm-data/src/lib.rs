//! Datasets on disk: packing text into shards, and loading batches from them.
//!
//! [`pack`] turns text into a directory of shards: token ids in files that are mapped into memory, with
//! an index and checksums. [`Dataset::open`] checks such a directory, and a [`Loader`] draws rows from
//! it: each once per epoch, in an order that depends on the seed alone, from any position on. Files are
//! hostile until parsed. Nothing here knows a model.

mod dataset;
mod error;
mod loader;
mod manifest;
mod pack;
mod shard;
mod tokenizer;

pub use dataset::{Dataset, VerifyProgress};
pub use error::DataError;
pub use loader::{Loader, LoaderOptions, LoaderReport, Order, Passes, Position, Samples, Split};
pub use manifest::{Counts, HeldOut, Kind, Manifest, ShardInfo};
pub use pack::{
    IfExists, InputFormat, PackOptions, PackProgress, PackSummary, SHARD_TOKENS_DEFAULT, pack,
};
pub use tokenizer::worker::tokenize_worker;
pub use tokenizer::{
    ChatTokens, DecodeStream, Tokenizer, TokenizerInfo, TokenizerKind, TokenizerSource,
    WorkerCommand,
};
