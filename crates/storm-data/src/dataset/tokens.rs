//! The streams of a dataset of version 2: token ids with their masks, and the starts of documents
//! or samples.

use super::VerifyProgress;
use crate::manifest::Stored;
use crate::records::{
    Codec, ELEMENTS, Piece, Reading, RecordSet, Stream, StreamColumns, StreamWriter,
};
use crate::shard::{TokenWidth, file_name, starts_file_name};
use crate::{DataError, Kind, Manifest};
use std::path::Path;
use std::sync::Arc;

/// Bytes of a start, stored as `u64`.
const START_BYTES: u64 = 8;
/// Bytes of a shard of starts.
const STARTS_SHARD_BYTES: u64 = 1 << 30;

/// How tokens and masks are stored in a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenFormat {
    width: TokenWidth,
    vocabulary: u32,
    /// Whether there is a mask: one bit per token, lowest bit first.
    is_masked: bool,
}

impl TokenFormat {
    pub(crate) fn new(kind: Kind, vocabulary: u32) -> TokenFormat {
        let width = TokenWidth::for_vocabulary(vocabulary);
        TokenFormat { width, vocabulary, is_masked: kind == Kind::Samples }
    }

    fn token_bytes(self) -> u64 {
        ELEMENTS * self.width.bytes()
    }

    /// A writer whose shards hold about this many tokens.
    pub(crate) fn writer(
        self,
        dir: &Path,
        codec: Codec,
        shard_tokens: u64,
    ) -> Result<StreamWriter, DataError> {
        let columns = self.columns();
        let columns = StreamColumns(&columns[..1 + usize::from(self.is_masked)]);
        let shard_bytes = shard_tokens.saturating_mul(self.width.bytes());
        StreamWriter::new(dir, columns, codec, file_name, shard_bytes)
    }

    fn columns(self) -> [(&'static str, u64); 2] {
        [("tokens", self.token_bytes()), ("learned", ELEMENTS / 8)]
    }

    /// Appends the stored form of ids.
    pub(crate) fn encode(self, tokens: &[u32], out: &mut Vec<u8>) {
        self.width.encode(tokens, out);
    }

    /// Bytes of this many tokens.
    pub(crate) fn bytes(self, tokens: usize) -> usize {
        tokens * self.width.bytes() as usize
    }

    /// Copies the ids of a piece from its record.
    pub(crate) fn decode(
        self,
        piece: Piece,
        record: &[u8],
        dest: &mut [i32],
    ) -> Result<(), String> {
        let bytes = &record[self.bytes(piece.first)..][..self.bytes(piece.count)];
        self.width.decode(bytes, self.vocabulary, dest)
    }

    /// Copies the mask of a piece from its record. Without a mask, all tokens count in the loss.
    pub(crate) fn decode_mask(self, piece: Piece, record: &[u8], dest: &mut [bool]) {
        if !self.is_masked {
            return dest.fill(true);
        }
        let mask = &record[self.token_bytes() as usize..];
        for (at, learned) in (piece.first..).zip(dest) {
            *learned = mask[at / 8] >> (at % 8) & 1 == 1;
        }
    }
}

/// A writer of starts.
pub(crate) fn starts_writer(dir: &Path, codec: Codec) -> Result<StreamWriter, DataError> {
    StreamWriter::new(dir, STARTS, codec, starts_file_name, STARTS_SHARD_BYTES)
}

const STARTS: StreamColumns<'_> = StreamColumns(&[("starts", ELEMENTS * START_BYTES)]);

/// The open streams.
#[derive(Debug)]
pub(crate) struct TokenStreams {
    format: TokenFormat,
    tokens: Stream,
    starts: Stream,
}

impl TokenStreams {
    pub(super) fn open(
        dir: &Path,
        manifest: &Manifest,
        stored: &Stored,
        reading: Reading,
    ) -> Result<TokenStreams, DataError> {
        let format = TokenFormat::new(manifest.kind, manifest.tokenizer.vocabulary);
        let columns = format.columns();
        let columns = StreamColumns(&columns[..1 + usize::from(format.is_masked)]);
        let Stored { codec, tokens, starts } = stored;
        let counts = &manifest.counts;
        let tokens = Stream::open(dir, tokens, columns, *codec, counts.tokens, file_name, reading)?;
        let starts =
            Stream::open(dir, starts, STARTS, *codec, counts.samples, starts_file_name, reading)?;
        Ok(TokenStreams { format, tokens, starts })
    }

    /// How its tokens are stored.
    pub(crate) fn format(&self) -> TokenFormat {
        self.format
    }

    /// The records of its tokens.
    pub(crate) fn set(&self) -> &Arc<RecordSet> {
        self.tokens.set()
    }

    pub(super) fn verify(
        &self,
        progress: &(dyn Fn(VerifyProgress) + Sync),
    ) -> Result<(), DataError> {
        let (tokens, starts) = (self.tokens.verified_bytes(), self.starts.verified_bytes());
        let told = |before: u64| {
            move |at: VerifyProgress| {
                let bytes_done = before + at.bytes_done;
                progress(VerifyProgress { bytes_done, bytes_total: tokens + starts });
            }
        };
        self.tokens.verify(&told(0))?;
        self.starts.verify(&told(tokens))
    }

    /// Copies tokens. The range must exist.
    pub(super) fn read_tokens(&self, start: u64, dest: &mut [i32]) -> Result<(), DataError> {
        self.tokens.read(start..start + dest.len() as u64, |piece, record| {
            self.format.decode(piece, record, &mut dest[piece.at..][..piece.count])
        })
    }

    /// Copies the masks of tokens. The range must exist.
    pub(super) fn read_mask(&self, start: u64, dest: &mut [bool]) -> Result<(), DataError> {
        self.tokens.read(start..start + dest.len() as u64, |piece, record| {
            self.format.decode_mask(piece, record, &mut dest[piece.at..][..piece.count]);
            Ok(())
        })
    }

    /// The first tokens of documents or samples from number `first` on, which must exist.
    pub(super) fn read_starts(&self, first: u64, dest: &mut [u64]) -> Result<(), DataError> {
        self.starts.read(first..first + dest.len() as u64, |piece, record| {
            let dest = &mut dest[piece.at..][..piece.count];
            let stored = &record.as_chunks().0[piece.first..];
            for (start, eight) in dest.iter_mut().zip(stored) {
                *start = u64::from_le_bytes(*eight);
            }
            Ok(())
        })
    }
}
