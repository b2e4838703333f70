//! Reads files of UTF-8 text, in parts that can be encoded separately.

use super::cut::{PIECE_BYTES, piece_end};
use super::input::{Content, Job, Piece};
use super::stream::Stream;
use crate::DataError;

/// Separates documents in a text file, together with the line breaks around it.
const SEPARATOR: &str = "<|endoftext|>";
const LINE_BREAKS: [char; 2] = ['\r', '\n'];

const BYTE_ORDER_MARK: char = '\u{feff}';

/// Reads a file of documents. Stops early if `emit` returns false.
pub(super) fn read(
    mut stream: Stream,
    emit: &mut dyn FnMut(Job) -> bool,
) -> Result<bool, DataError> {
    let mut cutter = Cutter { place: Place::File, pieces: Vec::new(), searched: 0 };
    let mut taken = 0;
    let mut wanted = true;
    read_valid(&mut stream, &mut |stream, valid, ends| {
        let bytes = cutter.cut(valid, ends);
        if !cutter.pieces.is_empty() {
            let content = Content::Text(std::mem::take(&mut cutter.pieces));
            let taken_before = std::mem::replace(&mut taken, stream.taken());
            wanted = emit(Job { content, bytes: bytes as u64, input_bytes: taken - taken_before });
        }
        wanted.then_some(bytes)
    })?;
    Ok(wanted)
}

/// The error of a file that is not valid text. `None` if all of it is valid.
pub(super) fn problem(mut stream: Stream) -> Result<Option<DataError>, DataError> {
    match read_valid(&mut stream, &mut |_, valid, _| Some(valid.len())) {
        Ok(()) => Ok(None),
        Err(error @ DataError::Input { .. }) => Ok(Some(error)),
        Err(error) => Err(error),
    }
}

/// Passes text that was read but not taken yet to `take`, and whether the file ends with it. `take`
/// returns how many bytes it took, or `None` to stop.
fn read_valid(
    stream: &mut Stream,
    take: &mut dyn FnMut(&Stream, &str, bool) -> Option<usize>,
) -> Result<(), DataError> {
    let mut buffer: Vec<u8> = Vec::new();
    let mut offset = 0;
    loop {
        let before = buffer.len();
        stream.read_up_to(PIECE_BYTES, &mut buffer)?;
        let ends = buffer.len() == before;
        let valid = match std::str::from_utf8(&buffer) {
            Ok(text) => text,
            // The next read completes the character.
            Err(error) if error.error_len().is_none() && !ends => {
                std::str::from_utf8(&buffer[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => {
                let at = offset + error.valid_up_to() as u64;
                let problem = format!("is not UTF-8 text at byte {at}");
                return Err(DataError::input(stream.path(), problem));
            }
        };
        let Some(taken) = take(stream, valid, ends) else { return Ok(()) };
        if ends {
            return Ok(());
        }
        buffer.drain(..taken);
        offset += taken as u64;
    }
}

/// Splits a text file into documents, and long ones into pieces.
struct Cutter {
    /// Where the remaining text starts.
    place: Place,
    pieces: Vec<Piece>,
    /// Bytes at the start of the text already searched, with no piece boundary and no separator.
    searched: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At the start of the file.
    File,
    /// After a separator.
    Separated,
    /// Inside a document.
    Inside,
}

impl Cutter {
    /// Takes what it can from the start of `text`, and returns how many bytes. At the end it takes
    /// everything.
    fn cut(&mut self, text: &str, ends: bool) -> usize {
        let mut taken = 0;
        // No separator starts in the part already searched, or right after it.
        while let Some(at) = text[taken + self.searched..].find(SEPARATOR) {
            let end = taken + self.searched + at;
            let document = text[taken..end].trim_end_matches(LINE_BREAKS);
            self.push(document, true);
            self.place = Place::Separated;
            taken = end + SEPARATOR.len();
            self.searched = 0;
        }
        let rest = &text[taken..];
        if ends {
            // White space after the last separator is not a document.
            if self.place != Place::Separated || !rest.trim_matches(LINE_BREAKS).is_empty() {
                self.push(rest, true);
            }
            return text.len();
        }
        // What may be the start of a separator, with a line break before it, stays until the next
        // read.
        let sure = rest.floor_char_boundary(rest.len().saturating_sub(SEPARATOR.len()));
        if rest.len() >= PIECE_BYTES {
            let end = piece_end(&rest[..sure], self.searched);
            self.searched = if end.is_some() { 0 } else { sure };
            if let Some(end) = end {
                self.push(&rest[..end], false);
                self.place = Place::Inside;
                taken += end;
            }
        }
        taken
    }

    fn push(&mut self, text: &str, ends: bool) {
        let text = match self.place {
            Place::File => text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text),
            Place::Separated => text.trim_start_matches(LINE_BREAKS),
            Place::Inside => text,
        };
        let begins = self.place != Place::Inside;
        self.pieces.push(Piece { text: text.to_owned(), begins, ends });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of line breaks has no piece boundary. Text already searched must not be searched
    /// again with every read.
    #[test]
    fn a_file_of_line_breaks_is_searched_once() {
        let mut cutter = Cutter { place: Place::File, pieces: Vec::new(), searched: 0 };
        let text = "\n".repeat(5 * PIECE_BYTES);
        for reads in 1..=4 {
            let read = &text[..reads * PIECE_BYTES];
            assert_eq!(cutter.cut(read, false), 0);
            assert_eq!(cutter.searched, read.len() - SEPARATOR.len());
        }
        let taken = cutter.cut(&text, false);
        assert_eq!(taken, text.len() - SEPARATOR.len());
        assert_eq!((cutter.searched, cutter.pieces.len()), (0, 1));
        // A separator starts a new text.
        assert_eq!(cutter.cut(&text[..PIECE_BYTES], false), 0);
        let separated = format!("{}{SEPARATOR}{}", &text[..PIECE_BYTES], &text[..PIECE_BYTES]);
        assert_eq!(cutter.cut(&separated, false), PIECE_BYTES + SEPARATOR.len());
        assert_eq!(cutter.searched, PIECE_BYTES - SEPARATOR.len());
    }
}
