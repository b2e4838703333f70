//! A line of JSONL.

use crate::{DataError, Kind};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::path::Path;

/// What a record may be.
pub(super) enum Record {
    /// `{"text": …}`
    Text(String),
    /// `{"messages": [{"role": …, "content": …}, …]}`
    Chat(Chat),
    /// `{"prompt": …, "completion": …}`
    Instruction(Instruction),
}

/// A chat as it was written. Only the process that renders it takes it apart: messages take far more memory than
/// their text.
#[derive(Serialize)]
pub(super) struct Chat {
    messages: Box<RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Box<RawValue>>,
}

pub(super) struct Instruction {
    pub(super) prompt: String,
    pub(super) completion: String,
}

/// All fields that have a meaning; others are ignored.
#[derive(Deserialize)]
struct Fields {
    text: Option<String>,
    messages: Option<Box<RawValue>>,
    tools: Option<Box<RawValue>>,
    prompt: Option<String>,
    completion: Option<String>,
}

impl Record {
    /// A chat if it has messages, an instruction if it has prompt and completion, otherwise text.
    pub(super) fn parse(path: &Path, line: u64, json: &str) -> Result<Record, DataError> {
        let bad = |problem: String| DataError::Record { path: path.to_owned(), line, problem };
        let fields: Fields = serde_json::from_str(json).map_err(|error| bad(error.to_string()))?;
        match fields {
            Fields { messages: Some(messages), tools, .. } => {
                Ok(Record::Chat(Chat { messages, tools }))
            }
            Fields { prompt: Some(prompt), completion: Some(completion), .. } => {
                Ok(Record::Instruction(Instruction { prompt, completion }))
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
            Record::Chat(_) | Record::Instruction(_) => Kind::Samples,
        }
    }
}
