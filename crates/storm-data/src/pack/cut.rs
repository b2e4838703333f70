//! Cutting long text into pieces that are encoded on their own.
//!
//! A piece ends behind a line break that has no other white space beside it. The tokenizers in use never
//! join what is before such a place with what is behind it, nor does it matter to them that the text ends
//! there, so pieces have the tokens of the whole. Text without such a place is cut at a worse one.

use std::ops::Range;

/// A piece is about so long.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// Text without a line break is cut anywhere between two characters when it is so long.
pub(super) const PIECE_BYTES_MAX: usize = 4 * PIECE_BYTES;

/// Where a piece at the front of `text` may end; none if it should be read on.
pub(super) fn piece_end(text: &str) -> Option<usize> {
    let is_text = |next: Option<char>| next.is_some_and(|next| !next.is_whitespace());
    let ends = || text.rmatch_indices('\n').map(|(at, _)| at + 1);
    let before_text = |&end: &usize| is_text(text[end..].chars().next());
    let behind_text = |&end: &usize| is_text(text[..end - 1].chars().next_back());
    let best = ends().find(|end| before_text(end) && behind_text(end));
    // Lines that end with a carriage return too, or that are empty.
    let good = || ends().find(before_text);
    let any = || (text.len() >= PIECE_BYTES_MAX).then_some(text.len());
    best.or_else(good).or_else(any)
}

/// The pieces of a text.
pub(super) fn pieces(text: &str) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while text.len() - start > PIECE_BYTES {
        let mut length = PIECE_BYTES;
        let end = loop {
            let end = text.floor_char_boundary(start + length);
            match piece_end(&text[start..end]) {
                Some(length) => break start + length,
                None if end == text.len() => break end,
                None => length += PIECE_BYTES,
            }
        };
        pieces.push(start..end);
        start = end;
    }
    if start < text.len() {
        pieces.push(start..text.len());
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_behind_line_breaks() {
        assert_eq!(piece_end("one\ntwo\nthree"), Some(8));
        assert_eq!(piece_end("one\n\n  two"), None);
        assert_eq!(piece_end("one\ntwo\n\nthree"), Some(4));
        assert_eq!(piece_end("one\r\ntwo\r\nthree"), Some(10));
        assert_eq!(piece_end("one\ntwo\n"), Some(4));
        assert_eq!(piece_end("one two"), None);
    }

    #[test]
    fn pieces_make_up_the_text() {
        let lines = "a line of text\n".repeat(300_000);
        let dense = "é".repeat(5_000_000);
        for text in [lines.as_str(), &dense, "short", ""] {
            let pieces = pieces(text);
            let joined: String = pieces.iter().map(|piece| &text[piece.clone()]).collect();
            assert_eq!(joined, text);
            assert!(pieces.iter().all(|piece| piece.len() <= PIECE_BYTES_MAX + PIECE_BYTES));
            assert!(pieces.iter().all(|piece| !piece.is_empty()));
        }
        let pieces = pieces(&lines);
        assert!(
            pieces.len() > 3 && pieces.iter().all(|piece| lines[piece.clone()].ends_with('\n'))
        );
    }
}
