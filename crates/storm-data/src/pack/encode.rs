//! From what was read to tokens.

use super::chat::{Learned, Part, PartContent, render};
use super::cut::{PIECE_BYTES, pieces};
use super::input::{Content, Inputs, Job, Piece};
use super::record::Record;
use crate::tokenizer::Tokenizer;
use crate::{DataError, Kind};
use std::mem;
use std::sync::Mutex;

/// Parts of samples that are encoded at once. Their overhead in memory is many times that of their text.
const PARTS_MAX: usize = 1 << 14;

/// The tokens of a job.
pub(super) struct Encoded {
    pub(super) chunks: Vec<Chunk>,
    pub(super) input_bytes: u64,
}

/// Tokens that follow each other in one document or sample.
pub(super) struct Chunk {
    pub(super) tokens: Vec<u32>,
    /// For samples, whether each token is learned.
    pub(super) learned: Vec<bool>,
    pub(super) begins: bool,
    pub(super) ends: bool,
}

/// What the encoding threads share.
pub(super) struct Encoder<'a, O> {
    inputs: &'a Inputs,
    /// For the first thread that asks.
    opened: Mutex<Option<Tokenizer>>,
    open: &'a O,
}

impl<'a, O: Fn() -> Result<Tokenizer, DataError> + Sync> Encoder<'a, O> {
    pub(super) fn new(inputs: &'a Inputs, opened: Tokenizer, open: &'a O) -> Encoder<'a, O> {
        Encoder { inputs, opened: Mutex::new(Some(opened)), open }
    }

    /// A tokenizer for a thread.
    pub(super) fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        let opened = self.opened.lock().ok().and_then(|mut opened| opened.take());
        opened.map_or_else(self.open, Ok)
    }

    pub(super) fn encode(&self, tokenizer: &Tokenizer, job: Job) -> Result<Encoded, DataError> {
        let mut batch = Batch::new(tokenizer);
        match job.content {
            Content::Text(pieces) => pieces.into_iter().try_for_each(|piece| batch.piece(piece))?,
            Content::Lines { file, lines } => {
                // A line may be long: it is dropped before its record is encoded.
                for (number, line) in lines {
                    let record = self.parse(file, number, &line)?;
                    drop(line);
                    batch.record(record)?;
                }
            }
        }
        Ok(Encoded { chunks: batch.finish()?, input_bytes: job.input_bytes })
    }

    fn parse(&self, file: usize, line: u64, json: &str) -> Result<Record, DataError> {
        let path = self.inputs.path(file);
        let record = Record::parse(path, line, json)?;
        if record.kind() == self.inputs.kind() {
            return Ok(record);
        }
        let problem = match self.inputs.kind() {
            Kind::Text => "is a chat or an instruction, but the input before it is text",
            Kind::Samples => "is text, but the first record is a chat or an instruction",
        };
        let problem = format!("{problem}; pack them apart");
        Err(DataError::Record { path: path.to_owned(), line, problem })
    }
}

/// Documents and samples that are encoded together, about a megabyte at a time.
struct Batch<'a> {
    tokenizer: &'a Tokenizer,
    chunks: Vec<Chunk>,
    waiting: Vec<Waiting>,
    /// Of what waits.
    text_bytes: usize,
    parts: usize,
}

/// Something to encode.
enum Waiting {
    Piece(Piece),
    Sample(Vec<Part>),
}

impl Waiting {
    fn texts(&self) -> impl Iterator<Item = &str> {
        let (piece, sample) = match self {
            Waiting::Piece(piece) => (Some(piece.text.as_str()), [].iter()),
            Waiting::Sample(parts) => (None, parts.iter()),
        };
        piece.into_iter().chain(sample.filter_map(Part::text))
    }
}

impl<'a> Batch<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Batch<'a> {
        Batch { tokenizer, chunks: Vec::new(), waiting: Vec::new(), text_bytes: 0, parts: 0 }
    }

    fn record(&mut self, record: Record) -> Result<(), DataError> {
        match record {
            Record::Text(text) => self.piece(Piece { text, begins: true, ends: true }),
            sample => self.push(Waiting::Sample(render(sample, self.tokenizer.info()))),
        }
    }

    fn piece(&mut self, piece: Piece) -> Result<(), DataError> {
        self.push(Waiting::Piece(piece))
    }

    fn push(&mut self, waiting: Waiting) -> Result<(), DataError> {
        for text in waiting.texts() {
            self.text_bytes += text.len();
            self.parts += 1;
        }
        self.waiting.push(waiting);
        match self.text_bytes >= PIECE_BYTES || self.parts >= PARTS_MAX {
            true => self.encode(),
            false => Ok(()),
        }
    }

    fn encode(&mut self) -> Result<(), DataError> {
        (self.text_bytes, self.parts) = (0, 0);
        let waiting = mem::take(&mut self.waiting);
        let mut texts = Texts::new(self.tokenizer, waiting.iter().flat_map(Waiting::texts));
        for waiting in &waiting {
            let chunk = match waiting {
                Waiting::Piece(piece) => {
                    let mut tokens = Vec::new();
                    texts.next_into(&mut tokens)?;
                    document(self.tokenizer, tokens, piece)
                }
                Waiting::Sample(parts) => sample(parts, &mut texts)?,
            };
            self.chunks.push(chunk);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<Chunk>, DataError> {
        self.encode()?;
        Ok(self.chunks)
    }
}

/// A document, or a piece of one, with the marks around it. An empty one has none.
fn document(tokenizer: &Tokenizer, ids: Vec<u32>, piece: &Piece) -> Chunk {
    let info = tokenizer.info();
    let &Piece { begins, ends, .. } = piece;
    let mut tokens = ids;
    let nothing = begins && ends && piece.text.is_empty();
    if let Some(id) = info.begin_of_text.filter(|_| begins && !nothing) {
        tokens.insert(0, id);
    }
    tokens.extend(info.end_of_text.filter(|_| ends && !nothing));
    Chunk { tokens, learned: Vec::new(), begins, ends }
}

fn sample<'t>(
    parts: &[Part],
    texts: &mut Texts<'_, 't, impl Iterator<Item = &'t str>>,
) -> Result<Chunk, DataError> {
    let mut chunk = Chunk { tokens: Vec::new(), learned: Vec::new(), begins: true, ends: true };
    for part in parts {
        match part.content {
            PartContent::Text(_) => texts.next_into(&mut chunk.tokens)?,
            PartContent::Token(id) => chunk.tokens.push(id),
        }
        chunk.learned.resize(chunk.tokens.len(), part.learned == Learned::Yes);
    }
    Ok(chunk)
}

/// Encodes texts one after another, long ones in pieces, and asks the tokenizer for about a megabyte at a
/// time.
struct Texts<'a, 't, I> {
    tokenizer: &'a Tokenizer,
    texts: I,
    /// Encoded pieces, and whether each is the last of its text, in reverse.
    encoded: Vec<(Vec<u32>, bool)>,
    /// Pieces of a text that are not encoded yet, in reverse.
    cut: Vec<&'t str>,
}

impl<'a, 't, I: Iterator<Item = &'t str>> Texts<'a, 't, I> {
    fn new(tokenizer: &'a Tokenizer, texts: I) -> Texts<'a, 't, I> {
        Texts { tokenizer, texts, encoded: Vec::new(), cut: Vec::new() }
    }

    /// Adds the tokens of the next text to `tokens`.
    fn next_into(&mut self, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        loop {
            if self.encoded.is_empty() {
                self.ask()?;
            }
            match self.encoded.pop() {
                Some((ids, false)) => tokens.extend(ids),
                Some((ids, true)) if tokens.is_empty() => {
                    *tokens = ids;
                    return Ok(());
                }
                Some((ids, true)) => {
                    tokens.extend(ids);
                    return Ok(());
                }
                None => return Ok(()),
            }
        }
    }

    /// Encodes the next pieces.
    fn ask(&mut self) -> Result<(), DataError> {
        // For each piece whether it is encoded, which nothing is not, and whether it is the last of its text.
        let (mut request, mut slots) = (Vec::new(), Vec::new());
        let mut bytes = 0;
        while bytes < PIECE_BYTES {
            if self.cut.is_empty() {
                let Some(text) = self.texts.next() else { break };
                self.cut = pieces(text).into_iter().rev().map(|piece| &text[piece]).collect();
            }
            let piece = self.cut.pop();
            bytes += piece.map_or(0, str::len);
            request.extend(piece);
            slots.push((piece.is_some(), self.cut.is_empty()));
        }
        let mut encoded = match request.is_empty() {
            true => Vec::new().into_iter(),
            false => self.tokenizer.encode_all(&request)?.into_iter(),
        };
        let mut ids = |asked: bool| asked.then(|| encoded.next()).flatten().unwrap_or_default();
        self.encoded = slots.into_iter().map(|(asked, last)| (ids(asked), last)).collect();
        self.encoded.reverse();
        Ok(())
    }
}
