//! The process that runs third-party tokenizer code.
//!
//! It reads requests from standard input and writes replies to standard output, and ends when there are no
//! more. If it fails, the process that started it survives and reports that.

use super::chat::{ChatSetup, Chats, Frame, KnownTokens, Rendered};
use super::info::VOCABULARY_MAX;
use super::protocol::{
    Ask, DONE, FAILED, LEARNED, Open, Opened, REFUSED, put, read_frame, take, take_bytes,
    write_frame,
};
use super::{ChatTokens, TokenizerInfo, TokenizerKind, bytes};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};
use rustix::time::{ClockId, clock_gettime};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokenizers::Tokenizer;

/// Address space limit of the process. The largest common tokenizers need a few hundred megabytes.
const MEMORY_BYTES_MAX: u64 = 4 << 30;

/// Names of the end of a document, in order of preference.
const END_OF_TEXT: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"];

/// Most tokens per byte of text. Normalization makes some characters longer, but none this much.
const TOKENS_PER_BYTE_MAX: usize = 16;

/// Serves requests until there are no more. For a program that does nothing else: it limits memory and processor
/// time of the process, and the system kills it when the thread that started it ends.
///
/// # Errors
/// If the requesting process is gone.
pub fn tokenize_worker() -> io::Result<()> {
    // An endless regular expression would continue to run although nothing reads its reply.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    for (resource, limit) in [(Resource::As, MEMORY_BYTES_MAX), (Resource::Core, 0)] {
        // A lower existing limit stays.
        let limit = getrlimit(resource).current.map_or(limit, |current| current.min(limit));
        setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })?;
    }
    // The message of a panic goes into the reply.
    std::panic::set_hook(Box::new(|_| {}));
    serve(&mut BufReader::new(io::stdin()), &mut BufWriter::new(io::stdout()))
}

fn serve(input: &mut impl Read, output: &mut impl Write) -> io::Result<()> {
    let Some(request) = read_frame(input)? else { return Ok(()) };
    let mut json = &request[..];
    let asked = take(&mut json).and_then(|length| take_bytes(&mut json, length as usize));
    let asked: Open = serde_json::from_slice(asked.unwrap_or_default())?;
    // The parent may have died before the system was asked to kill this process with it.
    if Pid::as_raw(getppid()) != asked.parent {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    limit_processor_time(asked.request_seconds_max)?;
    let mut served = match guarded(|| Serving::open(&asked, json)) {
        Ok((served, opened)) => {
            let reply = serde_json::to_vec(&opened)?;
            write_frame(output, &[&[DONE], &reply])?;
            served
        }
        Err(problem) => return write_frame(output, &[&[FAILED], problem.as_bytes()]),
    };
    while let Some(request) = read_frame(input)? {
        limit_processor_time(asked.request_seconds_max)?;
        match guarded(|| served.answer(&request)) {
            Ok(Ok(reply)) => write_frame(output, &[&[DONE], &reply])?,
            Ok(Err(problem)) => write_frame(output, &[&[REFUSED], problem.as_bytes()])?,
            Err(problem) => write_frame(output, &[&[FAILED], problem.as_bytes()])?,
        }
    }
    Ok(())
}

/// Lets the process run for this many more seconds. The next request renews it, so that packing may take as long
/// as it needs.
fn limit_processor_time(seconds: u64) -> io::Result<()> {
    let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec;
    // Rounded up: the limit is in whole seconds.
    let limit = u64::try_from(used).unwrap_or(0).saturating_add(1).saturating_add(seconds);
    let maximum = getrlimit(Resource::Cpu).maximum;
    let current = Some(maximum.map_or(limit, |maximum| limit.min(maximum)));
    Ok(setrlimit(Resource::Cpu, Rlimit { current, maximum })?)
}

/// Turns a panic into an error.
fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("the tokenizer's code failed: {}", text.unwrap_or("no reason given")))
    })
}

fn open(asked: &Open, json: &[u8]) -> Result<(Tokenizer, Opened), String> {
    let mut tokenizer = Tokenizer::from_bytes(json).map_err(|error| error.to_string())?;
    // No truncation and no padding.
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

/// The one token that the tokenizer adds before every text, if it does.
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

/// What this process serves.
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

    /// The reply to a request; the inner error is about the request itself.
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

    /// The chat renderer, created for the first chat; the inner error is the template's.
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

    /// The ids of a rendered chat, with a mark on learned ones: those that contain any learned text.
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
    // Plus the special tokens around a text.
    match tokens / TOKENS_PER_BYTE_MAX > text.len() {
        true => Err(format!("it makes {tokens} tokens of {} bytes of text", text.len())),
        false => Ok(()),
    }
}
