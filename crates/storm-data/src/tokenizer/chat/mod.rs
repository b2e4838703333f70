//! Chats as text: renders a model's chat template and finds the text that counts in the loss.
//!
//! Runs in the tokenizer's process, because a template is a program that came with a model. The
//! text is the same as `transformers` renders with Jinja2.

mod engine;
mod json;
mod learned;
mod shown;
mod source;
mod strftime;

pub use source::ChatTemplate;
pub(crate) use source::{ChatSetup, Frame};

use super::SpecialTokens;
use engine::{Engine, Then};
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::ops::Range;

/// Limit on messages in a chat. Each needs far more memory than its text.
const MESSAGES_MAX: usize = 1 << 16;

/// Size limit of a rendered chat, which is encoded as a whole.
const TEXT_BYTES_MAX: usize = 16 << 20;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Unicode noncharacters, which no text contains. The marks enclose what a template marks as
/// generated. The probe detects changes.
pub(super) const MARK_BEGIN: char = '\u{fdd0}';
pub(super) const MARK_END: char = '\u{fdd1}';
pub(super) const PROBE: char = '\u{fdd2}';

/// A rendered chat.
#[derive(Debug)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// Byte ranges of the text that count in the loss, in order.
    pub(super) learned: Vec<Range<usize>>,
    /// Whether the last message is the assistant's.
    pub(super) ends_with_answer: bool,
}

/// Added tokens, which a tokenizer matches in a text before all others.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownTokens {
    pub(super) special: Vec<String>,
    /// Added tokens that are not special.
    pub(super) other: Vec<String>,
}

impl KnownTokens {
    /// The position itself, or the start of the token that contains it.
    fn before(&self, text: &str, at: usize) -> usize {
        let begins = |token: &String| {
            let from = text.floor_char_boundary(at.saturating_sub(token.len()));
            let to = text.ceil_char_boundary(text.len().min(at + token.len()));
            let found = text[from..to].match_indices(token.as_str());
            let mut begins = found.map(|(begin, _)| from + begin);
            begins.find(|&begin| begin < at && at < begin + token.len())
        };
        self.special.iter().chain(&self.other).filter_map(begins).min().unwrap_or(at)
    }
}

/// Renders chats with one template.
pub(super) struct Chats {
    engine: Engine,
    known: KnownTokens,
    /// How special tokens in messages are treated.
    special_in_text: SpecialTokens,
}

impl Chats {
    pub(super) fn new(setup: &ChatSetup, known: KnownTokens) -> Result<Chats, String> {
        let special_in_text = setup.special_in_text;
        Ok(Chats { engine: Engine::new(setup)?, known, special_in_text })
    }

    /// Renders the JSON of a chat up to the point where the assistant answers.
    pub(super) fn prompt(&self, json: &[u8]) -> Result<String, String> {
        let chat = self.read(json)?;
        if chat.messages.is_empty() {
            return Err("it has no message".to_owned());
        }
        let render = self.engine.begin();
        let text = render.text(&chat, Then::Answer)?;
        check_length(&text)?;
        // Otherwise the model would answer a different chat.
        shown::check(&render, &chat, &render.text(&chat, Then::Nothing)?)?;
        Ok(text)
    }

    fn read(&self, json: &[u8]) -> Result<Chat, String> {
        let chat: Chat = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let marks = [MARK_BEGIN, MARK_END, PROBE];
        if chat
            .messages
            .iter()
            .chain(&chat.tools)
            .any(|value| holds(value, &|text| text.contains(marks)))
        {
            return Err("it holds U+FDD0, U+FDD1 or U+FDD2, which are no characters".to_owned());
        }
        if self.special_in_text == SpecialTokens::AsText {
            self.refuse_special(&chat)?;
        }
        chat.checked()
    }

    /// Renders the JSON of a chat: its messages, and the tools that they may call.
    pub(super) fn render(&self, json: &[u8]) -> Result<Rendered, String> {
        let chat = self.read(json)?;
        let ends_with_answer = chat.messages.last().is_some_and(|last| role(last) == "assistant");
        if chat.messages.is_empty() {
            return Ok(Rendered { text: String::new(), learned: Vec::new(), ends_with_answer });
        }
        let render = self.engine.begin();
        let (text, marked) = render.whole(&chat)?;
        check_length(&text)?;
        shown::check(&render, &chat, &text)?;
        let learned = match self.engine.marks_answers() {
            true => marked,
            false => learned::by_prefixes(&render, &chat, &text, &self.known)?,
        };
        Ok(Rendered { text, learned, ends_with_answer })
    }
}

fn check_length(text: &str) -> Result<(), String> {
    match text.len() > TEXT_BYTES_MAX {
        true => {
            Err(format!("a chat of {} bytes, more than {TEXT_BYTES_MAX}; split it", text.len()))
        }
        false => Ok(()),
    }
}

impl Chats {
    /// Rejects special tokens in messages. A rendered chat is encoded as a whole, so text of the
    /// template and text of a message cannot be distinguished.
    fn refuse_special(&self, chat: &Chat) -> Result<(), String> {
        let found = self.known.special.iter().find(|token| {
            let has = |text: &str| text.contains(token.as_str());
            chat.messages.iter().chain(&chat.tools).any(|value| holds(value, &has))
        });
        found.map_or(Ok(()), |token| {
            Err(format!(
                "a message holds `{token}`, a special token, which --plain-text makes text; a chat cannot be \
                 rendered so: take it out, or pack without --plain-text"
            ))
        })
    }
}

/// The chat fields of a record.
#[derive(Deserialize)]
pub(super) struct Chat {
    #[serde(deserialize_with = "messages")]
    pub(super) messages: Vec<Value>,
    #[serde(default)]
    pub(super) tools: Option<Value>,
}

impl Chat {
    /// Rejects what no template accepts, and renames reasoning fields as templates expect them.
    fn checked(self) -> Result<Chat, String> {
        let Chat { messages, tools } = self;
        let message = |(number, message): (usize, Value)| {
            check(&message).map_err(|problem| format!("message {}: {problem}", number + 1))?;
            Ok(with_thoughts(message))
        };
        let messages =
            messages.into_iter().enumerate().map(message).collect::<Result<_, String>>()?;
        let tools = tools.filter(|tools| !tools.is_none());
        let is_list = |tools: &Value| tools.kind() == ValueKind::Seq;
        match tools.as_ref().is_none_or(is_list) {
            true => Ok(Chat { messages, tools }),
            false => Err("`tools` is not a list".to_owned()),
        }
    }

    /// The same chat with one message replaced.
    pub(super) fn with(&self, number: usize, message: Value) -> Chat {
        let mut messages = self.messages.clone();
        messages[number] = message;
        Chat { messages, tools: self.tools.clone() }
    }

    /// The first `end` messages of the chat.
    pub(super) fn until(&self, end: usize) -> Chat {
        Chat { messages: self.messages[..end].to_vec(), tools: self.tools.clone() }
    }
}

/// Deserializes at most [`MESSAGES_MAX`] messages.
fn messages<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Value>, D::Error> {
    struct Counting;

    impl<'de> Visitor<'de> for Counting {
        type Value = Vec<Value>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list of messages")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Value>, A::Error> {
            let mut messages = Vec::new();
            while let Some(message) = list.next_element()? {
                if messages.len() == MESSAGES_MAX {
                    let problem =
                        format!("more than {MESSAGES_MAX} messages in a record; split it");
                    return Err(serde::de::Error::custom(problem));
                }
                messages.push(message);
            }
            Ok(messages)
        }
    }

    deserializer.deserialize_seq(Counting)
}

/// A field of a message. `None` if it is absent or null.
pub(super) fn field(message: &Value, name: &str) -> Option<Value> {
    message.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

pub(super) fn role(message: &Value) -> String {
    field(message, "role").map_or_else(String::new, |role| role.to_string())
}

/// The same map with one value replaced or added.
pub(super) fn with_field(map: &Value, name: &str, value: Value) -> Value {
    let keys: Vec<Value> = map.try_iter().map(Iterator::collect).unwrap_or_default();
    let is_new = !keys.iter().any(|key| key.as_str() == Some(name));
    let pairs = keys.into_iter().map(|key| {
        let value = match key.as_str() == Some(name) {
            true => value.clone(),
            false => map.get_item(&key).unwrap_or_default(),
        };
        (key, value)
    });
    let added = is_new.then(|| (Value::from(name), value.clone()));
    Value::from_pairs(pairs.chain(added))
}

fn check(message: &Value) -> Result<(), String> {
    if message.kind() != ValueKind::Map {
        return Err(format!(
            "{} where an object with `role` and `content` should be",
            message.kind()
        ));
    }
    let role = field(message, "role").ok_or("it has no `role`")?;
    let known = role.as_str().is_some_and(|role| ROLES.contains(&role));
    if !known {
        return Err(format!("role `{role}` is unknown; roles are {}", ROLES.join(", ")));
    }
    let is_assistant = role.as_str() == Some("assistant");
    let content = field(message, "content");
    match content.as_ref().map(Value::kind) {
        None if is_assistant && field(message, "tool_calls").is_some() => {}
        None => return Err("it has no `content`".to_owned()),
        Some(ValueKind::String) => {}
        Some(ValueKind::Seq) => content.iter().try_for_each(check_parts)?,
        // Templates print the result of a tool as JSON.
        Some(ValueKind::Map) if role.as_str() == Some("tool") => {}
        Some(kind) => return Err(format!("its `content` is a {kind}, and must be a text")),
    }
    if field(message, "tool_calls").is_some() && !is_assistant {
        return Err(format!("`tool_calls` of role `{role}`; only the assistant calls tools"));
    }
    Ok(())
}

fn check_parts(parts: &Value) -> Result<(), String> {
    for part in parts.try_iter().map_err(|error| error.to_string())? {
        let kind =
            field(&part, "type").map_or_else(|| "unknown".to_owned(), |kind| kind.to_string());
        let is_text = field(&part, "text").is_some_and(|text| text.kind() == ValueKind::String);
        if kind != "text" || !is_text {
            return Err(format!("a content part of type `{kind}`; models here read text alone"));
        }
    }
    Ok(())
}

/// Reasoning has several field names. `transformers` passes it to templates under two.
fn with_thoughts(message: Value) -> Value {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let Some(thoughts) = names.iter().find_map(|name| field(&message, name)) else {
        return message;
    };
    let has_other = !message.get_attr("thinking").unwrap_or_default().is_undefined();
    let message = match has_other {
        true => message,
        false => with_field(&message, "thinking", thoughts.clone()),
    };
    with_field(&message, "reasoning_content", thoughts)
}

/// Whether any text inside a value satisfies `is`.
fn holds(value: &Value, is: &dyn Fn(&str) -> bool) -> bool {
    match value.kind() {
        ValueKind::String => value.as_str().is_some_and(is),
        ValueKind::Seq => {
            value.try_iter().is_ok_and(|mut items| items.any(|item| holds(&item, is)))
        }
        ValueKind::Map => value.try_iter().is_ok_and(|mut keys| {
            keys.any(|key| {
                holds(&key, is) || value.get_item(&key).is_ok_and(|item| holds(&item, is))
            })
        }),
        _ => false,
    }
}
