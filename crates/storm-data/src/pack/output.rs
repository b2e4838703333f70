//! Writes tokens into shards and counts them.

use super::encode::Chunk;
use crate::dataset::{TokenFormat, starts_writer};
use crate::manifest::Stored;
use crate::records::{Codec, ELEMENTS, StreamWriter};
use crate::{Counts, DataError, Kind};
use std::path::Path;

/// The shards of a dataset that is being written.
pub(super) struct Output {
    kind: Kind,
    codec: Codec,
    tokens: TokenWriter,
    starts: StreamWriter,
    /// The record of starts being filled.
    start_bytes: Vec<u8>,
    counts: Counts,
    /// A document has started, but none of its tokens has arrived yet.
    begins: bool,
}

impl Output {
    pub(super) fn new(
        dir: &Path,
        kind: Kind,
        vocabulary: u32,
        codec: Codec,
        shard_tokens: u64,
    ) -> Result<Output, DataError> {
        let format = TokenFormat::new(kind, vocabulary);
        Ok(Output {
            kind,
            codec,
            tokens: TokenWriter {
                format,
                is_masked: kind == Kind::Samples,
                writer: format.writer(dir, codec, shard_tokens)?,
                count: 0,
                ids: Vec::new(),
                mask: vec![0; ELEMENTS as usize / 8],
            },
            starts: starts_writer(dir, codec)?,
            start_bytes: Vec::new(),
            counts: Counts::default(),
            begins: false,
        })
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    pub(super) fn push(&mut self, chunks: &[Chunk]) -> Result<(), DataError> {
        chunks.iter().try_for_each(|chunk| match self.kind {
            Kind::Text => self.push_text(chunk),
            Kind::Samples => self.push_sample(chunk),
        })
    }

    fn push_text(&mut self, chunk: &Chunk) -> Result<(), DataError> {
        self.begins |= chunk.begins;
        if !chunk.tokens.is_empty() {
            if std::mem::take(&mut self.begins) {
                self.begin()?;
            }
            self.tokens.push(&chunk.tokens, &[])?;
            let count = chunk.tokens.len() as u64;
            self.counts.tokens += count;
            self.counts.learned_tokens += count;
        }
        if chunk.ends && std::mem::take(&mut self.begins) {
            self.counts.empty_samples += 1;
        }
        Ok(())
    }

    fn push_sample(&mut self, chunk: &Chunk) -> Result<(), DataError> {
        if chunk.tokens.len() < 2 {
            self.counts.empty_samples += 1;
            return Ok(());
        }
        // The first token is never a target.
        let learned = chunk.learned[1..].iter().filter(|&&learned| learned).count() as u64;
        if learned == 0 {
            self.counts.unlearned_samples += 1;
            return Ok(());
        }
        self.begin()?;
        self.tokens.push(&chunk.tokens, &chunk.learned)?;
        self.counts.tokens += chunk.tokens.len() as u64;
        self.counts.learned_tokens += learned;
        Ok(())
    }

    /// Marks the next token as the first of a document or sample.
    fn begin(&mut self) -> Result<(), DataError> {
        self.start_bytes.extend(self.counts.tokens.to_le_bytes());
        self.counts.samples += 1;
        if self.counts.samples.is_multiple_of(ELEMENTS) {
            self.starts.push(&[&self.start_bytes])?;
            self.start_bytes.clear();
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<(Counts, Stored), DataError> {
        if !self.start_bytes.is_empty() {
            self.start_bytes.resize(ELEMENTS as usize * size_of::<u64>(), 0);
            self.starts.push(&[&self.start_bytes])?;
        }
        let (tokens, starts) = (self.tokens.finish()?, self.starts.finish()?);
        Ok((self.counts, Stored { codec: self.codec, tokens, starts }))
    }
}

/// Groups tokens and their masks into records.
struct TokenWriter {
    format: TokenFormat,
    is_masked: bool,
    writer: StreamWriter,
    /// Tokens in the record being filled.
    count: usize,
    ids: Vec<u8>,
    mask: Vec<u8>,
}

impl TokenWriter {
    /// Adds tokens. For samples, `learned` marks those that count in the loss.
    fn push(&mut self, mut tokens: &[u32], mut learned: &[bool]) -> Result<(), DataError> {
        while !tokens.is_empty() {
            let count = tokens.len().min(ELEMENTS as usize - self.count);
            let (now, later) = tokens.split_at(count);
            self.format.encode(now, &mut self.ids);
            let (marks, rest) = learned.split_at(count.min(learned.len()));
            for (at, &learned) in (self.count..).zip(marks) {
                self.mask[at / 8] |= u8::from(learned) << (at % 8);
            }
            self.count += count;
            (tokens, learned) = (later, rest);
            if self.count == ELEMENTS as usize {
                self.end_record()?;
            }
        }
        Ok(())
    }

    fn end_record(&mut self) -> Result<(), DataError> {
        let values = [&self.ids[..], &self.mask];
        self.writer.push(&values[..1 + usize::from(self.is_masked)])?;
        self.ids.clear();
        self.mask.fill(0);
        self.count = 0;
        Ok(())
    }

    fn finish(mut self) -> Result<crate::manifest::StoredStream, DataError> {
        if self.count > 0 {
            self.ids.resize(self.format.bytes(ELEMENTS as usize), 0);
            self.end_record()?;
        }
        self.writer.finish()
    }
}
