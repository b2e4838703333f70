//! Synthetic text, for tests at scale.

use super::encode::Chunk;
use super::output::Output;
use super::{IfExists, PackProgress};
use crate::manifest::Manifest;
use crate::records::Codec;
use crate::{DataError, Kind, Tokenizer};
use std::path::PathBuf;
use storm_files::StagedDirectory;
use storm_graph::random::Random;

/// Distinct words. As in natural language, a few of them make up most of the text.
const WORDS: usize = 4096;
/// Words per document.
const DOCUMENT_WORDS: usize = 1000;

/// Text of random words in which every byte is a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticText {
    /// Minimum number of tokens.
    pub tokens: u64,
    /// The directory to create.
    pub out: PathBuf,
    /// How blocks are compressed.
    pub codec: Codec,
}

/// Creates a dataset of synthetic text. The same options give the same bytes.
///
/// # Errors
/// The directory exists or cannot be written.
pub fn pack_synthetic_text(
    options: &SyntheticText,
    progress: &dyn Fn(PackProgress),
) -> Result<(), DataError> {
    let SyntheticText { tokens: wanted, out, codec } = options;
    let may_replace = |dir: &std::path::Path| IfExists::Refuse.may_replace(dir);
    let staged =
        StagedDirectory::create(out, "packing", may_replace).map_err(DataError::stage(out))?;
    let info = Tokenizer::bytes().info().clone();
    let shard_tokens = super::SHARD_TOKENS_DEFAULT;
    let mut output = Output::new(staged.path(), Kind::Text, info.vocabulary, *codec, shard_tokens)?;
    let mut random = Random(1);
    let words: Vec<Vec<u32>> = (0..WORDS).map(|_| word(&mut random)).collect();
    while output.counts().tokens < *wanted {
        let mut tokens = Vec::new();
        for _ in 0..DOCUMENT_WORDS {
            let share = random.below(1 << 20) as f64 / f64::from(1 << 20);
            tokens.extend(&words[(share.powi(3) * WORDS as f64) as usize]);
        }
        tokens.extend(info.end_of_text);
        output.push(&[Chunk { tokens, learned: Vec::new(), begins: true, ends: true }])?;
        let (tokens, samples) = (output.counts().tokens, output.counts().samples);
        let bytes_total = Some(*wanted);
        progress(PackProgress { bytes_done: tokens.min(*wanted), bytes_total, tokens, samples });
    }
    let (counts, stored) = output.finish()?;
    Manifest::new(Kind::Text, info, counts, stored).write(staged.path())?;
    staged.finish().map_err(DataError::stage(out))
}

/// A few letters and a space.
fn word(random: &mut Random) -> Vec<u32> {
    let letters = 2 + random.below(8);
    let letter = |_| u32::from(b'a') + random.below(26) as u32;
    (0..letters).map(letter).chain([u32::from(b' ')]).collect()
}
