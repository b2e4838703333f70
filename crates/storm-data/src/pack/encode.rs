//! From what was read to tokens.

use super::chat::{Learned, PartContent, render};
use super::cut::pieces;
use super::input::{Content, Inputs, Job, Piece};
use super::record::Record;
use crate::tokenizer::Tokenizer;
use crate::{DataError, Kind};
use std::sync::Mutex;

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
        let chunks = match job.content {
            Content::Text(pieces) => encode_pieces(tokenizer, &pieces)?,
            Content::Lines { file, lines } => self.encode_lines(tokenizer, file, &lines)?,
        };
        Ok(Encoded { chunks, input_bytes: job.input_bytes })
    }

    fn encode_lines(
        &self,
        tokenizer: &Tokenizer,
        file: usize,
        lines: &[(u64, String)],
    ) -> Result<Vec<Chunk>, DataError> {
        let path = self.inputs.path(file);
        let kind = self.inputs.kind();
        let mut records = Vec::with_capacity(lines.len());
        for (number, line) in lines {
            let record = Record::parse(path, *number, line)?;
            if record.kind() != kind {
                let problem = match kind {
                    Kind::Text => "is a chat or an instruction, but the input before it is text",
                    Kind::Samples => "is text, but the first record is a chat or an instruction",
                };
                let problem = format!("{problem}; pack them apart");
                return Err(DataError::Record { path: path.to_owned(), line: *number, problem });
            }
            records.push(record);
        }
        match kind {
            Kind::Text => encode_documents(tokenizer, records),
            Kind::Samples => encode_samples(tokenizer, records),
        }
    }
}

fn encode_documents(tokenizer: &Tokenizer, records: Vec<Record>) -> Result<Vec<Chunk>, DataError> {
    let piece = |record| match record {
        Record::Text(text) => Some(Piece { text, begins: true, ends: true }),
        Record::Chat(_) | Record::Instruction { .. } => None,
    };
    encode_pieces(tokenizer, &records.into_iter().filter_map(piece).collect::<Vec<_>>())
}

fn encode_pieces(tokenizer: &Tokenizer, pieces: &[Piece]) -> Result<Vec<Chunk>, DataError> {
    let texts: Vec<&str> = pieces.iter().map(|piece| piece.text.as_str()).collect();
    let encoded = encode_texts(tokenizer, &texts)?.into_iter().zip(pieces);
    Ok(encoded.map(|(ids, piece)| document(tokenizer, ids, piece)).collect())
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

fn encode_samples(tokenizer: &Tokenizer, records: Vec<Record>) -> Result<Vec<Chunk>, DataError> {
    let info = tokenizer.info();
    let samples: Vec<_> = records.into_iter().map(|record| render(record, info)).collect();
    let texts: Vec<&str> = samples
        .iter()
        .flatten()
        .filter_map(|part| match &part.content {
            PartContent::Text(text) => Some(text.as_str()),
            PartContent::Token(_) => None,
        })
        .collect();
    let mut encoded = encode_texts(tokenizer, &texts)?.into_iter();
    let chunk = |parts: &Vec<super::chat::Part>| {
        let mut chunk = Chunk { tokens: Vec::new(), learned: Vec::new(), begins: true, ends: true };
        for part in parts {
            match part.content {
                PartContent::Text(_) => chunk.tokens.extend(encoded.next().unwrap_or_default()),
                PartContent::Token(id) => chunk.tokens.push(id),
            }
            chunk.learned.resize(chunk.tokens.len(), part.learned == Learned::Yes);
        }
        chunk
    };
    Ok(samples.iter().map(chunk).collect())
}

/// Encodes texts, long ones in pieces.
fn encode_texts(tokenizer: &Tokenizer, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
    let cut: Vec<Vec<&str>> = texts
        .iter()
        .map(|text| pieces(text).into_iter().map(|piece| &text[piece]).collect())
        .collect();
    let mut encoded = tokenizer.encode_all(&cut.concat())?.into_iter();
    Ok(cut.iter().map(|pieces| encoded.by_ref().take(pieces.len()).flatten().collect()).collect())
}
