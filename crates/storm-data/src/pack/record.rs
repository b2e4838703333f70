//! A line of JSONL.

use crate::{DataError, Kind};
use serde::Deserialize;
use std::path::Path;

/// What a record may be.
pub(super) enum Record {
    /// `{"text": …}`
    Text(String),
    /// `{"messages": [{"role": …, "content": …}, …]}`
    Chat(Vec<Message>),
    /// `{"prompt": …, "completion": …}`
    Instruction { prompt: String, completion: String },
}

#[derive(Deserialize)]
pub(super) struct Message {
    pub(super) role: Role,
    pub(super) content: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    System,
    User,
    Assistant,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// All fields that mean something; others are passed over.
#[derive(Deserialize)]
struct Fields {
    text: Option<String>,
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
    completion: Option<String>,
}

impl Record {
    /// A chat if it has messages, an instruction if it has prompt and completion, otherwise text.
    pub(super) fn parse(path: &Path, line: u64, json: &str) -> Result<Record, DataError> {
        let bad = |problem: String| DataError::Record { path: path.to_owned(), line, problem };
        let fields: Fields = serde_json::from_str(json).map_err(|error| bad(error.to_string()))?;
        match fields {
            Fields { messages: Some(messages), .. } => Ok(Record::Chat(messages)),
            Fields { prompt: Some(prompt), completion: Some(completion), .. } => {
                Ok(Record::Instruction { prompt, completion })
            }
            Fields { text: Some(text), .. } => Ok(Record::Text(text)),
            _ => Err(bad(
                "has neither `text`, nor `messages`, nor `prompt` and `completion`".to_owned()
            )),
        }
    }

    pub(super) fn kind(&self) -> Kind {
        match self {
            Record::Text(_) => Kind::Text,
            Record::Chat(_) | Record::Instruction { .. } => Kind::Samples,
        }
    }
}
