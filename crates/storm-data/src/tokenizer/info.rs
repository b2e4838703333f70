use crate::DataError;
use crate::manifest::{TOKENIZER_BYTES_MAX, read_file, sha256_hex};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// Sanity limit: the embedding of a larger vocabulary would not fit on a GPU.
pub(super) const VOCABULARY_MAX: u32 = 1 << 28;

/// The type of a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenizerKind {
    /// Every byte is a token.
    Bytes,
    /// A `tokenizer.json`.
    HuggingFace,
}

/// The tokens around a message in ChatML.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatTokens {
    /// `<|im_start|>`.
    pub start: u32,
    /// `<|im_end|>`.
    pub end: u32,
}

/// Properties of a tokenizer, stored with the data that it encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerInfo {
    /// Its type.
    pub kind: TokenizerKind,
    /// All ids are below this.
    pub vocabulary: u32,
    /// The token between documents.
    pub end_of_text: Option<u32>,
    /// The token before each document, if the tokenizer uses one.
    pub begin_of_text: Option<u32>,
    /// The ChatML tokens, if the tokenizer has them.
    pub chat: Option<ChatTokens>,
    /// SHA-256 of `tokenizer.json`. Without it, the tokenizer cannot be identified.
    pub sha256: Option<String>,
}

impl TokenizerInfo {
    /// Whether it is unknown which `tokenizer.json` this was.
    pub fn is_unknown(&self) -> bool {
        self.kind == TokenizerKind::HuggingFace && self.sha256.is_none()
    }

    /// Whether its special tokens are in its vocabulary, and the vocabulary has a plausible size.
    pub(crate) fn is_sound(&self) -> bool {
        let chat = self.chat.iter().flat_map(|chat| [chat.start, chat.end]);
        let mut special = self.end_of_text.into_iter().chain(self.begin_of_text).chain(chat);
        self.vocabulary <= VOCABULARY_MAX && special.all(|id| id < self.vocabulary)
    }
}

/// Where a tokenizer comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Every byte is a token.
    Bytes,
    /// A `tokenizer.json`.
    File(PathBuf),
}

impl TokenizerSource {
    /// `bytes`, the path of a `tokenizer.json`, or a folder with one.
    pub fn parse(text: &str) -> TokenizerSource {
        let path = Path::new(text);
        match text {
            "bytes" => TokenizerSource::Bytes,
            _ if path.is_dir() => TokenizerSource::File(path.join("tokenizer.json")),
            _ => TokenizerSource::File(path.to_owned()),
        }
    }

    /// SHA-256 of `tokenizer.json`, as in datasets. `None` for the byte tokenizer.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn sha256(&self) -> Result<Option<String>, DataError> {
        match self {
            TokenizerSource::Bytes => Ok(None),
            TokenizerSource::File(path) => {
                Ok(Some(sha256_hex(&read_file(path, TOKENIZER_BYTES_MAX)?)))
            }
        }
    }
}

/// In the form that [`TokenizerSource::parse`] accepts.
impl fmt::Display for TokenizerSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenizerSource::Bytes => f.write_str("bytes"),
            TokenizerSource::File(path) => path.display().fmt(f),
        }
    }
}
