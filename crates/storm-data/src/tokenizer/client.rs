//! The client of the tokenizer process.

use super::protocol::{Ask, DONE, LEARNED, Open, Opened, REFUSED, put, take};
use super::{Served, TokenizerInfo, TokenizerKind};
use crate::DataError;
use crate::manifest::sha256_hex;
use crate::worker::{Task, WorkerCommand, read_frame, write_frame};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// The tokens of a chat, and whether each counts in the loss.
#[derive(Debug, Default)]
pub(crate) struct EncodedChat {
    pub(crate) tokens: Vec<u32>,
    pub(crate) learned: Vec<bool>,
}

/// The tokens of a chat, up to where the answer starts.
pub(super) enum Prompted {
    Tokens(Vec<u32>),
    /// The problem with the chat.
    Refused(String),
}

/// The reply to a request.
enum Reply {
    Done(Vec<u8>),
    /// Why the request is invalid.
    Refused(String),
}

/// A frame from the process. `None` at its end.
type Frame = io::Result<Option<Vec<u8>>>;

/// A running tokenizer process.
#[derive(Debug)]
pub(super) struct Worker {
    child: Child,
    input: ChildStdin,
    replies: Receiver<Frame>,
    reply_time_max: Duration,
    /// The tokenizer's path, for messages.
    path: PathBuf,
    /// Why it can no longer be used. A late reply would be mistaken for the reply to another
    /// request.
    broken: Option<String>,
}

impl Worker {
    pub(super) fn start(
        served: &Served<'_>,
        command: &WorkerCommand,
    ) -> Result<(Worker, TokenizerInfo), DataError> {
        let path = served.path;
        let problem = |problem: String| DataError::Tokenizer { path: path.to_owned(), problem };
        let no_start = |error| problem(format!("cannot start its process: {error}"));
        let (child, input, replies) = spawn(command).map_err(no_start)?;
        let (path, reply_time_max) = (path.to_owned(), command.reply_time_max);
        let mut worker = Worker { child, input, replies, reply_time_max, path, broken: None };
        let kind = match served.json {
            Some(_) => TokenizerKind::HuggingFace,
            None => TokenizerKind::Bytes,
        };
        let json = served.json.unwrap_or_default();
        let open = Open {
            kind,
            chat: served.chat.cloned(),
            end_of_text: served.end_of_text.map(str::to_owned),
        };
        let begin = command.begin(Task::Tokenizer(open), json);
        let begin = begin.map_err(|error| problem(error.to_string()))?;
        let reply = worker.ask_with(|input| input.write_all(&begin))?;
        let opened: Opened = serde_json::from_slice(&reply).map_err(|_| worker.nonsense())?;
        let info = TokenizerInfo {
            kind,
            vocabulary: opened.vocabulary,
            end_of_text: opened.end_of_text,
            begin_of_text: opened.begin_of_text,
            chat: opened.chat,
            sha256: served.json.map(sha256_hex),
        };
        match info.is_sound() {
            true => Ok((worker, info)),
            false => Err(worker.nonsense()),
        }
    }

    pub(super) fn encode(
        &mut self,
        ask: Ask,
        texts: &[&str],
        vocabulary: u32,
    ) -> Result<Vec<Vec<u32>>, DataError> {
        let mut request = vec![ask as u8];
        put(&mut request, [texts.len() as u32]);
        for text in texts {
            put(&mut request, [text.len() as u32]);
            request.extend(text.as_bytes());
        }
        let reply = self.ask(&[&request])?;
        let mut rest = &reply[..];
        let mut encode = || -> Option<Vec<u32>> {
            let count = take(&mut rest)? as usize;
            let ids = rest.split_at_checked(count.checked_mul(4)?)?;
            rest = ids.1;
            let ids = ids.0.as_chunks().0.iter().map(|four| u32::from_le_bytes(*four));
            ids.map(|id| (id < vocabulary).then_some(id)).collect()
        };
        let encoded: Option<Vec<Vec<u32>>> = texts.iter().map(|_| encode()).collect();
        encoded.ok_or_else(|| self.nonsense())
    }

    pub(super) fn decode(&mut self, ids: &[u32]) -> Result<String, DataError> {
        let mut request = vec![Ask::Decode as u8];
        put(&mut request, ids.iter().copied());
        let reply = self.ask(&[&request])?;
        String::from_utf8(reply).map_err(|_| self.nonsense())
    }

    /// The tokens of a chat, or the problem with it.
    pub(super) fn chat(
        &mut self,
        json: &[u8],
        vocabulary: u32,
    ) -> Result<Result<EncodedChat, String>, DataError> {
        let reply = match self.reply(&[&[Ask::Chat as u8], json])? {
            Reply::Done(reply) => reply,
            Reply::Refused(problem) => return Ok(Err(problem)),
        };
        let mut rest = &reply[..];
        let mut chat = EncodedChat::default();
        while let Some(marked) = take(&mut rest) {
            let id = marked & !LEARNED;
            if id >= vocabulary {
                return Err(self.nonsense());
            }
            chat.tokens.push(id);
            chat.learned.push(marked & LEARNED != 0);
        }
        match rest.is_empty() {
            true => Ok(Ok(chat)),
            false => Err(self.nonsense()),
        }
    }

    /// The tokens of a chat up to the point where the assistant answers.
    pub(super) fn chat_prompt(
        &mut self,
        json: &[u8],
        vocabulary: u32,
    ) -> Result<Prompted, DataError> {
        let reply = match self.reply(&[&[Ask::ChatPrompt as u8], json])? {
            Reply::Done(reply) => reply,
            Reply::Refused(problem) => return Ok(Prompted::Refused(problem)),
        };
        let mut rest = &reply[..];
        let mut tokens = Vec::new();
        while let Some(id) = take(&mut rest) {
            tokens.push(id);
        }
        match rest.is_empty() && tokens.iter().all(|&id| id < vocabulary) {
            true => Ok(Prompted::Tokens(tokens)),
            false => Err(self.nonsense()),
        }
    }

    /// Sends a request and waits for its reply.
    fn ask(&mut self, request: &[&[u8]]) -> Result<Vec<u8>, DataError> {
        self.ask_with(|input| write_frame(input, request))
    }

    fn ask_with(
        &mut self,
        send: impl FnOnce(&mut ChildStdin) -> io::Result<()>,
    ) -> Result<Vec<u8>, DataError> {
        match self.reply_with(send)? {
            Reply::Done(reply) => Ok(reply),
            Reply::Refused(problem) => Err(self.problem(problem)),
        }
    }

    fn reply(&mut self, request: &[&[u8]]) -> Result<Reply, DataError> {
        self.reply_with(|input| write_frame(input, request))
    }

    fn reply_with(
        &mut self,
        send: impl FnOnce(&mut ChildStdin) -> io::Result<()>,
    ) -> Result<Reply, DataError> {
        if let Some(problem) = &self.broken {
            return Err(self.problem(problem.clone()));
        }
        let mut reply = match send(&mut self.input) {
            // A process that has exited may have sent the reason first.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                return Err(self.give_up(format!("its process takes no requests: {error}")));
            }
            _ => match self.replies.recv_timeout(self.reply_time_max) {
                Ok(Ok(Some(reply))) => reply,
                Err(RecvTimeoutError::Timeout) => {
                    let time = self.reply_time_max;
                    return Err(self.give_up(format!("it did not answer within {time:?}")));
                }
                _ => return Err(self.ended()),
            },
        };
        match reply.first().copied() {
            Some(DONE) => {
                reply.remove(0);
                Ok(Reply::Done(reply))
            }
            Some(REFUSED) => Ok(Reply::Refused(String::from_utf8_lossy(&reply[1..]).into_owned())),
            Some(_) => Err(self.problem(String::from_utf8_lossy(&reply[1..]).into_owned())),
            None => Err(self.nonsense()),
        }
    }

    /// Kills the process. Later requests fail with this reason.
    fn give_up(&mut self, problem: String) -> DataError {
        self.child.kill().ok();
        self.broken = Some(problem.clone());
        self.problem(problem)
    }

    fn problem(&self, problem: String) -> DataError {
        DataError::Tokenizer { path: self.path.clone(), problem }
    }

    fn nonsense(&self) -> DataError {
        self.problem("its process answered what makes no sense".to_owned())
    }

    /// Kills the process and describes how it ended.
    fn ended(&mut self) -> DataError {
        self.child.kill().ok();
        let how = match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        self.give_up(format!(
            "its process ended ({how}): the file makes the tokenizer's code crash or take more \
             memory than it is allowed"
        ))
    }
}

/// Starts the process, and a thread that reads its replies so that waiting can time out.
///
/// That thread also starts the process, because the system kills the process when the *thread* that
/// started it exits. This thread lives as long as a reply can arrive.
fn spawn(command: &WorkerCommand) -> io::Result<(Child, ChildStdin, Receiver<Frame>)> {
    let mut process = command.process();
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let (started, start) = channel();
    let (sender, replies) = channel();
    std::thread::Builder::new().spawn(move || {
        let mut child = match process.spawn() {
            Ok(child) => child,
            Err(error) => return drop(started.send(Err(error))),
        };
        let pipes = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(mut output)) = pipes else { return };
        if started.send(Ok((child, input))).is_err() {
            return;
        }
        loop {
            let frame = read_frame(&mut output);
            let more = matches!(frame, Ok(Some(_)));
            if sender.send(frame).is_err() || !more {
                break;
            }
        }
    })?;
    let (child, input) = start.recv().map_err(|_| io::Error::other("it has no pipes"))??;
    Ok((child, input, replies))
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It has no state to save.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
