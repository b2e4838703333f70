//! Splits long text into pieces that are encoded separately.
//!
//! A piece ends after a line break with no other white space next to it. Common tokenizers never
//! merge across such a boundary, and ending the text there does not change their output, so the
//! pieces have the same tokens as the whole. Text without such a boundary is split at a worse one.

use std::ops::Range;

/// The approximate length of a piece.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// Text of this length without a line break may be split between any two characters.
pub(super) const PIECE_BYTES_MAX: usize = 4 * PIECE_BYTES;

/// Where a piece at the start of `text` may end. `None` if more text is needed. The first
/// `searched` bytes were already searched in an earlier, shorter text and are not searched again.
pub(super) fn piece_end(text: &str, searched: usize) -> Option<usize> {
    let is_text = |next: Option<char>| next.is_some_and(|next| !next.is_whitespace());
    // The character after the last searched byte was not known then.
    let from = searched.saturating_sub(1);
    let bytes = text.as_bytes();
    let mut good = None;
    for at in (from..bytes.len()).rev() {
        let end = at + 1;
        // For most line breaks the next byte decides: it is text, or another line break.
        let is_candidate = bytes[at] == b'\n' && bytes.get(end).is_some_and(|&next| next != b'\n');
        if is_candidate && is_text(text[end..].chars().next()) {
            if is_text(text[..at].chars().next_back()) {
                return Some(end);
            }
            // The line also ends with a carriage return, or is empty.
            good.get_or_insert(end);
        }
    }
    good.or_else(|| (text.len() >= PIECE_BYTES_MAX).then_some(text.len()))
}

/// The pieces of a text.
pub(super) fn pieces(text: &str) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while text.len() - start > PIECE_BYTES {
        let (mut length, mut searched) = (PIECE_BYTES, 0);
        let end = loop {
            let end = text.floor_char_boundary(start + length);
            match piece_end(&text[start..end], searched) {
                Some(length) => break start + length,
                None if end == text.len() => break end,
                None => (length, searched) = (length + PIECE_BYTES, end - start),
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
        assert_eq!(piece_end("one\ntwo\nthree", 0), Some(8));
        assert_eq!(piece_end("one\n\n  two", 0), None);
        assert_eq!(piece_end("one\ntwo\n\nthree", 0), Some(4));
        assert_eq!(piece_end("one\r\ntwo\r\nthree", 0), Some(10));
        assert_eq!(piece_end("one\ntwo\n", 0), Some(4));
        assert_eq!(piece_end("one two", 0), None);
    }

    /// Text without a good boundary is searched once, not again after every read.
    #[test]
    fn what_was_searched_is_not_searched_again() {
        assert_eq!(piece_end("one\ntwo", 5), None);
        // Only now is the character after the line break known.
        assert_eq!(piece_end("one\ntwo", 4), Some(4));
        assert_eq!(piece_end("one\ntwo\nthree", 5), Some(8));
        assert_eq!(piece_end("é\nthree", 2), Some(3));
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
