//! Shards: the files of a dataset. Shards of version 1 hold token ids with an index, loss masks and
//! checksums. They can be read but are no longer written.

mod layout;
mod read;

pub(crate) use layout::TokenWidth;
pub(crate) use read::Shard;

/// The file name of a shard.
pub(crate) fn file_name(number: usize) -> String {
    format!("shard-{number:05}.storm")
}

/// The file name of a shard of starts.
pub(crate) fn starts_file_name(number: usize) -> String {
    format!("starts-{number:05}.storm")
}

/// Whether a file of this name can be a shard.
pub(crate) fn is_shard_name(name: &str) -> bool {
    let is_one = |prefix, file_name: fn(usize) -> String| {
        let number = name.strip_prefix(prefix).and_then(|rest: &str| rest.strip_suffix(".storm"));
        let number = number.and_then(|number| number.parse().ok());
        number.is_some_and(|number| file_name(number) == name)
    };
    is_one("shard-", file_name) || is_one("starts-", starts_file_name)
}
