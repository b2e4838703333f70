//! The protocol between a process and its tokenizer.

use super::chat::ChatSetup;
use super::{ChatTokens, TokenizerKind};
use serde::{Deserialize, Serialize};

/// The type of a request, its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Treats special tokens in the text as text.
    EncodeText = 1,
    Decode = 2,
    /// Treats special tokens in the text as tokens.
    EncodeParsed = 3,
    /// As [`Ask::EncodeParsed`], and the tokenizer adds its own special tokens.
    EncodePrompt = 4,
    Chat = 5,
    /// A chat up to the point where the assistant answers.
    ChatPrompt = 6,
}

/// The first byte of a reply.
pub(super) const DONE: u8 = 0;
pub(super) const FAILED: u8 = 1;
/// The request itself was invalid.
pub(super) const REFUSED: u8 = 2;

/// Set in the ids of a chat that count in the loss. No id uses this bit, because vocabularies are
/// smaller.
pub(super) const LEARNED: u32 = 1 << 31;

/// The first request, sent before the bytes of `tokenizer.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Open {
    pub(super) kind: TokenizerKind,
    /// How to render chats, if there are any.
    pub(super) chat: Option<ChatSetup>,
    /// The name of the end-of-text token, if one was chosen.
    pub(super) end_of_text: Option<String>,
}

/// The first reply.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Opened {
    pub(super) vocabulary: u32,
    pub(super) end_of_text: Option<u32>,
    pub(super) begin_of_text: Option<u32>,
    pub(super) chat: Option<ChatTokens>,
}

/// Appends numbers in little-endian order.
pub(super) fn put(bytes: &mut Vec<u8>, numbers: impl IntoIterator<Item = u32>) {
    bytes.extend(numbers.into_iter().flat_map(u32::to_le_bytes));
}

/// Takes a number from the start.
pub(super) fn take(bytes: &mut &[u8]) -> Option<u32> {
    let (number, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*number))
}

/// Takes this many bytes from the start.
pub(super) fn take_bytes<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(taken)
}
