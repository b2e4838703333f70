//! A separate process for third-party code that reads untrusted files: tokenizers, and Parquet
//! tables.
//!
//! Such code panics on some files. Other files make it use all memory, overflow its stack or loop
//! forever. Most of this cannot be caught in the same process, so it runs in a separate one with
//! limits. If the worker fails, its parent survives and reports the failure.

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

/// The program that runs third-party code. It must call [`run_worker`] in the process that is
/// started. A wrapper must `exec` it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerCommand {
    /// Its path.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The time limit for one request, a batch of about a megabyte of text.
    pub reply_time_max: Duration,
}

impl WorkerCommand {
    /// The running program, called with these arguments.
    ///
    /// # Errors
    /// If the path of the program is unknown.
    pub fn this_program<A: Into<OsString>>(
        arguments: impl IntoIterator<Item = A>,
    ) -> Result<WorkerCommand, DataError> {
        // The file may have been replaced since. This path names the running one.
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

    /// The first frame to the process: its task, and the payload of the task.
    pub(crate) fn begin(&self, task: Task, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let begin = Begin {
            parent: rustix::process::getpid().as_raw_nonzero().get(),
            // Longer than the wait for a reply, so the wait times out first: its error message is
            // more specific.
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

/// The first message to a worker.
#[derive(Serialize, Deserialize)]
struct Begin {
    /// The requesting process. The worker exits with it.
    parent: i32,
    /// CPU time limit per request.
    request_seconds_max: u64,
    task: Task,
}

/// The task of a worker.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Task {
    Tokenizer(tokenizer::Open),
    Table(table::OpenTable),
}

/// Renews the CPU time limit before each unit of work, so the total is unlimited.
pub(crate) struct ProcessorTime {
    seconds: u64,
}

impl ProcessorTime {
    pub(crate) fn renew(&self) -> io::Result<()> {
        let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec;
        // Rounded up, because the limit is in whole seconds.
        let limit = u64::try_from(used).unwrap_or(0).saturating_add(1).saturating_add(self.seconds);
        let maximum = getrlimit(Resource::Cpu).maximum;
        let current = Some(maximum.map_or(limit, |maximum| limit.min(maximum)));
        Ok(setrlimit(Resource::Cpu, Rlimit { current, maximum })?)
    }
}

/// Serves the requests of the parent process until there are no more. For a program that does
/// nothing else: it limits the memory and CPU time of the process, and the system kills the process
/// when the thread that started it exits.
///
/// # Errors
/// If the requesting process is gone.
pub fn run_worker() -> io::Result<()> {
    // Otherwise an endless regular expression would keep running although nothing reads the reply.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    limit(Resource::Core, 0)?;
    limit(Resource::As, tokenizer::MEMORY_BYTES_MAX)?;
    // Panic messages go into the reply.
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

/// Lowers a resource limit. An existing lower one stays.
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
