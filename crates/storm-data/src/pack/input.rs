//! Reads the files to pack, in parts that can be encoded separately.

use super::InputFormat;
use super::cut::{PIECE_BYTES, piece_end};
use super::record::Record;
use crate::{DataError, Kind};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use storm_files::open_plain;

/// The longest line of JSONL.
pub(super) const LINE_BYTES_MAX: u64 = 64 << 20;

/// What separates documents in a file of text, with the line breaks around it.
const SEPARATOR: &str = "<|endoftext|>";
const LINE_BREAKS: [char; 2] = ['\r', '\n'];

const BYTE_ORDER_MARK: char = '\u{feff}';

/// Something to encode.
pub(super) struct Job {
    pub(super) content: Content,
    /// Bytes of input that it was read from.
    pub(super) input_bytes: u64,
}

pub(super) enum Content {
    /// Pieces of documents, in order.
    Text(Vec<Piece>),
    /// Lines of a file with their numbers.
    Lines { file: usize, lines: Vec<(u64, String)> },
}

/// A part of a document, or all of it.
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) begins: bool,
    pub(super) ends: bool,
}

/// The files, and what is in them.
pub(super) struct Inputs {
    files: Vec<InputFile>,
    kind: Kind,
    bytes: u64,
}

struct InputFile {
    path: PathBuf,
    format: FileFormat,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FileFormat {
    Text,
    Jsonl,
}

impl Inputs {
    /// Checks all files, and reads the start of the first to see what they hold.
    pub(super) fn open(paths: &[PathBuf], format: InputFormat) -> Result<Inputs, DataError> {
        let mut files = Vec::with_capacity(paths.len());
        let mut bytes = 0;
        for path in paths {
            if path.is_dir() {
                return Err(DataError::input(path, "is a folder; name the files in it"));
            }
            let file = open_plain(path).map_err(DataError::io(path))?;
            bytes += file.metadata().map_err(DataError::io(path))?.len();
            let by_name = path.extension().is_some_and(|ext| ext == "jsonl" || ext == "ndjson");
            let format = match format {
                InputFormat::ByName if by_name => FileFormat::Jsonl,
                InputFormat::ByName if is_table(path) => {
                    let problem = "is a table or one JSON value, not text: write a line of JSONL for each document or \
                                   sample, or give --format text to learn the file as it is written";
                    return Err(DataError::input(path, problem));
                }
                InputFormat::ByName | InputFormat::Text => FileFormat::Text,
                InputFormat::Jsonl => FileFormat::Jsonl,
            };
            files.push(InputFile { path: path.clone(), format });
        }
        let kind = kind_of(&files)?;
        Ok(Inputs { files, kind, bytes })
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn path(&self, file: usize) -> &Path {
        &self.files[file].path
    }

    /// Reads everything; stops early if `emit` says that no more is needed.
    pub(super) fn read(&self, emit: &mut dyn FnMut(Job) -> bool) -> Result<(), DataError> {
        for (number, file) in self.files.iter().enumerate() {
            let wanted = match file.format {
                FileFormat::Text => read_text(&file.path, emit)?,
                FileFormat::Jsonl => read_lines(number, &file.path, emit)?,
            };
            if !wanted {
                break;
            }
        }
        Ok(())
    }
}

/// Whether a file is a table or one JSON value: as text, its commas and brackets would be learned.
fn is_table(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    ["json", "csv", "tsv", "parquet", "arrow"].contains(&extension.to_lowercase().as_str())
}

/// Text if any file is text; otherwise the kind of the first record.
fn kind_of(files: &[InputFile]) -> Result<Kind, DataError> {
    if files.iter().any(|file| file.format == FileFormat::Text) {
        return Ok(Kind::Text);
    }
    for file in files {
        let mut lines = Lines::open(&file.path)?;
        while let Some((number, line, _)) = lines.next()? {
            if !line.trim().is_empty() {
                return Ok(Record::parse(&file.path, number, &line)?.kind());
            }
        }
    }
    Ok(Kind::Text)
}

/// Reads a file of documents.
fn read_text(path: &Path, emit: &mut dyn FnMut(Job) -> bool) -> Result<bool, DataError> {
    let mut file = open_plain(path).map_err(DataError::io(path))?;
    // Read, but not emitted yet.
    let mut buffer: Vec<u8> = Vec::new();
    let mut offset = 0;
    let mut cutter = Cutter { place: Place::File, pieces: Vec::new(), searched: 0 };
    loop {
        let before = buffer.len();
        let mut part = (&mut file).take(PIECE_BYTES as u64);
        part.read_to_end(&mut buffer).map_err(DataError::io(path))?;
        let ends = buffer.len() == before;
        let valid = match std::str::from_utf8(&buffer) {
            Ok(text) => text,
            // A character that the next read completes.
            Err(error) if error.error_len().is_none() && !ends => {
                std::str::from_utf8(&buffer[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => {
                let at = offset + error.valid_up_to() as u64;
                return Err(DataError::input(path, format!("is not UTF-8 text at byte {at}")));
            }
        };
        let input_bytes = cutter.cut(valid, ends) as u64;
        if !cutter.pieces.is_empty() {
            let content = Content::Text(std::mem::take(&mut cutter.pieces));
            if !emit(Job { content, input_bytes }) {
                return Ok(false);
            }
        }
        if ends {
            return Ok(true);
        }
        buffer.drain(..input_bytes as usize);
        offset += input_bytes;
    }
}

/// Divides a file of text into documents, and long ones into pieces.
struct Cutter {
    /// Where the remaining text starts.
    place: Place,
    pieces: Vec<Piece>,
    /// Bytes at the start of the text with no place where a piece may end, and no separator.
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
    /// Takes what it can from the start of `text`, and returns how many bytes that was. At the end it
    /// takes everything.
    fn cut(&mut self, text: &str, ends: bool) -> usize {
        let mut taken = 0;
        // No separator starts in what was searched before, or right after it.
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
        // A possible start of a separator, with a line break before it, waits for the rest.
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

/// Reads a file of records, many lines at a time.
fn read_lines(
    file: usize,
    path: &Path,
    emit: &mut dyn FnMut(Job) -> bool,
) -> Result<bool, DataError> {
    let mut reader = Lines::open(path)?;
    let mut lines = Vec::new();
    let mut input_bytes = 0;
    loop {
        let next = reader.next()?;
        let ends = next.is_none();
        if let Some((number, line, bytes)) = next {
            input_bytes += bytes;
            if !line.trim().is_empty() {
                lines.push((number, line));
            }
        }
        if ends || input_bytes >= PIECE_BYTES as u64 {
            let content = Content::Lines { file, lines: std::mem::take(&mut lines) };
            if !emit(Job { content, input_bytes: std::mem::take(&mut input_bytes) }) {
                return Ok(false);
            }
        }
        if ends {
            return Ok(true);
        }
    }
}

/// The lines of a file, counted from one.
struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    number: u64,
}

impl Lines {
    fn open(path: &Path) -> Result<Lines, DataError> {
        let file = open_plain(path).map_err(DataError::io(path))?;
        Ok(Lines {
            path: path.to_owned(),
            reader: BufReader::with_capacity(1 << 18, file),
            number: 0,
        })
    }

    /// Number, text and bytes of the next line.
    fn next(&mut self) -> Result<Option<(u64, String, u64)>, DataError> {
        self.number += 1;
        let bad = |problem: &str| DataError::Record {
            path: self.path.clone(),
            line: self.number,
            problem: problem.to_owned(),
        };
        let mut bytes = Vec::new();
        let mut reader = (&mut self.reader).take(LINE_BYTES_MAX + 1);
        let count = reader.read_until(b'\n', &mut bytes).map_err(DataError::io(&self.path))?;
        if count == 0 {
            return Ok(None);
        }
        if bytes.len() as u64 > LINE_BYTES_MAX {
            return Err(bad("longer than 64 MiB; is this JSONL, a JSON object in each line?"));
        }
        let mut line = String::from_utf8(bytes).map_err(|_| bad("is not UTF-8 text"))?;
        if self.number == 1 && line.starts_with(BYTE_ORDER_MARK) {
            line.remove(0);
        }
        Ok(Some((self.number, line, count as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of line breaks has no place where a piece may end. What was read must not be searched
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
        // A separator begins a new text.
        assert_eq!(cutter.cut(&text[..PIECE_BYTES], false), 0);
        let separated = format!("{}{SEPARATOR}{}", &text[..PIECE_BYTES], &text[..PIECE_BYTES]);
        assert_eq!(cutter.cut(&separated, false), PIECE_BYTES + SEPARATOR.len());
        assert_eq!(cutter.searched, PIECE_BYTES - SEPARATOR.len());
    }
}
