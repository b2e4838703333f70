//! Renders chats into prompts for a model to answer.

use super::chat::ChatTemplate;
use super::client::Prompted;
use super::{Backend, Served, SpecialTokens, Tokenizer, TokenizerSource, lock};
use crate::manifest::{TOKENIZER_BYTES_MAX, read_file};
use crate::{DataError, WorkerCommand};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, …
    pub role: String,
    /// Its text.
    pub content: String,
}

impl ChatMessage {
    /// A message of a role.
    pub fn new(role: &str, content: &str) -> ChatMessage {
        ChatMessage { role: role.to_owned(), content: content.to_owned() }
    }
}

/// A tokenizer that renders chats and knows which tokens end an answer.
#[derive(Debug)]
pub struct ChatTokenizer {
    tokenizer: Tokenizer,
    path: std::path::PathBuf,
    ends: Vec<u32>,
    line_ends: bool,
}

/// The request to the process.
#[derive(Serialize)]
struct Chat<'a> {
    messages: &'a [ChatMessage],
}

impl ChatTokenizer {
    /// Opens a tokenizer with a template for chats.
    ///
    /// # Errors
    /// The file cannot be used, or there is no template.
    pub fn open(
        source: &TokenizerSource,
        template: &ChatTemplate,
        worker: &WorkerCommand,
    ) -> Result<ChatTokenizer, DataError> {
        let setup = template.read(source, SpecialTokens::Parsed)?;
        let (path, json) = match source {
            TokenizerSource::Bytes => (Path::new("bytes"), None),
            TokenizerSource::File(path) => (&**path, Some(read_file(path, TOKENIZER_BYTES_MAX)?)),
        };
        let served = Served { path, json: json.as_deref(), end_of_text: None, chat: Some(&setup) };
        let tokenizer = Tokenizer::served(&served, worker)?;
        let line_ends = *template == ChatTemplate::Plain;
        let path = path.to_owned();
        let mut chats = ChatTokenizer { tokenizer, path, ends: Vec::new(), line_ends };
        chats.ends = chats.find_ends(setup.special.get("eos_token"))?;
        Ok(chats)
    }

    /// The tokenizer itself.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tokens that end an answer: the tokenizer's end of text, and the token that the template
    /// writes after an answer.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Whether a line break ends an answer.
    pub fn line_ends(&self) -> bool {
        self.line_ends
    }

    /// The tokens of a chat up to the point where the assistant answers, as from
    /// `apply_chat_template` of `transformers` with `add_generation_prompt`.
    ///
    /// # Errors
    /// The template rejects the chat, or the tokenizer fails on it.
    pub fn prompt(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, DataError> {
        let json = self.json(messages)?;
        let Backend::Worker(worker) = &self.tokenizer.backend else {
            return Err(self.refuse("no process was started that renders chats".to_owned()));
        };
        match lock(worker).chat_prompt(&json, self.tokenizer.info.vocabulary)? {
            Prompted::Tokens(tokens) => Ok(tokens),
            Prompted::Refused(problem) => Err(self.refuse(problem)),
        }
    }

    fn find_ends(&self, eos: Option<&String>) -> Result<Vec<u32>, DataError> {
        let mut ends: Vec<u32> = self.tokenizer.info.end_of_text.into_iter().collect();
        if let Some(eos) = eos {
            let ids = self.tokenizer.encode_all(&[eos], SpecialTokens::Parsed)?.pop();
            if let Some([id]) = ids.as_deref() {
                ends.push(*id);
            }
        }
        let chat = [ChatMessage::new("user", "a"), ChatMessage::new("assistant", "b")];
        // A template whose answers cannot be located can still render prompts.
        let Ok(answered) = self.tokenizer.chat(&self.json(&chat)?)? else { return Ok(ends) };
        let learned =
            answered.tokens.iter().zip(&answered.learned).filter(|(_, learned)| **learned);
        if let Some(last) = learned.map(|(&id, _)| id).next_back()
            && self.is_special(last)?
        {
            ends.push(last);
        }
        Ok(ends)
    }

    /// Whether a token is special, not just its text.
    fn is_special(&self, id: u32) -> Result<bool, DataError> {
        // Tested inside a word, because some vocabularies also contain special tokens as words.
        let text = format!("a{}a", self.tokenizer.decode(&[id])?);
        let has = |special: SpecialTokens| -> Result<bool, DataError> {
            let ids = self.tokenizer.encode_all(&[&text], special)?;
            Ok(ids.iter().flatten().any(|&found| found == id))
        };
        Ok(has(SpecialTokens::Parsed)? && !has(SpecialTokens::AsText)?)
    }

    fn json(&self, messages: &[ChatMessage]) -> Result<Vec<u8>, DataError> {
        serde_json::to_vec(&Chat { messages }).map_err(|error| self.refuse(error.to_string()))
    }

    fn refuse(&self, problem: String) -> DataError {
        DataError::Chat { path: self.path.clone(), problem }
    }
}
