//! Datasets on disk: packs text, images and other records into shards, and loads batches from them.
//!
//! [`pack`] turns text into a directory of shards with an index. A shard holds token ids in
//! checksummed blocks, which may be compressed. [`Dataset::open`] checks such a directory. A
//! [`Loader`] draws rows from it: each once per epoch, in an order that depends only on seed and
//! epoch, starting at any position. [`records`] does the same for images and other named columns.
//! Files are untrusted until parsed. This crate is independent of models.
//!
//! ```
//! use std::sync::Arc;
//! use storm_data::records::Codec;
//! use storm_data::{
//!     ChatTemplate, Dataset, IfExists, InputFormat, Loader, LoaderOptions, PackOptions,
//!     SHARD_TOKENS_DEFAULT, Samples, SpecialTokens, TokenizerSource, WorkerCommand, pack,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let input = folder.path().join("input.txt");
//! std::fs::write(&input, "It is a truth universally acknowledged")?;
//! let options = PackOptions {
//!     inputs: vec![input],
//!     format: InputFormat::ByName,
//!     tokenizer: TokenizerSource::Bytes,
//!     end_of_text: None,
//!     chat_template: ChatTemplate::OfTokenizer,
//!     special_tokens: SpecialTokens::Parsed,
//!     worker: WorkerCommand::this_program(["data", "worker"])?,
//!     out: folder.path().join("dataset"),
//!     if_exists: IfExists::Refuse,
//!     held_out: 0.0,
//!     codec: Codec::None,
//!     skip_bad: false,
//!     threads: 2,
//!     shard_tokens: SHARD_TOKENS_DEFAULT,
//! };
//! pack(&options, &|progress| println!("{} tokens", progress.tokens))?;
//!
//! let dataset = Arc::new(Dataset::open(&options.out)?);
//! let options = LoaderOptions { data_ram: 64 << 20, ..LoaderOptions::training(2, 8, 1) };
//! let mut loader = Loader::new(dataset, options)?;
//! let mut samples = Samples::default();
//! loader.next_batch(&mut samples)?;
//! assert_eq!(samples.tokens.len(), 2 * 8);
//! # Ok(())
//! # }
//! ```

mod dataset;
mod error;
mod loader;
mod manifest;
mod pack;
pub mod records;
mod shard;
mod table;
mod tokenizer;
mod worker;

pub use dataset::{Dataset, VerifyProgress};
pub use error::{DataError, RecordPlace};
pub use loader::{
    Loader, LoaderOptions, LoaderReport, Overlong, Passes, Position, Samples, Split,
    estimator_of_text, write_batches,
};
pub use manifest::{Counts, HeldOut, Kind, Manifest, ShardInfo, Stored, StoredStream};
pub use pack::{
    IfExists, InputFormat, PackOptions, PackProgress, PackSummary, SHARD_TOKENS_DEFAULT,
    SyntheticText, files_to_pack, pack, pack_synthetic_text,
};
pub use records::Order;
pub use tokenizer::{
    ChatMessage, ChatTemplate, ChatTokenizer, ChatTokens, DecodeStream, SpecialTokens, Tokenizer,
    TokenizerInfo, TokenizerKind, TokenizerSource,
};
pub use worker::{WorkerCommand, run_worker};
