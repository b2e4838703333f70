//! What of a chat or an instruction is text, what is a special token, and what is learned.

use super::record::{Message, Record, Role};
use crate::TokenizerInfo;
use std::borrow::Cow;

/// A part of a sample.
pub(super) struct Part {
    pub(super) content: PartContent,
    pub(super) learned: Learned,
}

impl Part {
    /// What a tokenizer encodes of it.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.content {
            PartContent::Text(text) => Some(text),
            PartContent::Token(_) => None,
        }
    }
}

pub(super) enum PartContent {
    Text(Cow<'static, str>),
    Token(u32),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Learned {
    Yes,
    No,
}

/// The parts of a sample. A text has none.
pub(super) fn render(record: Record, tokenizer: &TokenizerInfo) -> Vec<Part> {
    let mut parts = Vec::new();
    parts.extend(tokenizer.begin_of_text.map(|id| token(id, Learned::No)));
    let end = tokenizer.end_of_text;
    match record {
        Record::Text(_) => parts.clear(),
        Record::Chat(messages) => match tokenizer.chat {
            Some(chat) => {
                for message in messages {
                    let learned = learned(&message);
                    parts.push(token(chat.start, Learned::No));
                    parts.push(text(message.role.line(), Learned::No));
                    parts.push(text(message.content, learned));
                    parts.push(token(chat.end, learned));
                    parts.push(text("\n", Learned::No));
                }
            }
            None => {
                let last = messages.last().map_or(Learned::No, learned);
                for message in messages {
                    // The space goes with what follows it, as tokenizers see words.
                    parts.push(text(message.role.label(), Learned::No));
                    parts.push(text(format!(" {}\n", message.content), learned(&message)));
                }
                parts.extend(end.map(|id| token(id, last)));
            }
        },
        Record::Instruction { prompt, completion } => {
            parts.push(text(prompt, Learned::No));
            parts.push(text(completion, Learned::Yes));
            parts.extend(end.map(|id| token(id, Learned::Yes)));
        }
    }
    parts
}

fn learned(message: &Message) -> Learned {
    match message.role {
        Role::Assistant => Learned::Yes,
        Role::System | Role::User => Learned::No,
    }
}

fn text(text: impl Into<Cow<'static, str>>, learned: Learned) -> Part {
    Part { content: PartContent::Text(text.into()), learned }
}

fn token(id: u32, learned: Learned) -> Part {
    Part { content: PartContent::Token(id), learned }
}
