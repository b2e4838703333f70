//! Shards: files of token ids with an index, loss masks and checksums.

mod layout;
mod read;
mod write;

pub(crate) use read::Shard;
pub(crate) use write::ShardWriter;

/// The name of a shard by its number.
pub(crate) fn file_name(number: usize) -> String {
    format!("shard-{number:05}.storm")
}
