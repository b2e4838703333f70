//! An open dataset of tokens.

mod mapped;
mod tokens;

use crate::manifest::{Manifest, TOKENIZER, TOKENIZER_BYTES_MAX, read_file, sha256_hex};
use crate::records::{Reading, RecordSet};
use crate::{DataError, Kind, Split};
use mapped::MappedShards;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
pub(crate) use tokens::{TokenFormat, TokenStreams, starts_writer};

/// The error for starts that are not increasing, or are past the last token.
pub(crate) const INDEX_OUT_OF_ORDER: &str = "its index is out of order";

/// Progress of [`Dataset::verify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Bytes checked.
    pub bytes_done: u64,
    /// Bytes to check.
    pub bytes_total: u64,
}

/// A directory that [`crate::pack`] wrote. It is read on demand, not loaded into memory.
#[derive(Debug)]
pub struct Dataset {
    dir: PathBuf,
    manifest: Manifest,
    id: String,
    store: Store,
}

/// Where the tokens are.
#[derive(Debug)]
enum Store {
    /// In mapped files: version 1.
    Mapped(MappedShards),
    /// In blocks: version 2.
    Streams(Box<TokenStreams>),
}

impl Dataset {
    /// Opens a dataset. Checks the manifest, and the headers, sizes and indices of all shards, but
    /// does not read all of their bytes.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(dir: &Path) -> Result<Dataset, DataError> {
        Dataset::open_with(dir, Reading::from_environment()?)
    }

    /// As [`Dataset::open`], with no faster read method than the given one. Datasets of version 1
    /// are always mapped.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub fn open_with(dir: &Path, reading: Reading) -> Result<Dataset, DataError> {
        let (manifest, id) = Manifest::read(dir)?;
        let dataset = Dataset::with_manifest(dir, manifest, id, reading)?;
        dataset.check_held_out()?;
        Ok(dataset)
    }

    pub(crate) fn with_manifest(
        dir: &Path,
        manifest: Manifest,
        id: String,
        reading: Reading,
    ) -> Result<Dataset, DataError> {
        if !manifest.tokenizer.is_sound() {
            let problem = "a special token of its tokenizer, like the end of text, is unknown";
            return Err(DataError::damaged(dir, problem));
        }
        let store = match &manifest.stored {
            None => Store::Mapped(MappedShards::open(dir, &manifest)?),
            Some(stored) => {
                let streams = TokenStreams::open(dir, &manifest, stored, reading)?;
                Store::Streams(Box::new(streams))
            }
        };
        Ok(Dataset { dir: dir.to_owned(), manifest, id, store })
    }

    /// Checks that the held-out part lies inside the data, and for samples starts with one.
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

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A hash of its contents: the same input packed with the same options has the same id.
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

    /// The samples of a part. For text, the documents that start in it.
    pub fn sample_range(&self, split: Split) -> Range<u64> {
        let cut = self.manifest.held_out.from_sample;
        match split {
            Split::Train => 0..cut,
            Split::Held => cut..self.manifest.counts.samples,
        }
    }

    /// Its streams. `None` if it is mapped.
    pub(crate) fn streams(&self) -> Option<&TokenStreams> {
        match &self.store {
            Store::Mapped(_) => None,
            Store::Streams(streams) => Some(streams),
        }
    }

    /// The blocks of its tokens. `None` for version 1, which has no blocks.
    pub fn token_blocks(&self) -> Option<&Arc<RecordSet>> {
        self.streams().map(TokenStreams::set)
    }

    /// Reads every byte and verifies its checksum, including the copy of the tokenizer.
    ///
    /// # Errors
    /// Names the first file that is damaged, and where.
    pub fn verify(&self, progress: &(dyn Fn(VerifyProgress) + Sync)) -> Result<(), DataError> {
        match &self.store {
            Store::Mapped(shards) => shards.verify(progress)?,
            Store::Streams(streams) => streams.verify(progress)?,
        }
        self.tokenizer_json()?;
        Ok(())
    }

    /// The copy of tokenizer.json, verified against its checksum. `None` for the byte tokenizer.
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
        match &self.store {
            Store::Mapped(shards) => shards.read_tokens(start, dest, bytes),
            Store::Streams(streams) => streams.read_tokens(start, dest),
        }
    }

    /// Copies the loss mask of tokens, starting at token `start`: whether each counts in the loss.
    /// In text, all do.
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
        match &self.store {
            Store::Mapped(shards) => shards.read_mask(start, dest, bytes),
            Store::Streams(streams) => streams.read_mask(start, dest),
        }
    }

    /// Asks the system to prefetch tokens, if the files are mapped.
    pub(crate) fn will_need(&self, tokens: Range<u64>) {
        if let Store::Mapped(shards) = &self.store {
            shards.will_need(tokens.start, tokens.end.min(self.manifest.counts.tokens));
        }
    }

    /// The tokens of a document or sample.
    ///
    /// # Errors
    /// If there is no such sample, or the index cannot be read.
    pub fn sample(&self, number: u64) -> Result<Range<u64>, DataError> {
        if number >= self.manifest.counts.samples {
            let count = self.manifest.counts.samples;
            let problem = format!("there is no sample {number}, it has {count}");
            return Err(DataError::Option { option: "sample", problem });
        }
        let mut starts = [0; 2];
        self.sample_starts(number, &mut starts)?;
        match starts[0] < starts[1] && starts[1] <= self.manifest.counts.tokens {
            true => Ok(starts[0]..starts[1]),
            false => Err(DataError::damaged(&self.dir, INDEX_OUT_OF_ORDER)),
        }
    }

    /// The first token of a document or sample. Past the last one, the end of the data.
    pub(crate) fn sample_start(&self, number: u64) -> Result<u64, DataError> {
        let mut start = [0];
        self.sample_starts(number, &mut start)?;
        Ok(start[0])
    }

    /// The first tokens of documents or samples from number `first` on. Past the last one, the end
    /// of the data.
    pub(crate) fn sample_starts(&self, first: u64, dest: &mut [u64]) -> Result<(), DataError> {
        let counts = &self.manifest.counts;
        let known = counts.samples.saturating_sub(first).min(dest.len() as u64);
        let (starts, past) = dest.split_at_mut(known as usize);
        past.fill(counts.tokens);
        match &self.store {
            Store::Mapped(shards) => shards.read_starts(first, starts),
            Store::Streams(streams) => streams.read_starts(first, starts),
        }
    }

    fn check_range(&self, start: u64, count: usize) -> Result<(), DataError> {
        let tokens = self.manifest.counts.tokens;
        if start.checked_add(count as u64).is_none_or(|end| end > tokens) {
            let problem = format!("there are no {count} tokens at {start}, it has {tokens}");
            return Err(DataError::Option { option: "tokens", problem });
        }
        Ok(())
    }
}
