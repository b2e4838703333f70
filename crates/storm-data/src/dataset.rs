//! A dataset on disk, checked and mapped.

use crate::manifest::{Manifest, TOKENIZER, TOKENIZER_BYTES_MAX, read_file, sha256_hex};
use crate::shard::{Shard, file_name};
use crate::{DataError, Kind, Split};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// How far [`Dataset::verify`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Bytes checked.
    pub bytes_done: u64,
    /// Bytes to check.
    pub bytes_total: u64,
}

/// A directory that [`crate::pack`] wrote. Shards are mapped: only what is read uses memory.
#[derive(Debug)]
pub struct Dataset {
    dir: PathBuf,
    manifest: Manifest,
    id: String,
    shards: Vec<Shard>,
    /// Tokens before each shard, and in total.
    tokens_before: Vec<u64>,
    /// Documents or samples that start before each shard, and in total.
    samples_before: Vec<u64>,
}

impl Dataset {
    /// Opens a dataset: checks the manifest, and headers, sizes and indices of all shards, but not all
    /// of their bytes.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(dir: &Path) -> Result<Dataset, DataError> {
        let (manifest, id) = Manifest::read(dir)?;
        let dataset = Dataset::with_manifest(dir, manifest, id)?;
        dataset.check_held_out()?;
        Ok(dataset)
    }

    pub(crate) fn with_manifest(
        dir: &Path,
        manifest: Manifest,
        id: String,
    ) -> Result<Dataset, DataError> {
        let damaged = |problem: &str| DataError::damaged(dir, problem);
        if !manifest.tokenizer.is_sound() {
            return Err(damaged(
                "a special token of its tokenizer, like the end of text, is unknown",
            ));
        }
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
            return Err(damaged("the shards do not add up to what the manifest says"));
        }
        let dir = dir.to_owned();
        Ok(Dataset { dir, manifest, id, shards, tokens_before, samples_before })
    }

    /// The held-out part starts at its sample, or inside a document.
    fn check_held_out(&self) -> Result<(), DataError> {
        let held_out = &self.manifest.held_out;
        let counts = &self.manifest.counts;
        let fits = held_out.from_token <= counts.tokens && held_out.from_sample <= counts.samples;
        let matches = fits
            && match self.manifest.kind {
                Kind::Samples => self.sample_start(held_out.from_sample)? == held_out.from_token,
                Kind::Text => true,
            };
        match matches {
            true => Ok(()),
            false => Err(DataError::damaged(&self.dir, "its held-out part is not inside of it")),
        }
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Identifies the dataset by its content: the same input packed with the same options has the same
    /// id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The tokens of a part.
    pub fn token_range(&self, split: Split) -> Range<u64> {
        let cut = self.manifest.held_out.from_token;
        match split {
            Split::Train => 0..cut,
            Split::Held => cut..self.manifest.counts.tokens,
        }
    }

    /// The samples of a part; for text, the documents that start in it.
    pub fn sample_range(&self, split: Split) -> Range<u64> {
        let cut = self.manifest.held_out.from_sample;
        match split {
            Split::Train => 0..cut,
            Split::Held => cut..self.manifest.counts.samples,
        }
    }

    /// Reads every byte and compares it with its checksum, including the tokenizer's copy.
    ///
    /// # Errors
    /// Names the first file that is damaged, and where.
    pub fn verify(&self, progress: &(dyn Fn(VerifyProgress) + Sync)) -> Result<(), DataError> {
        let bytes_total = self.shards.iter().map(Shard::verified_bytes).sum();
        let bytes_done = AtomicU64::new(0);
        let done = |bytes: u64| {
            let bytes_done = bytes_done.fetch_add(bytes, Ordering::Relaxed) + bytes;
            progress(VerifyProgress { bytes_done, bytes_total });
        };
        self.shards.iter().try_for_each(|shard| shard.verify(&done))?;
        self.tokenizer_json()?;
        Ok(())
    }

    /// The copy of tokenizer.json, checked against its checksum; none for the byte tokenizer.
    ///
    /// # Errors
    /// If it is missing, or not the one that produced the tokens.
    pub fn tokenizer_json(&self) -> Result<Option<Vec<u8>>, DataError> {
        let Some(sha256) = &self.manifest.tokenizer.sha256 else { return Ok(None) };
        let path = self.dir.join(TOKENIZER);
        let bytes = read_file(&path, TOKENIZER_BYTES_MAX)?;
        match sha256_hex(&bytes) == *sha256 {
            true => Ok(Some(bytes)),
            false => Err(DataError::damaged(&path, "it is not the tokenizer that made the tokens")),
        }
    }

    /// Copies token ids, starting at token `start`. `bytes` is a buffer for their stored form.
    ///
    /// # Errors
    /// If there are fewer, or a shard is damaged.
    pub fn read_tokens(
        &self,
        start: u64,
        dest: &mut [i32],
        bytes: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        self.check_range(start, dest.len())?;
        let (mut start, mut dest) = (start, dest);
        while !dest.is_empty() {
            let (shard, at, count) = self.place(start, dest.len());
            let (now, later) = dest.split_at_mut(count);
            shard.read_tokens(at, now, bytes)?;
            (start, dest) = (start + count as u64, later);
        }
        Ok(())
    }

    /// Copies the loss masks of tokens, starting at token `start`: whether each is learned. In text,
    /// all are.
    ///
    /// # Errors
    /// If there are fewer, or a shard is damaged.
    pub fn read_mask(
        &self,
        start: u64,
        dest: &mut [bool],
        bytes: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        self.check_range(start, dest.len())?;
        if self.manifest.kind == Kind::Text {
            dest.fill(true);
            return Ok(());
        }
        let (mut start, mut dest) = (start, dest);
        while !dest.is_empty() {
            let (shard, at, count) = self.place(start, dest.len());
            let (now, later) = dest.split_at_mut(count);
            shard.read_mask(at, now, bytes)?;
            (start, dest) = (start + count as u64, later);
        }
        Ok(())
    }

    /// Asks the system to prefetch tokens.
    pub(crate) fn will_need(&self, start: u64, count: usize) {
        let (mut start, mut left) = (start, count);
        while left > 0 && start < self.manifest.counts.tokens {
            let (shard, at, count) = self.place(start, left);
            shard.will_need(at, count as u64);
            (start, left) = (start + count as u64, left - count);
        }
    }

    /// The tokens of a document or sample.
    ///
    /// # Errors
    /// If there is no such number, or the index cannot be read.
    pub fn sample(&self, number: u64) -> Result<Range<u64>, DataError> {
        if number >= self.manifest.counts.samples {
            let count = self.manifest.counts.samples;
            let problem = format!("there is no sample {number}, it has {count}");
            return Err(DataError::Option { option: "sample", problem });
        }
        let mut starts = [0; 2];
        self.sample_starts(number, &mut starts)?;
        // The index was checked, but a file may change at any time.
        match starts[0] < starts[1] && starts[1] <= self.manifest.counts.tokens {
            true => Ok(starts[0]..starts[1]),
            false => Err(DataError::damaged(&self.dir, "an index changed while it was in use")),
        }
    }

    /// Where a document or sample starts; after the last one, the end of the data.
    pub(crate) fn sample_start(&self, number: u64) -> Result<u64, DataError> {
        let mut start = [0];
        self.sample_starts(number, &mut start)?;
        Ok(start[0])
    }

    /// Where documents or samples start, from number `first` on; after the last one, the end of the
    /// data.
    pub(crate) fn sample_starts(&self, first: u64, dest: &mut [u64]) -> Result<(), DataError> {
        let (mut first, mut dest) = (first, dest);
        while !dest.is_empty() {
            if first >= self.manifest.counts.samples {
                dest.fill(self.manifest.counts.tokens);
                break;
            }
            // The last shard that starts at or before it: earlier ones may be empty.
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

    fn check_range(&self, start: u64, count: usize) -> Result<(), DataError> {
        let tokens = self.manifest.counts.tokens;
        if start.checked_add(count as u64).is_none_or(|end| end > tokens) {
            let problem = format!("there are no {count} tokens at {start}, it has {tokens}");
            return Err(DataError::Option { option: "tokens", problem });
        }
        Ok(())
    }

    /// The shard of an existing token, the token's place in it, and how many of `count` tokens are
    /// there.
    fn place(&self, token: u64, count: usize) -> (&Shard, u64, usize) {
        let number = self.tokens_before.partition_point(|&before| before <= token) - 1;
        let at = token - self.tokens_before[number];
        let here = self.shards[number].token_count() - at;
        (&self.shards[number], at, here.min(count as u64) as usize)
    }
}
