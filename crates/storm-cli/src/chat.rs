//! `storm chat`: a conversation with a model, formatted with its chat template.

use crate::size::positive;
use crate::source::{ModelSource, Which};
use crate::writing::{self, Ends, Finish, WritingArgs, show};
use crate::{UsageError, data};
use anyhow::{Context, Result};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use storm_data::{ChatMessage, ChatTokenizer};
use storm_files::{IfPresent, StageError, StagedFile, open_plain};
use storm_train::{Decoder, Generator, Sampling};

/// Size limits of a message and of a saved conversation.
const MESSAGE_BYTES_MAX: u64 = 1 << 20;
const FILE_BYTES_MAX: u64 = 16 << 20;

const HELP: &str = "\
/reset      start over
/save FILE  save the conversation as a line of JSONL, for `storm data pack` and --load
/help       show this list
/quit       quit; the end of the input does the same";

#[derive(Args)]
pub(crate) struct ChatArgs {
    /// Model: a Hugging Face directory, a run's folder (its newest checkpoint), a checkpoint's folder, an adapter's
    /// folder, or a model on the hub (`OWNER/MODEL`).
    model: PathBuf,
    #[command(flatten)]
    which: Which,
    /// System message.
    #[arg(long)]
    system: Option<String>,
    /// Continue a conversation that /save wrote.
    #[arg(long, conflicts_with = "system")]
    load: Option<PathBuf>,
    #[command(flatten)]
    writing: WritingArgs,
    /// Most tokens of an answer; the model may end it earlier.
    #[arg(long, default_value_t = 1024, value_parser = positive)]
    tokens: usize,
    /// Most tokens of a conversation. Default: 4096, or the model's positions if it has fewer.
    #[arg(long, value_parser = positive)]
    seq: Option<usize>,
}

pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    let source = ModelSource::open(&args.model, &args.which)?;
    let tokenizer = source.tokenizer(args.writing.tokenizer.as_deref())?;
    let template = source.chat_template(args.writing.chat_template.as_deref());
    let chats = ChatTokenizer::open(&tokenizer, &template, &data::worker()?)?;
    let first = match &args.load {
        Some(path) => load(path)?,
        None => args.system.iter().map(|text| ChatMessage::new("system", text)).collect(),
    };
    let window = args.seq.unwrap_or_else(|| writing::window(&source.config, usize::MAX));
    let mut conversation = Conversation {
        ends: source.ends_of_answer(&chats)?,
        model: args.writing.load(&source, window)?,
        sampling: args.writing.sampling(),
        tokens: args.tokens,
        messages: first.clone(),
        first,
        chats,
    };
    let is_watched = io::stdin().is_terminal();
    if is_watched {
        eprintln!("chat template {template}; /help lists the commands");
    }
    loop {
        if is_watched {
            prompt();
        }
        let Some(line) = read_line()? else { return Ok(()) };
        match conversation.take(line.trim()) {
            Ok(Next::Leave) => return Ok(()),
            Ok(Next::Stay) => {}
            // At a terminal the user can try again. From a pipe, the first error ends the command.
            Err(error) if is_watched => eprintln!("error: {}", crate::message(&error)),
            Err(error) => return Err(error),
        }
    }
}

/// What to do after an input line.
enum Next {
    Stay,
    Leave,
}

struct Conversation {
    chats: ChatTokenizer,
    ends: Ends,
    /// Keeps its KV cache between turns, so a turn costs only its new tokens.
    model: Decoder,
    sampling: Sampling,
    /// Most tokens of an answer.
    tokens: usize,
    /// The messages the conversation starts with.
    first: Vec<ChatMessage>,
    messages: Vec<ChatMessage>,
}

impl Conversation {
    fn take(&mut self, line: &str) -> Result<Next> {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        match (command, rest.trim()) {
            ("", _) => {}
            ("/quit" | "/exit", "") => return Ok(Next::Leave),
            ("/help", "") => eprintln!("{HELP}"),
            ("/reset", "") => {
                self.messages.clone_from(&self.first);
                eprintln!("started over");
            }
            ("/save", "") => {
                return Err(UsageError(
                    "/save needs the name of a file: /save chat.jsonl".to_owned(),
                )
                .into());
            }
            ("/save", file) => {
                save(Path::new(file), &self.messages)?;
                eprintln!("saved {} messages to {file}", self.messages.len());
            }
            // Not a command if it contains another slash: a message may start with a path.
            (command, "") if command.starts_with('/') && !command[1..].contains('/') => {
                return Err(
                    UsageError(format!("{command} is not a command; /help lists them")).into()
                );
            }
            _ => self.answer(line)?,
        }
        Ok(Next::Stay)
    }

    /// Generates the answer to a message. Both join the conversation only if generation succeeds.
    fn answer(&mut self, message: &str) -> Result<()> {
        let mut messages = self.messages.clone();
        messages.push(ChatMessage::new("user", message));
        let prompt = self.chats.prompt(&messages)?;
        let window = self.model.window();
        let Some(room) = window.checked_sub(prompt.len()) else {
            return Err(UsageError(format!(
                "the conversation has {} tokens with this message, and the context holds {window}; /reset starts \
                 over, and a larger --seq holds more if the model has the positions",
                prompt.len()
            ))
            .into());
        };
        // The last token is sampled from a full window but never fed back.
        let limit = self.tokens.min(room + 1);
        let mut sampling = self.sampling;
        sampling.seed = sampling.seed.wrapping_add(self.messages.len() as u64);
        let mut generator = Generator::new(&mut self.model, prompt, sampling)?;
        let mut answer = String::new();
        let text = self.chats.tokenizer().stream();
        let written = writing::write(&mut generator, text, &self.ends, limit, |piece| {
            answer.push_str(piece);
            show(piece)
        });
        show("\n")?;
        match written?.finish {
            Finish::End => {}
            Finish::Length if limit < self.tokens => eprintln!(
                "the answer is cut off: the conversation fills the context of {window} tokens; /reset starts over"
            ),
            Finish::Length => eprintln!("the answer is cut off after {limit} tokens (--tokens)"),
        }
        messages.push(ChatMessage::new("assistant", answer.trim()));
        self.messages = messages;
        Ok(())
    }
}

fn prompt() {
    let _ = write!(io::stderr(), "> ");
}

/// Reads the next line; `None` at end of input.
fn read_line() -> Result<Option<String>> {
    let mut line = Vec::new();
    let mut input = io::stdin().lock().take(MESSAGE_BYTES_MAX + 1);
    input.read_until(b'\n', &mut line).context("cannot read from standard input")?;
    if line.len() as u64 > MESSAGE_BYTES_MAX {
        let problem = format!("a message can have at most {MESSAGE_BYTES_MAX} bytes");
        return Err(UsageError(problem).into());
    }
    let text = String::from_utf8(line)
        .map_err(|_| UsageError("a message must be UTF-8 text".to_owned()))?;
    Ok(Some(text).filter(|text| !text.is_empty()))
}

#[derive(Serialize, Deserialize)]
struct Saved {
    messages: Vec<ChatMessage>,
}

fn save(path: &Path, messages: &[ChatMessage]) -> Result<()> {
    let line = serde_json::to_string(&Saved { messages: messages.to_vec() })?;
    let written = || -> Result<(), StageError> {
        let mut out = StagedFile::create(path, IfPresent::Refuse)?;
        let io = |source| StageError::Io { doing: "write", path: path.to_owned(), source };
        writeln!(out, "{line}").map_err(io)?;
        out.finish()
    };
    written().with_context(|| format!("cannot save to {}", path.display()))
}

fn load(path: &Path) -> Result<Vec<ChatMessage>, UsageError> {
    let bad = |problem: String| UsageError(format!("cannot load {}: {problem}", path.display()));
    let mut text = Vec::new();
    open_plain(path)
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut text))
        .map_err(|error| bad(error.to_string()))?;
    let saved: Saved = serde_json::from_slice(&text)
        .map_err(|error| bad(format!("it is not a conversation that /save wrote: {error}")))?;
    Ok(saved.messages)
}
