//! The worker process of a tokenizer. It reads requests from standard input and writes replies to
//! standard output.

use super::chat::{ChatSetup, Chats, Frame, KnownTokens, Rendered};
use super::info::VOCABULARY_MAX;
pub(crate) use super::protocol::Open;
use super::protocol::{Ask, DONE, FAILED, LEARNED, Opened, REFUSED, put, take, take_bytes};
use super::{ChatTokens, TokenizerInfo, TokenizerKind, bytes};
use crate::worker::{ProcessorTime, guarded, read_frame, write_frame};
use std::io::{self, Read, Write};
use tokenizers::Tokenizer;

/// Address space limit of the process. The largest common tokenizers need a few hundred megabytes.
pub(crate) const MEMORY_BYTES_MAX: u64 = 4 << 30;

/// The subject of the error message if it panics.
const CODE: &str = "the tokenizer's code";

/// Names of the end-of-text token, in order of preference.
const END_OF_TEXT: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"];

/// Limit on tokens per byte of text. Normalization lengthens some characters, but none this much.
const TOKENS_PER_BYTE_MAX: usize = 16;

/// Serves requests until there are no more.
pub(crate) fn serve(
    asked: &Open,
    json: &[u8],
    time: &ProcessorTime,
    input: &mut impl Read,
    output: &mut impl Write,
) -> io::Result<()> {
    let mut served = match guarded(CODE, || Serving::open(asked, json)) {
        Ok((served, opened)) => {
            let reply = serde_json::to_vec(&opened)?;
            write_frame(output, &[&[DONE], &reply])?;
            served
        }
        Err(problem) => return write_frame(output, &[&[FAILED], problem.as_bytes()]),
    };
    while let Some(request) = read_frame(input)? {
        time.renew()?;
        match guarded(CODE, || served.answer(&request)) {
            Ok(Ok(reply)) => write_frame(output, &[&[DONE], &reply])?,
            Ok(Err(problem)) => write_frame(output, &[&[REFUSED], problem.as_bytes()])?,
            Err(problem) => write_frame(output, &[&[FAILED], problem.as_bytes()])?,
        }
    }
    Ok(())
}

fn open(asked: &Open, json: &[u8]) -> Result<(Tokenizer, Opened), String> {
    let mut tokenizer = Tokenizer::from_bytes(json).map_err(|error| error.to_string())?;
    // Disable truncation and padding.
    tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
    tokenizer.with_padding(None);
    let largest = tokenizer.get_vocab(true).into_values().max();
    let vocabulary = largest.and_then(|id| id.checked_add(1)).ok_or("its vocabulary is empty")?;
    if vocabulary > VOCABULARY_MAX {
        return Err(format!("token {} is beyond what a model can have", vocabulary - 1));
    }
    let end_of_text = match &asked.end_of_text {
        Some(name) => {
            let id = tokenizer.token_to_id(name);
            Some(id.ok_or_else(|| format!("it has no token `{name}` for the end of a text"))?)
        }
        None => END_OF_TEXT.into_iter().find_map(|name| tokenizer.token_to_id(name)),
    };
    let marks = (tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>"));
    let chat = match marks {
        (Some(start), Some(end)) => Some(ChatTokens { start, end }),
        _ => None,
    };
    let begin_of_text = begin_of_text(&tokenizer)?;
    let opened = Opened { vocabulary, end_of_text, begin_of_text, chat };
    Ok((tokenizer, opened))
}

/// The single token that the tokenizer adds before every text, if it adds one.
fn begin_of_text(tokenizer: &Tokenizer) -> Result<Option<u32>, String> {
    let encode = |special: bool| {
        let encoding = tokenizer.encode_fast("a", special).map_err(|error| error.to_string())?;
        Ok::<_, String>(encoding.get_ids().to_vec())
    };
    let (plain, dressed) = (encode(false)?, encode(true)?);
    Ok(match dressed.split_first() {
        Some((&first, rest)) if dressed != plain && rest.starts_with(&plain) => Some(first),
        _ => None,
    })
}

/// The state of the worker.
struct Serving {
    encoder: Encoder,
    opened: Opened,
    setup: Option<ChatSetup>,
    /// Created from `setup` for the first chat.
    chats: Option<Chats>,
}

enum Encoder {
    Bytes,
    HuggingFace(Box<Tokenizer>),
}

impl Serving {
    fn open(asked: &Open, json: &[u8]) -> Result<(Serving, Opened), String> {
        let (encoder, opened) = match asked.kind {
            TokenizerKind::Bytes => {
                let info = bytes::info();
                let TokenizerInfo { vocabulary, end_of_text, begin_of_text, chat, .. } = info;
                (Encoder::Bytes, Opened { vocabulary, end_of_text, begin_of_text, chat })
            }
            TokenizerKind::HuggingFace => {
                let (tokenizer, opened) = open(asked, json)?;
                (Encoder::HuggingFace(Box::new(tokenizer)), opened)
            }
        };
        let setup = asked.chat.clone();
        let serving = Serving { encoder, opened: opened.clone(), setup, chats: None };
        Ok((serving, opened))
    }

    /// The reply to a request. The inner error concerns the request itself.
    fn answer(&mut self, request: &[u8]) -> Result<Result<Vec<u8>, String>, String> {
        let (&ask, rest) = request.split_first().ok_or("an empty request")?;
        let asks = [
            Ask::EncodeText,
            Ask::EncodeParsed,
            Ask::EncodePrompt,
            Ask::Decode,
            Ask::Chat,
            Ask::ChatPrompt,
        ];
        let ask = asks.into_iter().find(|known| *known as u8 == ask).ok_or("an unknown request")?;
        match ask {
            Ask::Decode => self.decode(rest).map(Ok),
            Ask::Chat => self.chat(rest),
            Ask::ChatPrompt => self.chat_prompt(rest),
            _ => self.encode_all(ask, rest).map(Ok),
        }
    }

    fn encode_all(&mut self, ask: Ask, mut rest: &[u8]) -> Result<Vec<u8>, String> {
        let broken = || "a broken request".to_owned();
        let mut reply = Vec::new();
        let count = take(&mut rest).ok_or_else(broken)?;
        for _ in 0..count {
            let length = take(&mut rest).ok_or_else(broken)?;
            let text = take_bytes(&mut rest, length as usize).ok_or_else(broken)?;
            let text = std::str::from_utf8(text).map_err(|error| error.to_string())?;
            let ids = self.encode(ask, text)?;
            put(&mut reply, [ids.len() as u32]);
            put(&mut reply, ids);
        }
        Ok(reply)
    }

    fn encode(&mut self, ask: Ask, text: &str) -> Result<Vec<u32>, String> {
        let tokenizer = match &mut self.encoder {
            Encoder::Bytes => return Ok(bytes::encode(text)),
            Encoder::HuggingFace(tokenizer) => tokenizer,
        };
        tokenizer.set_encode_special_tokens(ask == Ask::EncodeText);
        let encoding = tokenizer.encode_fast(text, ask == Ask::EncodePrompt);
        let encoding = encoding.map_err(|error| error.to_string())?;
        let ids = encoding.get_ids();
        check_count(ids.len(), text)?;
        Ok(ids.to_vec())
    }

    fn decode(&self, mut rest: &[u8]) -> Result<Vec<u8>, String> {
        let ids: Vec<u32> = std::iter::from_fn(|| take(&mut rest)).collect();
        let text = match &self.encoder {
            Encoder::Bytes => bytes::decode(&ids),
            Encoder::HuggingFace(tokenizer) => {
                tokenizer.decode(&ids, false).map_err(|error| error.to_string())?
            }
        };
        Ok(text.into_bytes())
    }

    /// The chat renderer, created for the first chat. The inner error is the template's.
    fn chats(&mut self) -> Result<Result<(&Chats, Frame), String>, String> {
        let Some(setup) = &self.setup else { return Err("chats were not asked for".to_owned()) };
        if self.chats.is_none() {
            match Chats::new(setup, self.encoder.known_tokens()) {
                Ok(chats) => self.chats = Some(chats),
                Err(problem) => return Ok(Err(problem)),
            }
        }
        let chats = self.chats.as_ref().map(|chats| (chats, setup.frame));
        chats.map(Ok).ok_or_else(|| "chats were not made ready".to_owned())
    }

    fn chat(&mut self, json: &[u8]) -> Result<Result<Vec<u8>, String>, String> {
        let rendered = self.chats()?.and_then(|(chats, frame)| Ok((chats.render(json)?, frame)));
        let (rendered, frame) = match rendered {
            Ok(rendered) => rendered,
            Err(problem) => return Ok(Err(problem)),
        };
        let mut marked = self.encoder.encode_chat(&rendered)?;
        if frame == Frame::Document && !rendered.text.is_empty() {
            let end = self.opened.end_of_text;
            let learned = if rendered.ends_with_answer { LEARNED } else { 0 };
            marked.extend(end.map(|id| id | learned));
            marked.splice(0..0, self.opened.begin_of_text);
        }
        let mut reply = Vec::with_capacity(4 * marked.len());
        put(&mut reply, marked);
        Ok(Ok(reply))
    }
}

impl Serving {
    fn chat_prompt(&mut self, json: &[u8]) -> Result<Result<Vec<u8>, String>, String> {
        let prompt = self.chats()?.and_then(|(chats, frame)| Ok((chats.prompt(json)?, frame)));
        let (text, frame) = match prompt {
            Ok(prompt) => prompt,
            Err(problem) => return Ok(Err(problem)),
        };
        let mut ids = self.encode(Ask::EncodeParsed, &text)?;
        if frame == Frame::Document {
            ids.splice(0..0, self.opened.begin_of_text);
        }
        let mut reply = Vec::with_capacity(4 * ids.len());
        put(&mut reply, ids);
        Ok(Ok(reply))
    }
}

impl Encoder {
    fn known_tokens(&self) -> KnownTokens {
        let mut known = KnownTokens::default();
        let Encoder::HuggingFace(tokenizer) = self else { return known };
        for token in tokenizer.get_added_tokens_decoder().into_values() {
            match token.special {
                true => known.special.push(token.content),
                false => known.other.push(token.content),
            }
        }
        known
    }

    /// The ids of a rendered chat. Those that contain any text that counts in the loss are marked.
    fn encode_chat(&mut self, rendered: &Rendered) -> Result<Vec<u32>, String> {
        let (mut ids, offsets): (Vec<u32>, Vec<(usize, usize)>) = match self {
            Encoder::Bytes => {
                let ids = bytes::encode(&rendered.text);
                let offsets = (0..ids.len()).map(|at| (at, at + 1)).collect();
                (ids, offsets)
            }
            Encoder::HuggingFace(tokenizer) => {
                tokenizer.set_encode_special_tokens(false);
                let encoding = tokenizer.encode(rendered.text.as_str(), false);
                let encoding = encoding.map_err(|error| error.to_string())?;
                check_count(encoding.len(), &rendered.text)?;
                (encoding.get_ids().to_vec(), encoding.get_offsets().to_vec())
            }
        };
        for span in &rendered.learned {
            let first = offsets.partition_point(|&(_, end)| end <= span.start);
            let end = offsets.partition_point(|&(start, _)| start < span.end);
            if let Some(learned) = ids.get_mut(first..end) {
                learned.iter_mut().for_each(|id| *id |= LEARNED);
            }
        }
        Ok(ids)
    }
}

fn check_count(tokens: usize, text: &str) -> Result<(), String> {
    // Integer division leaves room for the special tokens around a text.
    match tokens / TOKENS_PER_BYTE_MAX > text.len() {
        true => Err(format!("it makes {tokens} tokens of {} bytes of text", text.len())),
        false => Ok(()),
    }
}
