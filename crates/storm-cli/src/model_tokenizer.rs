//! Finds a model's tokenizer, and checks that data was made with it.

use crate::UsageError;
use anyhow::Result;
use std::path::{Path, PathBuf};
use storm_data::{DataError, Dataset, TokenizerKind, TokenizerSource};

/// All bytes, and an end-of-text token.
pub(crate) const BYTE_VOCABULARY: usize = 257;

/// Hash digits shown in messages.
const SHOWN_DIGITS: usize = 12;

/// The path of the tokenizer in a model's directory.
pub(crate) fn file(directory: &Path) -> PathBuf {
    directory.join("tokenizer.json")
}

/// The tokenizer of a model directory. Without a file, a model with 257 tokens uses bytes.
pub(crate) fn own(directory: &Path, vocabulary: usize) -> Option<TokenizerSource> {
    let file = file(directory);
    match vocabulary {
        _ if file.exists() => Some(TokenizerSource::File(file)),
        BYTE_VOCABULARY => Some(TokenizerSource::Bytes),
        _ => None,
    }
}

/// [`own`], or an error that names the option to use.
pub(crate) fn needed(directory: &Path, vocabulary: usize) -> Result<TokenizerSource, UsageError> {
    own(directory, vocabulary).ok_or_else(|| {
        let directory = directory.display();
        UsageError(format!("{directory} has no tokenizer.json: give --tokenizer, the path of one"))
    })
}

/// What to do with data made by another tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherTokenizer {
    Refused,
    Allowed,
}

impl OtherTokenizer {
    pub(crate) fn of_switch(allowed: bool) -> OtherTokenizer {
        if allowed { OtherTokenizer::Allowed } else { OtherTokenizer::Refused }
    }
}

/// What identifies a tokenizer in comparisons.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Identity {
    Bytes,
    Json { sha256: String },
    Unknown,
}

impl Identity {
    fn of_source(source: Option<&TokenizerSource>) -> Result<Identity, DataError> {
        Ok(match source {
            Some(TokenizerSource::Bytes) => Identity::Bytes,
            Some(source @ TokenizerSource::File(_)) => match source.sha256()? {
                Some(sha256) => Identity::Json { sha256 },
                None => Identity::Unknown,
            },
            None => Identity::Unknown,
        })
    }

    fn of_dataset(dataset: &Dataset) -> Identity {
        let info = &dataset.manifest().tokenizer;
        match (info.kind, &info.sha256) {
            (TokenizerKind::Bytes, _) => Identity::Bytes,
            (TokenizerKind::HuggingFace, Some(sha256)) => Identity::Json { sha256: sha256.clone() },
            (TokenizerKind::HuggingFace, None) => Identity::Unknown,
        }
    }

    fn words(&self) -> String {
        match self {
            Identity::Bytes => "the tokenizer of bytes".to_owned(),
            Identity::Json { sha256 } => {
                let shown: String = sha256.chars().take(SHOWN_DIGITS).collect();
                format!("a tokenizer.json with SHA-256 {shown}…")
            }
            Identity::Unknown => "an unknown tokenizer".to_owned(),
        }
    }
}

/// A model directory, whose weights belong to one tokenizer.
pub(crate) struct Weights<'a> {
    pub(crate) directory: &'a Path,
    pub(crate) vocabulary: usize,
}

impl Weights<'_> {
    /// Refuses to pack text with a tokenizer other than the model's.
    pub(crate) fn check_source(
        &self,
        source: &TokenizerSource,
        other: OtherTokenizer,
    ) -> Result<()> {
        self.check(&Identity::of_source(Some(source))?, "the text is to be packed with", other)
    }

    /// Refuses a dataset made with a tokenizer other than the model's.
    pub(crate) fn check_dataset(&self, dataset: &Dataset, other: OtherTokenizer) -> Result<()> {
        let made = format!("{} was made with", dataset.dir().display());
        self.check(&Identity::of_dataset(dataset), &made, other)
    }

    fn check(&self, data: &Identity, made: &str, other: OtherTokenizer) -> Result<()> {
        if other == OtherTokenizer::Allowed {
            return Ok(());
        }
        let directory = self.directory.display();
        let own = Identity::of_source(own(self.directory, self.vocabulary).as_ref())?;
        let unknown = [data, &own].contains(&&Identity::Unknown);
        if unknown {
            eprintln!(
                "warning: {made} {}, and {directory} has {}: STORM cannot check whether they are the same",
                data.words(),
                own.words()
            );
        }
        if unknown || *data == own {
            return Ok(());
        }
        Err(UsageError(format!(
            "{made} {}, and {directory} has {}: the tokens would not mean what the model learned. Pack the data with \
             --tokenizer {directory}, or give --other-tokenizer to use it anyway",
            data.words(),
            own.words()
        ))
        .into())
    }
}
