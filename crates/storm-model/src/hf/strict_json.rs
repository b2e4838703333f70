//! JSON from files nobody vouches for: capped in size, without duplicate keys.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::ModelError;

/// Reads a whole file, unless it is longer than `limit` bytes.
pub(super) fn read_capped(
    path: &Path,
    what: &'static str,
    limit: u64,
) -> Result<Vec<u8>, ModelError> {
    let file = File::open(path).map_err(ModelError::io("open the file", path))?;
    let length = file.metadata().map_err(ModelError::io("read the file's size", path))?.len();
    let too_large = |bytes| ModelError::TooLarge { path: path.to_owned(), what, bytes, limit };
    if length > limit {
        return Err(too_large(length));
    }
    // The file may grow while it is read: read one byte more than allowed, and see.
    let mut bytes = Vec::with_capacity(length as usize + 1);
    file.take(limit + 1).read_to_end(&mut bytes).map_err(ModelError::io("read the file", path))?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(bytes)
}

/// Parses JSON. serde_json bounds the depth of nesting.
pub(super) fn parse<'a, T: Deserialize<'a>>(path: &Path, bytes: &'a [u8]) -> Result<T, ModelError> {
    serde_json::from_slice(bytes).map_err(|error| ModelError::Json {
        path: path.to_owned(),
        problem: crate::error::clip(&error.to_string()),
    })
}

/// A JSON object in file order whose keys are unique; serde's maps would keep the last of two
/// without a word, and which one another reader keeps is anybody's guess.
#[derive(Debug)]
pub(super) struct UniqueMap<V>(pub(super) Vec<(String, V)>);

/// More entries than this are no model: 65,535 layers have fewer.
const ENTRIES_MAX: usize = 1 << 20;

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries: Vec<(String, V)> = Vec::new();
        while let Some(entry) = map.next_entry()? {
            if entries.len() == ENTRIES_MAX {
                return Err(A::Error::custom(format_args!("more than {ENTRIES_MAX} entries")));
            }
            entries.push(entry);
        }
        let mut keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
        keys.sort_unstable();
        if let Some(pair) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(A::Error::custom(format_args!("{:?} occurs twice", pair[0])));
        }
        Ok(UniqueMap(entries))
    }
}
