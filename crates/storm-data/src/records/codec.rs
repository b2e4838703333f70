//! Compression of blocks.

use serde::{Deserialize, Serialize};
use std::io;

/// Higher levels gain a few percent and take several times as long.
const ZSTD_LEVEL: i32 = 3;

/// How a block is compressed. A block that does not shrink is stored as is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    /// No compression.
    #[default]
    None,
    /// Zstandard: smaller files.
    Zstd,
    /// LZ4: faster to read.
    Lz4,
}

impl Codec {
    /// Its name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Codec::None => "none",
            Codec::Zstd => "zstd",
            Codec::Lz4 => "lz4",
        }
    }

    pub(super) fn code(self) -> u32 {
        match self {
            Codec::None => 0,
            Codec::Zstd => 1,
            Codec::Lz4 => 2,
        }
    }

    pub(super) fn from_code(code: u32) -> Option<Codec> {
        [Codec::None, Codec::Zstd, Codec::Lz4].into_iter().find(|codec| codec.code() == code)
    }

    /// The compressed bytes. `None` if the block should be stored as is.
    pub(super) fn compress(self, raw: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let stored = match self {
            Codec::None => return Ok(None),
            Codec::Zstd => zstd::bulk::compress(raw, ZSTD_LEVEL)?,
            Codec::Lz4 => lz4_flex::block::compress(raw),
        };
        Ok((stored.len() < raw.len()).then_some(stored))
    }

    /// Decompresses into `raw`, which must be filled completely.
    pub(super) fn decompress(self, stored: &[u8], raw: &mut [u8]) -> Result<(), String> {
        let expected = raw.len();
        let length =
            match self {
                Codec::None => {
                    let length = stored.len();
                    if length == expected {
                        raw.copy_from_slice(stored);
                    }
                    length
                }
                Codec::Zstd => zstd::bulk::decompress_to_buffer(stored, raw)
                    .map_err(|error| error.to_string())?,
                Codec::Lz4 => lz4_flex::block::decompress_into(stored, raw)
                    .map_err(|error| error.to_string())?,
            };
        match length == expected {
            true => Ok(()),
            false => Err(format!("it holds {length} bytes instead of {expected}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Codec; 3] = [Codec::None, Codec::Zstd, Codec::Lz4];

    #[test]
    fn bytes_come_back() {
        let raw: Vec<u8> = (0..100_000u32).map(|at| (at / 97) as u8).collect();
        for codec in ALL {
            let stored = codec.compress(&raw).unwrap().unwrap_or_else(|| raw.clone());
            assert_eq!(stored.len() < raw.len(), codec != Codec::None);
            let mut back = vec![0; raw.len()];
            codec.decompress(&stored, &mut back).unwrap();
            assert!(back == raw);
        }
    }

    #[test]
    fn more_or_fewer_bytes_than_announced_are_an_error() {
        let raw = vec![7; 1 << 20];
        for codec in ALL {
            let stored = codec.compress(&raw).unwrap().unwrap_or_else(|| raw.clone());
            for length in [0, 1, raw.len() - 1, raw.len() + 1] {
                assert!(codec.decompress(&stored, &mut vec![0; length]).is_err(), "{codec:?}");
            }
            codec.decompress(&stored[..stored.len() / 2], &mut vec![0; raw.len()]).unwrap_err();
        }
    }
}
