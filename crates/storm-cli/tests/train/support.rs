//! A tiny run in a folder of its own, and the events that it prints.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use tempfile::TempDir;

/// A model of a few thousand parameters.
const CONFIG: &str = r#"
model = "gpt2"
layers = 2
width = 16
heads = 2
data = "text.txt"
seq = 16
batch = 2
accumulate = 2
learning-rate = 1e-2
seed = 5
device = "cpu"
threads = 1
vram = "64MiB"
ram = "256MiB"
"#;

/// A folder with some text to learn, and a config.
pub(crate) struct Place {
    folder: TempDir,
}

impl Place {
    pub(crate) fn new() -> Place {
        let folder = TempDir::new().expect("a folder");
        let text: String = (0..400).map(|i| format!("{} and {}; ", i * 7 % 100, i % 13)).collect();
        fs::write(folder.path().join("text.txt"), text).expect("a file");
        fs::write(folder.path().join("tiny.toml"), CONFIG).expect("a file");
        Place { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn run_folder(&self, name: &str) -> PathBuf {
        self.path().join("runs").join(name)
    }

    /// `storm train tiny.toml`, with more flags.
    pub(crate) fn command(&self, name: &str, flags: &[&str]) -> Command {
        self.command_of("tiny.toml", name, flags)
    }

    /// `storm train` of another config.
    pub(crate) fn command_of(&self, config: &str, name: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
        command.current_dir(self.path()).args(["train", config, "--json", "--name", name]);
        command.args(flags);
        command
    }

    /// Runs to the end.
    pub(crate) fn run(&self, name: &str, flags: &[&str]) -> Done {
        finish(self.command(name, flags))
    }

    /// Starts a run whose events are read one by one.
    pub(crate) fn start(&self, name: &str, flags: &[&str]) -> Running {
        self.watch(self.command(name, flags))
    }

    /// Starts a command whose events are read one by one.
    pub(crate) fn watch(&self, mut command: Command) -> Running {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("storm starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Running { child, lines }
    }

    /// Every file of a run's model and of its last checkpoint's tensors.
    pub(crate) fn result(&self, name: &str, step: u64) -> BTreeMap<String, Vec<u8>> {
        let run = self.run_folder(name);
        let checkpoint = format!("checkpoints/step-{step:08}");
        ["model/model.safetensors".to_owned()]
            .into_iter()
            .chain(
                ["parameters", "optimizer"].map(|part| format!("{checkpoint}/{part}.safetensors")),
            )
            .map(|file| {
                let bytes = fs::read(run.join(&file)).unwrap_or_else(|e| panic!("{file}: {e}"));
                (file, bytes)
            })
            .collect()
    }
}

/// Every file below a folder with its bytes, and every folder.
pub(crate) fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).expect("a folder") {
            let path = entry.expect("an entry").path();
            let bytes = match path.is_dir() {
                true => Vec::new(),
                false => fs::read(&path).expect("a file"),
            };
            found.insert(path.strip_prefix(folder).expect("below").to_owned(), bytes);
            if path.is_dir() {
                folders.push(path);
            }
        }
    }
    found
}

/// Runs a command to its end.
pub(crate) fn finish(mut command: Command) -> Done {
    let output = command.output().expect("storm starts");
    let stdout = String::from_utf8(output.stdout).expect("text");
    Done {
        code: output.status.code(),
        events: stdout.lines().map(parse).collect(),
        stderr: String::from_utf8(output.stderr).expect("text"),
    }
}

pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) events: Vec<Value>,
    pub(crate) stderr: String,
}

impl Done {
    #[track_caller]
    pub(crate) fn succeeded(self) -> Vec<Value> {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.events
    }

    #[track_caller]
    pub(crate) fn failed(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "{part} is not in: {}", self.stderr);
        }
    }
}

/// A run while it is watched.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    /// The next event. `None` when the run has ended.
    pub(crate) fn next(&mut self) -> Option<Value> {
        Some(parse(&self.lines.next()?.ok()?))
    }

    /// Waits for its end. Returns its exit code and the remaining events.
    pub(crate) fn wait(mut self) -> (Option<i32>, Vec<Value>) {
        let mut events = Vec::new();
        while let Some(event) = self.next() {
            events.push(event);
        }
        (self.child.wait().expect("it ends").code(), events)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A failed test leaves nothing behind. A process that has ended cannot be killed.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn parse(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

pub(crate) fn is(event: &Value, name: &str) -> bool {
    event["event"] == name
}

/// Losses of all steps, as printed.
pub(crate) fn losses(events: &[Value]) -> Vec<(u64, String)> {
    let steps = events.iter().filter(|event| is(event, "step"));
    steps.map(|e| (e["step"].as_u64().expect("a step"), e["loss"].to_string())).collect()
}
