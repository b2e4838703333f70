//! Where a chat template comes from.

use crate::DataError;
use crate::manifest::read_file;
use crate::tokenizer::{SpecialTokens, TokenizerSource};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// The largest templates in use are tens of kilobytes.
const TEMPLATE_BYTES_MAX: u64 = 1 << 20;
/// `tokenizer_config.json` lists every added token.
const CONFIG_BYTES_MAX: u64 = 32 << 20;

const CHATML: &str = "\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}\
{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

// The space goes with the following word, as tokenizers expect.
const PLAIN: &str = "\
{% for message in messages %}{{ message.role }}:{% if message.role == 'assistant' %}{% generation %} \
{{ message.content }}{{ '\\n' }}{% endgeneration %}{% else %} {{ message.content }}{{ '\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}assistant:{% endif %}";

/// The template that renders messages as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatTemplate {
    /// The tokenizer's own: `chat_template.jinja` next to it, or in `tokenizer_config.json`.
    OfTokenizer,
    /// `<|im_start|>role`, the message, `<|im_end|>`.
    ChatMl,
    /// `role: message`, one per line, between the special tokens of a document.
    Plain,
    /// A Jinja template.
    File(PathBuf),
}

impl ChatTemplate {
    /// `model`, `chatml`, `plain`, or the path of a template.
    pub fn parse(text: &str) -> ChatTemplate {
        match text {
            "model" => ChatTemplate::OfTokenizer,
            "chatml" => ChatTemplate::ChatMl,
            "plain" => ChatTemplate::Plain,
            path => ChatTemplate::File(path.into()),
        }
    }

    /// Reads everything needed to render chats.
    pub(crate) fn read(
        &self,
        tokenizer: &TokenizerSource,
        special_in_text: SpecialTokens,
    ) -> Result<ChatSetup, DataError> {
        let config = match tokenizer {
            TokenizerSource::File(path) => TokenizerConfig::beside(path)?,
            TokenizerSource::Bytes => TokenizerConfig::default(),
        };
        let (template, tool_template) = match self {
            ChatTemplate::OfTokenizer => match config.templates {
                Templates::None => return Err(missing(tokenizer)),
                Templates::One(template) => (template, None),
                Templates::Named(mut named) => {
                    let mut take = |name: &str| {
                        let at = named.iter().position(|template| template.name == name)?;
                        Some(named.swap_remove(at).template)
                    };
                    let tool_template = take("tool_use");
                    (take("default").ok_or_else(|| missing(tokenizer))?, tool_template)
                }
            },
            ChatTemplate::ChatMl => (CHATML.to_owned(), None),
            ChatTemplate::Plain => (PLAIN.to_owned(), None),
            ChatTemplate::File(path) => (read_text(path)?, None),
        };
        let frame = match self {
            ChatTemplate::Plain => Frame::Document,
            _ => Frame::AsRendered,
        };
        let special = config.special;
        let now_seconds = now_seconds();
        Ok(ChatSetup { template, tool_template, special, special_in_text, now_seconds, frame })
    }
}

/// In the form that [`ChatTemplate::parse`] accepts.
impl fmt::Display for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChatTemplate::OfTokenizer => f.write_str("model"),
            ChatTemplate::ChatMl => f.write_str("chatml"),
            ChatTemplate::Plain => f.write_str("plain"),
            ChatTemplate::File(path) => path.display().fmt(f),
        }
    }
}

fn missing(tokenizer: &TokenizerSource) -> DataError {
    DataError::Option {
        option: "chat template",
        problem: format!(
            "the tokenizer ({tokenizer}) comes without one; choose with --chat-template: chatml, plain, or the \
             path of a Jinja template"
        ),
    }
}

/// What a process needs to render chats.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ChatSetup {
    pub(crate) template: String,
    /// For chats with tools, if there is a separate template.
    pub(crate) tool_template: Option<String>,
    /// Special tokens by their template variable, such as `bos_token`.
    pub(crate) special: BTreeMap<String, String>,
    /// How special tokens in messages are treated.
    pub(crate) special_in_text: SpecialTokens,
    /// The time that templates see, as local time in seconds since 1970.
    pub(crate) now_seconds: i64,
    pub(crate) frame: Frame,
}

/// What surrounds a rendered chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// Nothing: the template contains everything.
    AsRendered,
    /// The special tokens of a document.
    Document,
}

/// The relevant parts of the files next to a `tokenizer.json`.
#[derive(Default)]
struct TokenizerConfig {
    templates: Templates,
    special: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Templates {
    #[default]
    None,
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// A special token as a string, or as an object with its matching rules.
#[derive(Deserialize)]
#[serde(untagged)]
enum SpecialToken {
    Text(String),
    Added { content: String },
    Other(serde::de::IgnoredAny),
}

impl TokenizerConfig {
    fn beside(tokenizer: &Path) -> Result<TokenizerConfig, DataError> {
        let folder = tokenizer.parent().unwrap_or(Path::new(""));
        let mut config = TokenizerConfig::default();
        // The config comes last and overrides.
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            let path = folder.join(name);
            if !path.exists() {
                continue;
            }
            let bytes = read_file(&path, CONFIG_BYTES_MAX)?;
            let bad = |error: serde_json::Error| DataError::input(&path, error.to_string());
            let special: Fields = serde_json::from_slice(&bytes).map_err(bad)?;
            config.special.extend(special.tokens);
            if let Some(templates) = special.templates {
                config.templates = templates;
            }
        }
        let path = folder.join("chat_template.jinja");
        if path.exists() {
            config.templates = Templates::One(read_text(&path)?);
        }
        Ok(config)
    }
}

/// The special tokens and templates of a file. Other fields are ignored.
#[derive(Default)]
struct Fields {
    tokens: BTreeMap<String, String>,
    templates: Option<Templates>,
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Fields, D::Error> {
        struct Visitor;

        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Fields;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Fields, A::Error> {
                let mut fields = Fields::default();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "chat_template" {
                        fields.templates = map.next_value()?;
                    } else if key.ends_with("_token") {
                        match map.next_value()? {
                            SpecialToken::Text(text) | SpecialToken::Added { content: text } => {
                                fields.tokens.insert(key, text);
                            }
                            SpecialToken::Other(_) => {}
                        }
                    } else {
                        map.next_value::<serde::de::IgnoredAny>()?;
                    }
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(Visitor)
    }
}

fn read_text(path: &Path) -> Result<String, DataError> {
    let bytes = read_file(path, TEMPLATE_BYTES_MAX)?;
    String::from_utf8(bytes).map_err(|_| DataError::input(path, "is not UTF-8 text"))
}

/// The local time, like `datetime.now()` in transformers, or `SOURCE_DATE_EPOCH` in UTC for
/// reproducible packing.
fn now_seconds() -> i64 {
    let said = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.parse().ok());
    said.unwrap_or_else(|| local_seconds(Timestamp::now(), &TimeZone::system()))
}

/// A moment as local time in a zone, in seconds since 1970.
fn local_seconds(moment: Timestamp, zone: &TimeZone) -> i64 {
    moment.as_second() + i64::from(zone.to_offset(moment).seconds())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_those_of_the_zone() {
        let moment = Timestamp::new(1_735_689_599, 0).expect("a moment");
        for (zone, minutes) in [("UTC0", 0), ("EST5", -300), ("IST-5:30", 330), ("LINT-14", 840)] {
            let zone = TimeZone::posix(zone).expect("a zone");
            assert_eq!(local_seconds(moment, &zone), 1_735_689_599 + 60 * minutes);
        }
        // An hour later in summer.
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").expect("a zone");
        let summer = Timestamp::new(1_751_328_000, 0).expect("a moment");
        let ahead = |moment: Timestamp| local_seconds(moment, &zone) - moment.as_second();
        assert_eq!((ahead(moment), ahead(summer)), (3600, 7200));
    }
}
