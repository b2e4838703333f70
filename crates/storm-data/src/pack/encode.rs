//! Turns input into tokens.

use super::cut::{PIECE_BYTES, pieces};
use super::input::{Content, Inputs, Job, Piece};
use super::record::{Chat, Instruction, Record};
use super::skip::Skipped;
use crate::tokenizer::{EncodedChat, SpecialTokens, Tokenizer};
use crate::{DataError, Kind, RecordPlace};
use std::mem;
use std::sync::Mutex;

/// Limit on sample parts encoded at once. Their memory overhead is many times their text.
const PARTS_MAX: usize = 1 << 14;

/// The tokens of a job.
pub(super) struct Encoded {
    pub(super) chunks: Vec<Chunk>,
    /// Bytes of input in memory.
    pub(super) bytes: u64,
    /// Bytes of the input files.
    pub(super) input_bytes: u64,
    pub(super) skipped: Skipped,
}

/// Consecutive tokens of one document or sample.
pub(super) struct Chunk {
    pub(super) tokens: Vec<u32>,
    /// For samples, whether each token counts in the loss.
    pub(super) learned: Vec<bool>,
    pub(super) begins: bool,
    pub(super) ends: bool,
}

/// How samples are encoded.
pub(super) struct Rules {
    pub(super) special_tokens: SpecialTokens,
    /// Why chats cannot be rendered, if they cannot.
    pub(super) no_template: Option<String>,
    /// Skip and count records that cannot be packed, instead of failing.
    pub(super) skip_bad: bool,
}

/// State shared by the encoding threads.
pub(super) struct Encoder<'a, O> {
    inputs: &'a Inputs,
    rules: &'a Rules,
    /// Taken by the first thread that needs a tokenizer.
    opened: Mutex<Option<Tokenizer>>,
    open: &'a O,
}

impl<'a, O: Fn() -> Result<Tokenizer, DataError> + Sync> Encoder<'a, O> {
    pub(super) fn new(
        inputs: &'a Inputs,
        rules: &'a Rules,
        opened: Tokenizer,
        open: &'a O,
    ) -> Encoder<'a, O> {
        Encoder { inputs, rules, opened: Mutex::new(Some(opened)), open }
    }

    /// A tokenizer for a thread.
    pub(super) fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        let opened = self.opened.lock().ok().and_then(|mut opened| opened.take());
        opened.map_or_else(self.open, Ok)
    }

    pub(super) fn encode(&self, tokenizer: &Tokenizer, job: Job) -> Result<Encoded, DataError> {
        let mut batch = Batch::new(tokenizer, self.rules.special_tokens);
        let mut skipped = Skipped::new(self.rules.skip_bad);
        match job.content {
            Content::Text(pieces) => pieces.into_iter().try_for_each(|piece| batch.piece(piece))?,
            Content::Skipped(error) => skipped.add_error(error)?,
            Content::Records { file, records } => {
                for (place, json) in records {
                    // Records may be long, so the JSON is dropped before encoding.
                    let mut bad = |problem| skipped.add(self.inputs.path(file), place, problem);
                    match json.and_then(|json| self.parse(&json)) {
                        Err(problem) => bad(problem)?,
                        Ok(Record::Chat(chat)) => {
                            batch.encode()?;
                            match self.chat(tokenizer, file, place, &chat)? {
                                Ok(chunk) => batch.chunks.push(chunk),
                                Err(problem) => bad(problem)?,
                            }
                        }
                        Ok(Record::Text(text)) => {
                            batch.piece(Piece { text, begins: true, ends: true })?;
                        }
                        Ok(Record::Instruction(instruction)) => {
                            batch.push(Waiting::Instruction(instruction))?;
                        }
                    }
                }
            }
        }
        let Job { bytes, input_bytes, .. } = job;
        Ok(Encoded { chunks: batch.finish()?, bytes, input_bytes, skipped })
    }

    /// Renders and encodes a chat in the tokenizer's process. The inner error concerns this chat
    /// alone.
    fn chat(
        &self,
        tokenizer: &Tokenizer,
        file: usize,
        place: RecordPlace,
        chat: &Chat,
    ) -> Result<Result<Chunk, String>, DataError> {
        if let Some(problem) = &self.rules.no_template {
            let (path, problem) = (self.inputs.path(file).to_owned(), problem.clone());
            return Err(DataError::Record { path, place, problem });
        }
        let json = match serde_json::to_vec(chat) {
            Ok(json) => json,
            Err(error) => return Ok(Err(error.to_string())),
        };
        Ok(tokenizer.chat(&json)?.map(|EncodedChat { tokens, learned }| Chunk {
            tokens,
            learned,
            begins: true,
            ends: true,
        }))
    }

    fn parse(&self, json: &str) -> Result<Record, String> {
        let record = Record::parse(json)?;
        if record.kind() == self.inputs.kind() {
            return Ok(record);
        }
        let problem = match self.inputs.kind() {
            Kind::Text => "is a chat or an instruction, but the input before it is text",
            Kind::Samples => "is text, but the first record is a chat or an instruction",
        };
        Err(format!("{problem}; pack them apart"))
    }
}

/// Documents or samples that are encoded together, about a megabyte at a time.
struct Batch<'a> {
    tokenizer: &'a Tokenizer,
    /// Applies to instructions.
    special_tokens: SpecialTokens,
    chunks: Vec<Chunk>,
    waiting: Vec<Waiting>,
    /// Bytes of text in `waiting`.
    text_bytes: usize,
    parts: usize,
}

/// An item to encode.
enum Waiting {
    Piece(Piece),
    Instruction(Instruction),
}

impl Waiting {
    fn texts(&self) -> impl Iterator<Item = &str> {
        let (first, second) = match self {
            Waiting::Piece(piece) => (&piece.text, None),
            Waiting::Instruction(sample) => (&sample.prompt, Some(&sample.completion)),
        };
        [Some(first), second].into_iter().flatten().map(String::as_str)
    }
}

impl<'a> Batch<'a> {
    fn new(tokenizer: &'a Tokenizer, special_tokens: SpecialTokens) -> Batch<'a> {
        let (chunks, waiting) = (Vec::new(), Vec::new());
        Batch { tokenizer, special_tokens, chunks, waiting, text_bytes: 0, parts: 0 }
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
        // A batch never mixes documents and samples.
        let special_tokens = match waiting.first() {
            Some(Waiting::Instruction(_)) => self.special_tokens,
            _ => SpecialTokens::AsText,
        };
        let all = waiting.iter().flat_map(Waiting::texts);
        let mut texts = Texts::new(self.tokenizer, special_tokens, all);
        for waiting in &waiting {
            let chunk = match waiting {
                Waiting::Piece(piece) => {
                    let mut tokens = Vec::new();
                    texts.next_into(&mut tokens)?;
                    document(self.tokenizer, tokens, piece)
                }
                Waiting::Instruction(_) => sample(self.tokenizer, &mut texts)?,
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

/// A document, or a piece of one, with its special tokens. An empty document gets none.
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

/// An instruction with its special tokens, unless they are already written in it.
fn sample<'t>(
    tokenizer: &Tokenizer,
    texts: &mut Texts<'_, 't, impl Iterator<Item = &'t str>>,
) -> Result<Chunk, DataError> {
    let info = tokenizer.info();
    let mut tokens = Vec::new();
    texts.next_into(&mut tokens)?;
    if let Some(id) = info.begin_of_text.filter(|id| tokens.first() != Some(id)) {
        tokens.insert(0, id);
    }
    let mut learned = vec![false; tokens.len()];
    texts.next_into(&mut tokens)?;
    let end =
        info.end_of_text.filter(|id| tokens.len() == learned.len() || tokens.last() != Some(id));
    tokens.extend(end);
    learned.resize(tokens.len(), true);
    Ok(Chunk { tokens, learned, begins: true, ends: true })
}

/// Encodes texts in order, long ones in pieces, with requests of about a megabyte to the tokenizer.
struct Texts<'a, 't, I> {
    tokenizer: &'a Tokenizer,
    special_tokens: SpecialTokens,
    texts: I,
    /// Encoded pieces, and whether each is the last of its text, in reverse order.
    encoded: Vec<(Vec<u32>, bool)>,
    /// Pieces of a text that are not encoded yet, in reverse order.
    cut: Vec<&'t str>,
}

impl<'a, 't, I: Iterator<Item = &'t str>> Texts<'a, 't, I> {
    fn new(tokenizer: &'a Tokenizer, special_tokens: SpecialTokens, texts: I) -> Texts<'a, 't, I> {
        Texts { tokenizer, special_tokens, texts, encoded: Vec::new(), cut: Vec::new() }
    }

    /// Appends the tokens of the next text to `tokens`.
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
        // For each piece: whether it is sent to the tokenizer (empty pieces are not), and whether
        // it is the last of its text.
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
            false => self.tokenizer.encode_all(&request, self.special_tokens)?.into_iter(),
        };
        let mut ids = |asked: bool| asked.then(|| encoded.next()).flatten().unwrap_or_default();
        self.encoded = slots.into_iter().map(|(asked, last)| (ids(asked), last)).collect();
        self.encoded.reverse();
        Ok(())
    }
}
