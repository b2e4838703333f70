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

/// Whether a file of this name can be a shard.
pub(crate) fn is_shard_name(name: &str) -> bool {
    let number = name.strip_prefix("shard-").and_then(|rest| rest.strip_suffix(".storm"));
    number.and_then(|number| number.parse().ok()).is_some_and(|number| file_name(number) == name)
}
