//! A line of JSONL.

use crate::{DataError, Kind};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::path::Path;

/// Messages in a record.
const MESSAGES_MAX: usize = 1 << 16;

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
    /// Its name on a line of its own.
    pub(super) fn line(self) -> &'static str {
        match self {
            Role::System => "system\n",
            Role::User => "user\n",
            Role::Assistant => "assistant\n",
        }
    }

    /// Its name before what it says.
    pub(super) fn label(self) -> &'static str {
        match self {
            Role::System => "system:",
            Role::User => "user:",
            Role::Assistant => "assistant:",
        }
    }
}

/// At most [`MESSAGES_MAX`]: a message takes far more memory than its text.
struct Messages(Vec<Message>);

impl<'de> Deserialize<'de> for Messages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Messages, D::Error> {
        deserializer.deserialize_seq(Counting).map(Messages)
    }
}

struct Counting;

impl<'de> Visitor<'de> for Counting {
    type Value = Vec<Message>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Message>, A::Error> {
        let mut messages = Vec::new();
        while let Some(message) = list.next_element()? {
            if messages.len() == MESSAGES_MAX {
                let problem = format!("more than {MESSAGES_MAX} messages in a record; split it");
                return Err(serde::de::Error::custom(problem));
            }
            messages.push(message);
        }
        Ok(messages)
    }
}

/// All fields that mean something; others are passed over.
#[derive(Deserialize)]
struct Fields {
    text: Option<String>,
    messages: Option<Messages>,
    prompt: Option<String>,
    completion: Option<String>,
}

impl Record {
    /// A chat if it has messages, an instruction if it has prompt and completion, otherwise text.
    pub(super) fn parse(path: &Path, line: u64, json: &str) -> Result<Record, DataError> {
        let bad = |problem: String| DataError::Record { path: path.to_owned(), line, problem };
        let fields: Fields = serde_json::from_str(json).map_err(|error| bad(error.to_string()))?;
        match fields {
            Fields { messages: Some(messages), .. } => Ok(Record::Chat(messages.0)),
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
