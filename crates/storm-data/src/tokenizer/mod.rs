//! Converts text to token ids and back.
//!
//! There are two kinds: bytes, and Hugging Face's `tokenizer.json`. The crate that reads the latter
//! runs in a worker process.

mod bytes;
pub(crate) mod chat;
mod client;
mod conversation;
mod info;
mod protocol;
mod stream;
pub(crate) mod worker;

pub use chat::ChatTemplate;
pub use conversation::{ChatMessage, ChatTokenizer};
pub use info::{ChatTokens, TokenizerInfo, TokenizerKind, TokenizerSource};
pub use stream::DecodeStream;

use crate::manifest::{TOKENIZER, TOKENIZER_BYTES_MAX, read_file};
use crate::{DataError, Dataset, WorkerCommand};
use chat::ChatSetup;
pub(crate) use client::EncodedChat;
use client::Worker;
use protocol::Ask;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Mutex;

/// How special tokens that are spelled out in text are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpecialTokens {
    /// As tokens, like `transformers`.
    Parsed,
    /// As text.
    AsText,
}

/// What a worker process serves.
pub(crate) struct Served<'a> {
    /// The tokenizer's path, for messages.
    pub(crate) path: &'a Path,
    /// The contents of `tokenizer.json`. `None` for bytes.
    pub(crate) json: Option<&'a [u8]>,
    pub(crate) end_of_text: Option<&'a str>,
    pub(crate) chat: Option<&'a ChatSetup>,
}

/// Converts between text and token ids.
#[derive(Debug)]
pub struct Tokenizer {
    info: TokenizerInfo,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Bytes,
    Worker(Mutex<Worker>),
}

impl Tokenizer {
    /// The byte tokenizer: 256 bytes, followed by an end-of-text token.
    pub fn bytes() -> Tokenizer {
        Tokenizer { info: bytes::info(), backend: Backend::Bytes }
    }

    /// Opens a tokenizer. `end_of_text` names the token between documents if it is not a common
    /// one.
    ///
    /// # Errors
    /// If the file cannot be used, or has no such token.
    pub fn open(
        source: &TokenizerSource,
        end_of_text: Option<&str>,
        worker: &WorkerCommand,
    ) -> Result<Tokenizer, DataError> {
        match source {
            TokenizerSource::Bytes if end_of_text.is_none() => Ok(Tokenizer::bytes()),
            TokenizerSource::Bytes => Err(DataError::Option {
                option: "end of text",
                problem: "the tokenizer of bytes has its own, number 256".to_owned(),
            }),
            TokenizerSource::File(path) => {
                let json = read_file(path, TOKENIZER_BYTES_MAX)?;
                Tokenizer::from_json(path, &json, end_of_text, worker)
            }
        }
    }

    /// The tokenizer of a dataset, from the copy in its directory.
    ///
    /// # Errors
    /// If the copy is damaged or cannot be used.
    pub fn of_dataset(dataset: &Dataset, worker: &WorkerCommand) -> Result<Tokenizer, DataError> {
        let path = dataset.dir().join(TOKENIZER);
        if dataset.manifest().tokenizer.is_unknown() {
            let problem = "the dataset does not say which one made it".to_owned();
            return Err(DataError::Tokenizer { path, problem });
        }
        let Some(json) = dataset.tokenizer_json()? else { return Ok(Tokenizer::bytes()) };
        let mut tokenizer = Tokenizer::from_json(&path, &json, None, worker)?;
        // The end of text may have been chosen by name.
        tokenizer.info.clone_from(&dataset.manifest().tokenizer);
        Ok(tokenizer)
    }

    pub(crate) fn from_json(
        path: &Path,
        json: &[u8],
        end_of_text: Option<&str>,
        worker: &WorkerCommand,
    ) -> Result<Tokenizer, DataError> {
        let served = Served { path, json: Some(json), end_of_text, chat: None };
        Tokenizer::served(&served, worker)
    }

    /// A tokenizer in a separate process, which may also render chats.
    pub(crate) fn served(
        served: &Served<'_>,
        worker: &WorkerCommand,
    ) -> Result<Tokenizer, DataError> {
        let (worker, info) = Worker::start(served, worker)?;
        Ok(Tokenizer { info, backend: Backend::Worker(Mutex::new(worker)) })
    }

    /// Its properties.
    pub fn info(&self) -> &TokenizerInfo {
        &self.info
    }

    /// Encodes a text. Special tokens written in it are ordinary text.
    ///
    /// # Errors
    /// If the tokenizer fails on it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(self.encode_all(&[text], SpecialTokens::AsText)?.pop().unwrap_or_default())
    }

    /// Encodes texts separately, without special tokens around them.
    ///
    /// # Errors
    /// If the tokenizer fails on one of them.
    pub fn encode_all(
        &self,
        texts: &[&str],
        special_tokens: SpecialTokens,
    ) -> Result<Vec<Vec<u32>>, DataError> {
        let ask = match special_tokens {
            SpecialTokens::Parsed => Ask::EncodeParsed,
            SpecialTokens::AsText => Ask::EncodeText,
        };
        self.encode_as(ask, texts)
    }

    /// Encodes a text as `transformers` does by default: special tokens written in it are tokens,
    /// and the tokenizer adds its own around it.
    ///
    /// # Errors
    /// If the tokenizer fails on it.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(self.encode_as(Ask::EncodePrompt, &[text])?.pop().unwrap_or_default())
    }

    fn encode_as(&self, ask: Ask, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        match &self.backend {
            Backend::Bytes => Ok(texts.iter().map(|text| bytes::encode(text)).collect()),
            Backend::Worker(worker) => lock(worker).encode(ask, texts, self.info.vocabulary),
        }
    }

    /// Renders and encodes a chat given as JSON. The inner error concerns this chat alone.
    pub(crate) fn chat(&self, json: &[u8]) -> Result<Result<EncodedChat, String>, DataError> {
        match &self.backend {
            Backend::Bytes => Ok(Err("no process was started that renders chats".to_owned())),
            Backend::Worker(worker) => lock(worker).chat(json, self.info.vocabulary),
        }
    }

    /// Decodes ids. Special tokens are written out. Invalid UTF-8 is replaced.
    ///
    /// # Errors
    /// If the tokenizer fails on them.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        match &self.backend {
            Backend::Bytes => Ok(bytes::decode(ids)),
            Backend::Worker(worker) => lock(worker).decode(ids),
        }
    }

    /// Decodes ids one by one.
    pub fn stream(&self) -> DecodeStream<'_> {
        DecodeStream::new(self, &[])
    }

    /// Decodes ids one by one as a continuation of `before`, so that a space between them is kept.
    pub fn stream_after(&self, before: &[u32]) -> DecodeStream<'_> {
        DecodeStream::new(self, before)
    }
}

/// A poisoned lock is usable, because the worker reports its own failures.
fn lock(worker: &Mutex<Worker>) -> std::sync::MutexGuard<'_, Worker> {
    worker.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
