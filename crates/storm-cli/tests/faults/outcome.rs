//! How a command ended, and whether that is acceptable.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirEntry};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// A command that takes longer than this hangs. The requested work takes far less than a second, but a disk may keep it
/// waiting while the system writes gigabytes of a build.
pub(crate) const HANG: Duration = Duration::from_secs(40);

/// Address space of a command and of each process that it starts, in KiB: 4 GiB, and 128 MiB per
/// core for a thread's stack and allocator. Tiny inputs need far less. A wrong size asks for far
/// more.
fn address_space_kib() -> usize {
    (4 << 20) + (128 << 10) * available_parallelism().map_or(1, usize::from)
}

/// The largest file that it may write, in blocks of 512 bytes: 1 GiB. Past that, writes fail.
const FILE_BLOCKS: u64 = 2 << 20;

/// How long a command with endless work may run before it is interrupted.
const WORK: Duration = Duration::from_secs(1);

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    Success,
    /// With this code, and a message.
    ErrorInWords(i32),
    /// It worked until it was interrupted, and then ended.
    Interrupted,
    /// By SIGKILL, which only some cases use.
    Killed,
    /// With an exit code that is not ours, or without a message.
    NoWords(i32),
    Panic,
    /// A failed allocation aborted the program.
    OutOfMemory,
    Signal(i32),
    Hang,
}

impl Verdict {
    /// Whether a command that is not killed may end this way.
    pub(crate) fn is_fine(self) -> bool {
        matches!(self, Verdict::Success | Verdict::ErrorInWords(_) | Verdict::Interrupted)
    }

    /// Its column in the table.
    pub(crate) fn column(self) -> &'static str {
        match self {
            Verdict::Success => "success",
            Verdict::ErrorInWords(_) => "error in words",
            Verdict::Interrupted => "interrupted at work",
            Verdict::Killed => "killed",
            Verdict::NoWords(_) => "no words",
            Verdict::Panic => "panic",
            Verdict::OutOfMemory => "out of memory",
            Verdict::Signal(_) => "signal",
            Verdict::Hang => "hang",
        }
    }
}

/// How a command ended, and what it printed.
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: String = self.stderr.chars().take(2000).collect();
        write!(f, "{:?}: {}", self.verdict, shown.trim().escape_debug())
    }
}

/// How much work a command may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// It must end by itself.
    Bounded,
    /// It was asked for more than anyone would wait for, so it is interrupted.
    Endless,
}

/// A call of `storm`.
#[derive(Clone)]
pub(crate) struct Call {
    words: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    work: Work,
}

impl Call {
    pub(crate) fn new<W: Into<OsString>>(words: impl IntoIterator<Item = W>) -> Call {
        let words = words.into_iter().map(Into::into).collect();
        Call { words, environment: Vec::new(), work: Work::Bounded }
    }

    /// From words separated by spaces.
    pub(crate) fn of(line: &str) -> Call {
        Call::new(line.split_whitespace())
    }

    pub(crate) fn with_work(self, work: Work) -> Call {
        Call { work, ..self }
    }

    pub(crate) fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Call {
        self.environment.push((name, value.into()));
        self
    }

    /// Runs it in a folder, to its end.
    pub(crate) fn run(&self, folder: &Path) -> Outcome {
        // A shell sets the limits. Only `storm` itself gets the environment.
        let address_space = address_space_kib();
        let limits = format!("ulimit -c 0; ulimit -f {FILE_BLOCKS}; ulimit -v {address_space}");
        let mut script = format!("trap '' XFSZ; {limits}; exec env ");
        for (name, _) in &self.environment {
            script += &format!("{name}=\"${name}_\" ");
        }
        script += "\"$0\" \"$@\"";
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_storm")).args(&self.words);
        for (name, value) in &self.environment {
            command.env(format!("{name}_"), value);
        }
        command.current_dir(folder).process_group(0).env("RUST_BACKTRACE", "0");
        // Random names must not be looked up on the hub.
        command.env("HF_HUB_OFFLINE", "1");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().expect("sh starts");
        let group = Group(child.id());
        let (sender, receiver) = mpsc::channel();
        // This also waits for everything that the command started: nothing may outlive it.
        std::thread::spawn(move || sender.send(child.wait_with_output()));
        let (output, was_interrupted) = wait(&receiver, &group, self.work);
        let is_over = output.is_some();
        let output = output.unwrap_or_else(|| {
            group.send("KILL");
            receiver.recv().expect("somebody waits")
        });
        let output = output.expect("storm is waited for");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let verdict = match is_over {
            true => judge(output.status, &stderr, was_interrupted),
            false => Verdict::Hang,
        };
        Outcome { verdict, stdout: output.stdout, stderr }
    }

    /// Runs it, and requires success.
    pub(crate) fn succeed(&self, folder: &Path) -> Result<Outcome, String> {
        let outcome = self.run(folder);
        match outcome.verdict {
            Verdict::Success => Ok(outcome),
            _ => Err(format!("`{self}` should work: {outcome}")),
        }
    }
}

/// The output of a command, if it ends in time, and whether it was interrupted.
fn wait(
    receiver: &Receiver<io::Result<Output>>,
    group: &Group,
    work: Work,
) -> (Option<io::Result<Output>>, bool) {
    if work == Work::Bounded {
        return (ended_in(HANG, receiver, group), false);
    }
    if let Some(output) = ended_in(WORK, receiver, group) {
        return (Some(output), false);
    }
    group.send("INT");
    if let Some(output) = ended_in(HANG / 2, receiver, group) {
        return (Some(output), true);
    }
    // At the second signal, a run exits at once.
    group.send("INT");
    (ended_in(HANG, receiver, group), true)
}

/// The output of a command, if it ends within some time. Time in which it was ready but got no core
/// does not count, because other programs may be busy.
fn ended_in(
    time: Duration,
    receiver: &Receiver<io::Result<Output>>,
    group: &Group,
) -> Option<io::Result<Output>> {
    let (begun, starved_before) = (Instant::now(), group.starved());
    loop {
        let allowed = time + group.starved().saturating_sub(starved_before);
        let left = allowed.checked_sub(begun.elapsed())?;
        if let Ok(output) = receiver.recv_timeout(left) {
            return Some(output);
        }
    }
}

impl fmt::Display for Call {
    /// As a shell command.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.environment {
            write!(f, "{name}={} ", value.display())?;
        }
        f.write_str("storm")?;
        self.words.iter().try_for_each(|word| write!(f, " {}", quoted(word)))
    }
}

fn quoted(word: &OsString) -> String {
    let bytes = word.as_encoded_bytes();
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_=./:,+".contains(byte);
    match !bytes.is_empty() && bytes.iter().all(is_plain) {
        true => word.to_string_lossy().into_owned(),
        false => format!("$'{}'", bytes.escape_ascii()),
    }
}

/// The process group of a call, by its first process.
struct Group(u32);

impl Group {
    fn send(&self, signal: &str) {
        let (signal, group) = (format!("-{signal}"), format!("-{}", self.0));
        Command::new("kill").args([&*signal, "--", &*group]).stderr(Stdio::null()).status().ok();
    }

    /// How long the first process was ready to run but got no core.
    fn starved(&self) -> Duration {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0)).into_iter().flatten();
        let waited = |thread: DirEntry| -> Option<u64> {
            // Nanoseconds on a core, nanoseconds waiting for one, and how often.
            let numbers = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            numbers.split_whitespace().nth(1)?.parse().ok()
        };
        Duration::from_nanos(threads.flatten().filter_map(waited).max().unwrap_or_default())
    }
}

const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;

/// The exit code of a run after a second Ctrl-C.
const LEFT: i32 = 130;

fn judge(status: ExitStatus, stderr: &str, was_interrupted: bool) -> Verdict {
    // This includes threads and workers that the command outlived.
    if stderr.contains("panicked at") || stderr.contains("has overflowed its stack") {
        return Verdict::Panic;
    }
    if stderr.contains("memory allocation of") {
        return Verdict::OutOfMemory;
    }
    let has_words =
        stderr.lines().any(|line| line.len() > "error: ".len() && line.starts_with("error: "));
    match (status.code(), status.signal()) {
        (Some(0), _) => Verdict::Success,
        (Some(LEFT), _) | (_, Some(SIGINT)) if was_interrupted => Verdict::Interrupted,
        (Some(code @ 1..=4), _) if has_words => Verdict::ErrorInWords(code),
        (Some(code), _) => Verdict::NoWords(code),
        (_, Some(SIGKILL)) => Verdict::Killed,
        (_, signal) => Verdict::Signal(signal.unwrap_or_default()),
    }
}

#[test]
fn ends_are_told_apart() {
    // As the system encodes them: the signal in the low bits, the code above.
    let exit = |code: i32| ExitStatus::from_raw(code << 8);
    let signal = ExitStatus::from_raw;
    let panic = "thread 'main' panicked at src/main.rs:1:1:\nno\n";
    let abort = "memory allocation of 99 bytes failed\n";
    for (status, stderr, was_interrupted, expected) in [
        (exit(0), "warning: slow\n", false, Verdict::Success),
        (exit(0), panic, false, Verdict::Panic),
        (exit(101), panic, false, Verdict::Panic),
        (exit(4), "warning: x\nerror: no such file\n", false, Verdict::ErrorInWords(4)),
        (exit(1), "error: \n", false, Verdict::NoWords(1)),
        (exit(2), "", false, Verdict::NoWords(2)),
        (exit(130), "", false, Verdict::NoWords(130)),
        (exit(130), "", true, Verdict::Interrupted),
        (signal(SIGINT), "", true, Verdict::Interrupted),
        (signal(6), abort, false, Verdict::OutOfMemory),
        (signal(11), "", false, Verdict::Signal(11)),
        (signal(SIGKILL), "", false, Verdict::Killed),
    ] {
        assert_eq!(judge(status, stderr, was_interrupted), expected, "{status} {stderr}");
    }
}
