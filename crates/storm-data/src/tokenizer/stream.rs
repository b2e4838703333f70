//! Decodes one token at a time.

use super::Tokenizer;
use crate::DataError;

/// After this many tokens, text is emitted even if it seems to end inside a character. No character
/// needs this many tokens.
const INCOMPLETE_MAX: usize = 8;

/// Decodes ids as they arrive. A character made of several tokens is emitted with the last of them.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens emitted, which determine the spaces between words, and those not emitted
    /// yet.
    ids: Vec<u32>,
    /// How many of `ids` were emitted.
    given: usize,
}

impl<'a> DecodeStream<'a> {
    /// A stream that continues after text that was already decoded.
    pub(super) fn new(tokenizer: &'a Tokenizer, before: &[u32]) -> DecodeStream<'a> {
        let ids = before[before.len().saturating_sub(INCOMPLETE_MAX)..].to_vec();
        DecodeStream { tokenizer, given: ids.len(), ids }
    }

    /// Takes a token and returns the text that it completes, possibly empty.
    ///
    /// # Errors
    /// If the tokenizer fails on it.
    pub fn step(&mut self, id: u32) -> Result<String, DataError> {
        self.ids.push(id);
        let text = self.pending()?;
        let waiting = self.ids.len() - self.given;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && waiting < INCOMPLETE_MAX {
            return Ok(String::new());
        }
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Ok(text)
    }

    /// The rest at the end: an incomplete character, if any.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn finish(mut self) -> Result<String, DataError> {
        let text = self.pending()?;
        self.ids.clear();
        Ok(text)
    }

    /// The text of the tokens not emitted yet, in the context of those that were.
    fn pending(&self) -> Result<String, DataError> {
        let before = self.tokenizer.decode(&self.ids[..self.given])?;
        let all = self.tokenizer.decode(&self.ids)?;
        // Decoders that join words may change the end of text that was already emitted. It is not
        // emitted twice.
        let same = before.chars().zip(all.chars()).take_while(|(before, all)| before == all);
        let same: usize = same.map(|(character, _)| character.len_utf8()).sum();
        Ok(all[same..].to_owned())
    }
}
