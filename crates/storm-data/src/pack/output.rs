//! Writes tokens into shards and counts them.

use super::encode::Chunk;
use crate::shard::{ShardWriter, file_name};
use crate::{Counts, DataError, Kind, ShardInfo};
use std::path::{Path, PathBuf};

/// The most documents or samples in a shard: their index is in memory until the shard is written.
const SHARD_SAMPLES_MAX: usize = 1 << 22;

/// The shards of a dataset that is being written.
pub(super) struct Output {
    dir: PathBuf,
    kind: Kind,
    vocabulary: u32,
    shard_tokens: u64,
    shard: Option<ShardWriter>,
    finished: Vec<ShardInfo>,
    counts: Counts,
    /// A document has started, but none of its tokens has arrived.
    begins: bool,
}

impl Output {
    pub(super) fn new(dir: &Path, kind: Kind, vocabulary: u32, shard_tokens: u64) -> Output {
        Output {
            dir: dir.to_owned(),
            kind,
            vocabulary,
            shard_tokens,
            shard: None,
            finished: Vec::new(),
            counts: Counts::default(),
            begins: false,
        }
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

    /// Text fills shards completely.
    fn push_text(&mut self, chunk: &Chunk) -> Result<(), DataError> {
        self.begins |= chunk.begins;
        let mut tokens = &chunk.tokens[..];
        while !tokens.is_empty() {
            let begins = std::mem::take(&mut self.begins);
            let room = self.shard_tokens;
            let shard = self.shard_with_room(1)?;
            if begins {
                shard.begin();
            }
            let count = (room - shard.token_count()).min(tokens.len() as u64);
            let (now, later) = tokens.split_at(count as usize);
            shard.push(now, &[])?;
            tokens = later;
            self.counts.samples += u64::from(begins);
            self.counts.tokens += count;
            self.counts.learned_tokens += count;
        }
        if chunk.ends && std::mem::take(&mut self.begins) {
            self.counts.empty_samples += 1;
        }
        Ok(())
    }

    /// A sample stays in one shard.
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
        let count = chunk.tokens.len() as u64;
        let shard = self.shard_with_room(count)?;
        shard.begin();
        shard.push(&chunk.tokens, &chunk.learned)?;
        self.counts.samples += 1;
        self.counts.tokens += count;
        self.counts.learned_tokens += learned;
        Ok(())
    }

    /// The current shard, or a new one if it has no room for this many tokens or for another sample.
    fn shard_with_room(&mut self, tokens: u64) -> Result<&mut ShardWriter, DataError> {
        let full = |shard: &mut ShardWriter| {
            shard.token_count() + tokens > self.shard_tokens
                || shard.sample_count() >= SHARD_SAMPLES_MAX
        };
        if let Some(shard) = self.shard.take_if(full) {
            self.finished.push(shard.finish()?);
        }
        match &mut self.shard {
            Some(shard) => Ok(shard),
            empty => {
                let path = self.dir.join(file_name(self.finished.len()));
                Ok(empty.insert(ShardWriter::create(&path, self.kind, self.vocabulary)?))
            }
        }
    }

    pub(super) fn finish(mut self) -> Result<(Counts, Vec<ShardInfo>), DataError> {
        if let Some(shard) = self.shard.take() {
            self.finished.push(shard.finish()?);
        }
        Ok((self.counts, self.finished))
    }
}
