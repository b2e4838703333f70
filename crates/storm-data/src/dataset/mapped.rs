//! The files of a dataset of version 1, mapped into memory.

use super::VerifyProgress;
use crate::shard::{Shard, file_name};
use crate::{DataError, Manifest};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Shards whose headers, sizes and indices were checked.
#[derive(Debug)]
pub(super) struct MappedShards {
    shards: Vec<Shard>,
    /// Tokens before each shard, and in total.
    tokens_before: Vec<u64>,
    /// Documents or samples that start before each shard, and in total.
    samples_before: Vec<u64>,
}

impl MappedShards {
    pub(super) fn open(dir: &Path, manifest: &Manifest) -> Result<MappedShards, DataError> {
        let open = |(number, info)| {
            let path = dir.join(file_name(number));
            Shard::open(&path, manifest.kind, manifest.tokenizer.vocabulary, info)
        };
        let shards: Vec<Shard> =
            manifest.shards.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        // Each shard has fewer than 2^40 tokens, and there are fewer than 2^24 shards.
        let sums = |count: fn(&Shard) -> u64| {
            let mut sums = vec![0];
            sums.extend(shards.iter().scan(0, |sum, shard| {
                *sum += count(shard);
                Some(*sum)
            }));
            sums
        };
        let (tokens_before, samples_before) = (sums(Shard::token_count), sums(Shard::sample_count));
        let total = |sums: &[u64]| sums.last().copied().unwrap_or(0);
        let counts = &manifest.counts;
        if (total(&tokens_before), total(&samples_before)) != (counts.tokens, counts.samples) {
            let problem = "the shards do not add up to what the manifest says";
            return Err(DataError::damaged(dir, problem));
        }
        Ok(MappedShards { shards, tokens_before, samples_before })
    }

    pub(super) fn verify(
        &self,
        progress: &(dyn Fn(VerifyProgress) + Sync),
    ) -> Result<(), DataError> {
        let bytes_total = self.shards.iter().map(Shard::verified_bytes).sum();
        let bytes_done = AtomicU64::new(0);
        let done = |bytes: u64| {
            let bytes_done = bytes_done.fetch_add(bytes, Ordering::Relaxed) + bytes;
            progress(VerifyProgress { bytes_done, bytes_total });
        };
        self.shards.iter().try_for_each(|shard| shard.verify(&done))
    }

    /// Copies tokens. The range must exist.
    pub(super) fn read_tokens(
        &self,
        mut start: u64,
        mut dest: &mut [i32],
        bytes: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        while !dest.is_empty() {
            let (shard, at, count) = self.place(start, dest.len());
            let (now, later) = dest.split_at_mut(count);
            shard.read_tokens(at, now, bytes)?;
            (start, dest) = (start + count as u64, later);
        }
        Ok(())
    }

    /// Copies the masks of tokens. The range must exist, and the dataset must have samples.
    pub(super) fn read_mask(
        &self,
        mut start: u64,
        mut dest: &mut [bool],
        bytes: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        while !dest.is_empty() {
            let (shard, at, count) = self.place(start, dest.len());
            let (now, later) = dest.split_at_mut(count);
            shard.read_mask(at, now, bytes)?;
            (start, dest) = (start + count as u64, later);
        }
        Ok(())
    }

    /// Asks the system to prefetch tokens. The range must exist.
    pub(super) fn will_need(&self, mut start: u64, end: u64) {
        while start < end {
            let (shard, at, count) = self.place(start, (end - start) as usize);
            shard.will_need(at, count as u64);
            start += count as u64;
        }
    }

    /// The first tokens of documents or samples from number `first` on, which must exist.
    pub(super) fn read_starts(
        &self,
        mut first: u64,
        mut dest: &mut [u64],
    ) -> Result<(), DataError> {
        while !dest.is_empty() {
            // The last shard that starts at or before it, because earlier ones may be empty.
            let number = self.samples_before.partition_point(|&before| before <= first) - 1;
            let shard = &self.shards[number];
            let at = first - self.samples_before[number];
            let count = (shard.sample_count() - at).min(dest.len() as u64) as usize;
            let (now, later) = dest.split_at_mut(count);
            shard.read_index(at, now)?;
            now.iter_mut().for_each(|start| *start += self.tokens_before[number]);
            (first, dest) = (first + count as u64, later);
        }
        Ok(())
    }

    /// The shard of an existing token, the token's offset in it, and how many of `count` tokens are
    /// there.
    fn place(&self, token: u64, count: usize) -> (&Shard, u64, usize) {
        let number = self.tokens_before.partition_point(|&before| before <= token) - 1;
        let at = token - self.tokens_before[number];
        let here = self.shards[number].token_count() - at;
        (&self.shards[number], at, here.min(count as u64) as usize)
    }
}
