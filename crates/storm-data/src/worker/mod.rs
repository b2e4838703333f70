//! The process that runs third-party code on untrusted files: tokenizers, and tables in Parquet.
//!
//! Such code panics on some files; others make it use all memory, overflow its stack or loop forever. Most of this
//! cannot be caught in the same process, so it runs in a separate one with limits. If that one fails, the process that
//! started it survives and reports it.

mod frames;

pub(crate) use frames::{put_frame, read_frame, write_frame};

use crate::tokenizer::worker as tokenizer;
use crate::{DataError, table};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, BufReader, BufWriter};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Default time limit for one request, a batch of about a megabyte of text.
const REPLY_TIME_MAX: Duration = Duration::from_secs(300);

/// The program that runs third-party code. It must call [`run_worker`] in the process that is started; a wrapper must
/// `exec` it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerCommand {
    /// Its path.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The time limit for one request: a batch of about a megabyte of text.
    pub reply_time_max: Duration,
}

impl WorkerCommand {
    /// The running program, called with these arguments.
    ///
    /// # Errors
    /// If the system does not say where the program is.
    pub fn this_program<A: Into<OsString>>(
        arguments: impl IntoIterator<Item = A>,
    ) -> Result<WorkerCommand, DataError> {
        // The file may have been replaced since; this path names the running one.
        let running = Path::new("/proc/self/exe");
        let program = match running.exists() {
            true => running.to_owned(),
            false => std::env::current_exe().map_err(DataError::io(running))?,
        };
        let arguments = arguments.into_iter().map(Into::into).collect();
        Ok(WorkerCommand { program, arguments, reply_time_max: REPLY_TIME_MAX })
    }

    pub(crate) fn process(&self) -> Command {
        let mut process = Command::new(&self.program);
        process.args(&self.arguments);
        process
    }

    /// The first frame to the process: its task, and the bytes that belong to it.
    pub(crate) fn begin(&self, task: Task, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let begin = Begin {
            parent: rustix::process::getpid().as_raw_nonzero().get(),
            // Longer than the wait for a reply, so the wait ends first: its error says more.
            request_seconds_max: self.reply_time_max.as_secs().saturating_add(2),
            task,
        };
        let begin = serde_json::to_vec(&begin)?;
        let mut frame = Vec::new();
        let length = (begin.len() as u32).to_le_bytes();
        write_frame(&mut frame, &[&length, &begin, bytes])?;
        Ok(frame)
    }
}

/// What a process is told first.
#[derive(Serialize, Deserialize)]
struct Begin {
    /// The requesting process: the worker ends with it.
    parent: i32,
    /// Processor time for a request.
    request_seconds_max: u64,
    task: Task,
}

/// What a process is for.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Task {
    Tokenizer(tokenizer::Open),
    Table(table::OpenTable),
}

/// Renews the processor time of the process, so that all of its work may take as long as it needs.
pub(crate) struct ProcessorTime {
    seconds: u64,
}

impl ProcessorTime {
    pub(crate) fn renew(&self) -> io::Result<()> {
        let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec;
        // Rounded up: the limit is in whole seconds.
        let limit = u64::try_from(used).unwrap_or(0).saturating_add(1).saturating_add(self.seconds);
        let maximum = getrlimit(Resource::Cpu).maximum;
        let current = Some(maximum.map_or(limit, |maximum| limit.min(maximum)));
        Ok(setrlimit(Resource::Cpu, Rlimit { current, maximum })?)
    }
}

/// Does what the process that started this one asks for, until there is nothing left. For a program that does nothing
/// else: it limits memory and processor time of the process, and the system kills it when the thread that started it
/// ends.
///
/// # Errors
/// If the requesting process is gone.
pub fn run_worker() -> io::Result<()> {
    // An endless regular expression would continue to run although nothing reads its reply.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    limit(Resource::Core, 0)?;
    limit(Resource::As, tokenizer::MEMORY_BYTES_MAX)?;
    // The message of a panic goes into the reply.
    std::panic::set_hook(Box::new(|_| {}));
    let input = &mut BufReader::new(io::stdin());
    let output = &mut BufWriter::with_capacity(1 << 16, io::stdout());
    let Some(request) = read_frame(input)? else { return Ok(()) };
    let broken = || io::Error::from(io::ErrorKind::InvalidData);
    let (length, rest) = request.split_first_chunk().ok_or_else(broken)?;
    let length = u32::from_le_bytes(*length) as usize;
    let (begin, bytes) = rest.split_at_checked(length).ok_or_else(broken)?;
    let begin: Begin = serde_json::from_slice(begin)?;
    // The parent may have died before the system was asked to kill this process with it.
    if Pid::as_raw(getppid()) != begin.parent {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    let seconds = begin.request_seconds_max;
    match begin.task {
        Task::Tokenizer(open) => {
            let time = ProcessorTime { seconds };
            time.renew()?;
            tokenizer::serve(&open, bytes, &time, input, output)
        }
        Task::Table(open) => {
            limit(Resource::As, table::MEMORY_BYTES_MAX)?;
            let time = ProcessorTime { seconds: seconds.min(table::SECONDS_MAX) };
            time.renew()?;
            table::serve(&open, &time, output)
        }
    }
}

/// Lowers a limit of the process; a lower existing one stays.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let limit = getrlimit(resource).current.map_or(most, |current| current.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })?)
}

/// Turns a panic into an error about `what`.
pub(crate) fn guarded<T>(what: &str, run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("{what} failed: {}", text.unwrap_or("no reason given")))
    })
}
