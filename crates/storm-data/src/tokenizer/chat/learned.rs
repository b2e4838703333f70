//! Finds the assistant's answers in a rendered chat if the template does not mark them.
//!
//! For each answer, the chat before it is rendered again, first with the prompt for an answer and
//! then with the answer. If the whole chat starts with the former, the answer starts after it. The
//! answer ends where the latter ends.

use super::engine::{Render, Then};
use super::{Chat, KnownTokens, PROBE, field, role, with_field};
use minijinja::Value;
use std::ops::Range;

pub(super) fn by_prefixes(
    render: &Render<'_>,
    chat: &Chat,
    text: &str,
    known: &KnownTokens,
) -> Result<Vec<Range<usize>>, String> {
    let answers = Answers { render, chat, text, known };
    let is_answer = |number: &usize| role(&chat.messages[*number]) == "assistant";
    let mut spans: Vec<Range<usize>> = Vec::new();
    for number in (0..chat.messages.len()).filter(is_answer) {
        let span = answers.span(number)?;
        let is_behind = spans.last().is_none_or(|before| before.end <= span.start);
        if !is_behind {
            return Err(unclear(number));
        }
        spans.push(span);
    }
    Ok(spans)
}

struct Answers<'a> {
    render: &'a Render<'a>,
    chat: &'a Chat,
    text: &'a str,
    known: &'a KnownTokens,
}

impl Answers<'_> {
    fn span(&self, number: usize) -> Result<Range<usize>, String> {
        let start = self.start(number)?;
        let end = match number + 1 == self.chat.messages.len() {
            true => self.text.len(),
            false => self.end(number, start)?,
        };
        let span = &self.text[start..end];
        // A line break after the end of a turn belongs to the next one.
        let trimmed = span.trim_end();
        let ends = self.known.special.iter().any(|token| trimmed.ends_with(token.as_str()));
        Ok(start..if ends { start + trimmed.len() } else { end })
    }

    fn start(&self, number: usize) -> Result<usize, String> {
        let before = self.chat.until(number);
        let prompt = self.render.text(&before, Then::Answer);
        let bare = self.render.text(&before, Then::Nothing);
        if let (Ok(prompt), Ok(bare)) = (prompt, bare)
            && self.text.starts_with(bare.as_str())
        {
            // Some templates start an answer with a reasoning block, which they omit from older
            // answers.
            let begun = self.known.before(&prompt, common_prefix(&prompt, self.text));
            return Ok(begun.max(bare.len()));
        }
        // Some templates move the start of a chat into its last question.
        let content = self.content(number).ok_or_else(|| unclear(number))?;
        let other = format!("{PROBE}{content}");
        let message = with_field(&self.chat.messages[number], "content", Value::from(other));
        let probed = self.render.text(&self.chat.with(number, message), Then::Nothing)?;
        match probed == self.text {
            true => Err(unclear(number)),
            false => Ok(common_prefix(&probed, self.text)),
        }
    }

    /// The end of an answer that starts at `start`: the longest prefix of the text there that is a
    /// suffix of the chat rendered up to that answer.
    fn end(&self, number: usize, start: usize) -> Result<usize, String> {
        let until = self.render.text(&self.chat.until(number + 1), Then::Nothing)?;
        // Earlier messages do not affect it.
        let until = until.strip_prefix(&self.text[..start]).unwrap_or(&until);
        let ended = until.trim_end();
        let token = self.known.special.iter().find(|token| ended.ends_with(token.as_str()));
        // Some templates end every text with an extra token.
        let bare = token.map_or(until, |token| &ended[..ended.len() - token.len()]);
        let rest = &self.text[start..];
        let length = overlap(until, rest).max(overlap(bare, rest));
        let found = &rest[..length];
        let content = self.content(number);
        let is_sure = self.known.special.iter().any(|token| found.contains(token.as_str()))
            || content.is_some_and(|content| found.contains(content.trim()));
        match is_sure && !found.trim().is_empty() {
            true => Ok(start + length),
            false => Err(unclear(number)),
        }
    }

    /// The content of a message, if it is a nonempty string.
    fn content(&self, number: usize) -> Option<String> {
        let content = field(&self.chat.messages[number], "content")?;
        content.as_str().filter(|text| !text.trim().is_empty()).map(str::to_owned)
    }
}

fn unclear(number: usize) -> String {
    format!(
        "message {}: what the assistant says cannot be told from the rest of the rendered text; put \
         {{% generation %}} and {{% endgeneration %}} around it in the chat template",
        number + 1
    )
}

/// Length of the common prefix in bytes.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

/// The longest prefix of `text` that is a suffix of `ended`, in bytes.
fn overlap(ended: &str, text: &str) -> usize {
    let text = &text.as_bytes()[..text.len().min(ended.len())];
    if ended.as_bytes().ends_with(text) {
        return text.len();
    }
    // Knuth–Morris–Pratt: for each position, the longest proper prefix that ends there.
    let mut borders = vec![0_usize; text.len()];
    let next = |borders: &[usize], mut length: usize, byte: u8| loop {
        if length < text.len() && text[length] == byte {
            return length + 1;
        }
        if length == 0 {
            return 0;
        }
        length = borders[length - 1];
    };
    for at in 1..text.len() {
        borders[at] = next(&borders, borders[at - 1], text[at]);
    }
    ended.bytes().fold(0, |length, byte| next(&borders, length, byte))
}

#[cfg(test)]
mod tests {
    use super::{common_prefix, overlap};

    #[test]
    fn overlaps() {
        for (ended, text, expected) in [
            ("", "", 0),
            ("abc", "bcd", 2),
            ("abc", "abcabc", 3),
            ("xaab", "aabaab", 3),
            ("aaab", "aab", 3),
            ("abab", "ababx", 4),
            ("xyz", "abc", 0),
            ("xé", "éx", 2),
        ] {
            assert_eq!(overlap(ended, text), expected, "{ended} {text}");
        }
        assert_eq!((common_prefix("éa", "éb"), common_prefix("a", "ab")), (2, 1));
    }
}
