//! The protocol between a process and its tokenizer: frames with a length and that many bytes.

use super::chat::ChatSetup;
use super::{ChatTokens, TokenizerKind};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};

/// The longest frame: the largest tokenizer, or the ids of a batch of texts.
pub(super) const FRAME_BYTES_MAX: u32 = 512 << 20;

/// The kind of a request; its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Special tokens that are written out are text.
    EncodeText = 1,
    Decode = 2,
    /// They are tokens.
    EncodeParsed = 3,
    /// They are tokens, and the tokenizer adds its own around the text.
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

/// Set in the learned ids of a chat. No id uses this bit: vocabularies are smaller.
pub(super) const LEARNED: u32 = 1 << 31;

/// The first request, before the bytes of `tokenizer.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Open {
    pub(super) kind: TokenizerKind,
    /// How chats become text, if there are any.
    pub(super) chat: Option<ChatSetup>,
    /// The name of the end of text, if it was chosen.
    pub(super) end_of_text: Option<String>,
    /// The requesting process: the worker ends with it.
    pub(super) parent: i32,
    /// Processor time for a request.
    pub(super) request_seconds_max: u64,
}

/// The first reply.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Opened {
    pub(super) vocabulary: u32,
    pub(super) end_of_text: Option<u32>,
    pub(super) begin_of_text: Option<u32>,
    pub(super) chat: Option<ChatTokens>,
}

pub(super) fn write_frame(out: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let length = u32::try_from(length).ok().filter(|&length| length <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::other("more than fits one message"))?;
    out.write_all(&length.to_le_bytes())?;
    parts.iter().try_for_each(|part| out.write_all(part))?;
    out.flush()
}

/// The next frame; none at the end.
pub(super) fn read_frame(input: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match input.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let length = u32::from_le_bytes(length);
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::other("a message that is too long"));
    }
    // Allocate memory as bytes arrive, not as they are announced.
    let mut bytes = Vec::new();
    input.take(u64::from(length)).read_to_end(&mut bytes)?;
    match bytes.len() == length as usize {
        true => Ok(Some(bytes)),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Numbers as bytes.
pub(super) fn put(bytes: &mut Vec<u8>, numbers: impl IntoIterator<Item = u32>) {
    bytes.extend(numbers.into_iter().flat_map(u32::to_le_bytes));
}

/// Takes a number from the front.
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
