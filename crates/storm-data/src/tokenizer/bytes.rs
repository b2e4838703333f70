//! The byte tokenizer: every byte is a token.

use super::{TokenizerInfo, TokenizerKind};

const END_OF_TEXT: u32 = 256;

pub(super) fn info() -> TokenizerInfo {
    TokenizerInfo {
        kind: TokenizerKind::Bytes,
        vocabulary: END_OF_TEXT + 1,
        end_of_text: Some(END_OF_TEXT),
        begin_of_text: None,
        chat: None,
        sha256: None,
    }
}

pub(super) fn encode(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The end-of-text token decodes to nothing.
pub(super) fn decode(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
