//! Determines the format of a file from its name.

use super::InputFormat;
use crate::DataError;
use std::path::Path;

/// The format of a file after decompression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileFormat {
    Text,
    Jsonl,
    Json,
    /// A table with this byte as its delimiter.
    Delimited(u8),
    Parquet,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    Gzip,
    Zstd,
}

impl Compression {
    pub(super) fn name(self) -> &'static str {
        match self {
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
        }
    }

    /// Detects compression by magic bytes. No text begins with them.
    pub(super) fn of_beginning(bytes: &[u8]) -> Option<Compression> {
        match bytes {
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
            // A skippable frame.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Compression::Zstd),
            _ => None,
        }
    }
}

/// What a file name implies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// `None` if the extension is unknown.
    pub(super) format: Option<FileFormat>,
    pub(super) compression: Option<Compression>,
    /// An Arrow table, which cannot be read.
    is_arrow: bool,
}

impl Named {
    pub(super) fn of(path: &Path) -> Named {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase());
        let mut parts = name.as_deref().unwrap_or_default().rsplit('.');
        let last = parts.next();
        let compression = match last {
            Some("gz") => Some(Compression::Gzip),
            Some("zst" | "zstd") => Some(Compression::Zstd),
            _ => None,
        };
        let before = if compression.is_some() { parts.next() } else { last };
        // A name without a dot has no extension.
        let ending = before
            .filter(|_| parts.next().is_some_and(|stem| !stem.is_empty()))
            .unwrap_or_default();
        let format = match ending {
            "txt" | "text" | "md" => Some(FileFormat::Text),
            "jsonl" | "ndjson" => Some(FileFormat::Jsonl),
            "json" => Some(FileFormat::Json),
            "csv" => Some(FileFormat::Delimited(b',')),
            "tsv" => Some(FileFormat::Delimited(b'\t')),
            "parquet" | "pq" => Some(FileFormat::Parquet),
            _ => None,
        };
        Named { format, compression, is_arrow: ending == "arrow" || ending == "feather" }
    }

    /// The format to read the file as, given the requested format.
    pub(super) fn format(self, path: &Path, asked: InputFormat) -> Result<FileFormat, DataError> {
        let format = match asked.format() {
            Some(format) => format,
            None if self.is_arrow => {
                return Err(DataError::input(
                    path,
                    "is in the Arrow format; write it as Parquet or JSONL",
                ));
            }
            None => self.format.unwrap_or(FileFormat::Text),
        };
        match (format, self.compression) {
            (FileFormat::Parquet, Some(compression)) => {
                let problem = format!(
                    "is Parquet inside of {}, which cannot be read in place; decompress it first",
                    compression.name()
                );
                Err(DataError::input(path, problem))
            }
            _ => Ok(format),
        }
    }
}

impl InputFormat {
    /// `None` if names decide.
    pub(super) fn format(self) -> Option<FileFormat> {
        match self {
            InputFormat::ByName => None,
            InputFormat::Text => Some(FileFormat::Text),
            InputFormat::Jsonl => Some(FileFormat::Jsonl),
            InputFormat::Json => Some(FileFormat::Json),
            InputFormat::Csv => Some(FileFormat::Delimited(b',')),
            InputFormat::Tsv => Some(FileFormat::Delimited(b'\t')),
            InputFormat::Parquet => Some(FileFormat::Parquet),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_files_are() {
        let check = |name: &str, format, compression| {
            let named = Named::of(Path::new(name));
            assert_eq!((named.format, named.compression), (format, compression), "{name}");
        };
        check("a/b.txt", Some(FileFormat::Text), None);
        check("b.JSONL.GZ", Some(FileFormat::Jsonl), Some(Compression::Gzip));
        check("b.c.ndjson.zst", Some(FileFormat::Jsonl), Some(Compression::Zstd));
        check("b.tsv.zstd", Some(FileFormat::Delimited(b'\t')), Some(Compression::Zstd));
        check("b.csv", Some(FileFormat::Delimited(b',')), None);
        check("train.parquet", Some(FileFormat::Parquet), None);
        check("b.gz", None, Some(Compression::Gzip));
        check("csv", None, None);
        check("csv.gz", None, Some(Compression::Gzip));
        check(".json", None, None);
        check("b.py", None, None);
    }
}
