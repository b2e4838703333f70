//! JSON from untrusted files, with limits on total size, text length and number of entries, and
//! without duplicate keys.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};

use storm_files::open_plain;

use crate::ModelError;

/// Reads a whole file of at most `limit` bytes.
pub(crate) fn read_capped(
    path: &Path,
    what: &'static str,
    limit: u64,
) -> Result<Vec<u8>, ModelError> {
    let (file, length) = open_capped(path, what, limit)?;
    // The file may grow while it is read, so read one byte more than allowed.
    let mut bytes = Vec::with_capacity(length as usize + 1);
    file.take(limit + 1).read_to_end(&mut bytes).map_err(ModelError::io("read the file", path))?;
    if bytes.len() as u64 > limit {
        let (path, bytes) = (path.to_owned(), bytes.len() as u64);
        return Err(ModelError::TooLarge { path, what, bytes, limit });
    }
    Ok(bytes)
}

/// Opens a file of at most `limit` bytes. Returns it with its length.
pub(super) fn open_capped(
    path: &Path,
    what: &'static str,
    limit: u64,
) -> Result<(File, u64), ModelError> {
    let file = open_plain(path).map_err(ModelError::io("open the file", path))?;
    let bytes = file.metadata().map_err(ModelError::io("read the file's size", path))?.len();
    if bytes > limit {
        return Err(ModelError::TooLarge { path: path.to_owned(), what, bytes, limit });
    }
    Ok((file, bytes))
}

/// Parses JSON. serde_json limits the nesting depth.
pub(crate) fn parse<'a, T: Deserialize<'a>>(path: &Path, bytes: &'a [u8]) -> Result<T, ModelError> {
    serde_json::from_slice(bytes).map_err(|error| ModelError::Json {
        path: path.to_owned(),
        problem: crate::error::clip(&error.to_string()),
    })
}

/// Parses JSON as it is read, so that skipped parts need no memory.
pub(super) fn parse_stream<T>(
    reader: impl Read,
    seed: impl for<'de> DeserializeSeed<'de, Value = T>,
) -> serde_json::Result<T> {
    let reader = BufReader::new(TokenLimit { reader, place: Place::Outside, length: 0 });
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let value = seed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

/// Maximum length of a string or number, because the parser collects it completely before it can be
/// checked. Metadata has long strings.
const TOKEN_BYTES_MAX: usize = 1 << 20;

/// Fails on JSON with a string or number longer than [`TOKEN_BYTES_MAX`].
struct TokenLimit<R> {
    reader: R,
    place: Place,
    length: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Outside,
    InText,
    /// In a string, after a backslash.
    Escaped,
}

impl<R: Read> Read for TokenLimit<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        for byte in &buffer[..count] {
            let (place, ends_token) = match (self.place, byte) {
                (Place::Outside, b'"') => (Place::InText, true),
                (Place::Outside, b'{' | b'}' | b'[' | b']' | b':' | b',') => (Place::Outside, true),
                (Place::Outside, byte) => (Place::Outside, byte.is_ascii_whitespace()),
                (Place::InText, b'"') => (Place::Outside, true),
                (Place::InText, b'\\') => (Place::Escaped, false),
                (Place::InText | Place::Escaped, _) => (Place::InText, false),
            };
            self.place = place;
            self.length = if ends_token { 0 } else { self.length + 1 };
            if self.length > TOKEN_BYTES_MAX {
                let problem = format!("a text or number has more than {TOKEN_BYTES_MAX} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
        }
        Ok(count)
    }
}

/// Maximum length of a tensor or file name, in bytes.
const NAME_BYTES_MAX: usize = 4096;

/// A string of at most [`NAME_BYTES_MAX`] bytes.
#[derive(Debug)]
pub(super) struct Name(pub(super) String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl Visitor<'_> for NameVisitor {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Name, E> {
        if text.len() > NAME_BYTES_MAX {
            return Err(E::custom(format_args!(
                "a name has {} bytes; the limit is {NAME_BYTES_MAX}",
                text.len()
            )));
        }
        Ok(Name(text.to_owned()))
    }
}

/// Maximum number of tensors in all files together. No supported model has more.
pub(super) const ENTRIES_MAX: usize = 1 << 17;

/// A JSON object in file order with unique keys. serde's maps would silently keep the last
/// duplicate, and other readers may keep the first.
#[derive(Debug)]
pub(super) struct UniqueMap<V>(pub(super) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UniqueMapSeed::new(ENTRIES_MAX).deserialize(deserializer)
    }
}

/// Reads a [`UniqueMap`] with a limit on its entries.
pub(super) struct UniqueMapSeed<V> {
    entries_max: usize,
    values: PhantomData<V>,
}

impl<V> UniqueMapSeed<V> {
    pub(super) fn new(entries_max: usize) -> Self {
        Self { entries_max, values: PhantomData }
    }
}

impl<'de, V: Deserialize<'de>> DeserializeSeed<'de> for UniqueMapSeed<V> {
    type Value = UniqueMap<V>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapSeed<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries: Vec<(String, V)> = Vec::new();
        while let Some((Name(key), value)) = map.next_entry()? {
            if entries.len() == self.entries_max {
                return Err(A::Error::custom(format_args!(
                    "more than {ENTRIES_MAX} entries in all"
                )));
            }
            entries.push((key, value));
        }
        let mut keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
        keys.sort_unstable();
        if let Some(pair) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(A::Error::custom(format_args!("{:?} occurs twice", pair[0])));
        }
        Ok(UniqueMap(entries))
    }
}
