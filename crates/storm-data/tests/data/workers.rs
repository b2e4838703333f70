//! The processes that run tokenizers do not outlive the one that started them, nor run forever.

use crate::helpers::{Folder, packed, rerun, rerun_folder, worker};
use crate::tokenizers::tokenizer_json;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, getpid, kill_process};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;
use storm_data::{PackOptions, Tokenizer, TokenizerSource, WorkerCommand};

/// Fires on failure only.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A tokenizer that scans a hundred thousand letters at each letter `a` of a text.
fn endless_json() -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {
            "type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": [["<unk>", 0.0], ["a", -1.0], ["a".repeat(100_000), -2.0]],
        },
    })
}

/// Long enough to keep a processor busy for an hour.
fn endless_text() -> String {
    "a".repeat(1 << 20)
}

/// Hundredths of a second of processor time that a process has taken so far.
fn processor_ticks(process: &str) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    // In user and in kernel mode.
    let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(ticks(11)? + ticks(12)?)
}

/// The child process of the next test: packs until it kills itself.
fn pack_without_end(folder: &Folder) {
    // The wrapper holds a FIFO open, writes its process number for the test, and becomes the
    // tokenizer.
    let (fifo, number) = (folder.path("fifo"), folder.path("number"));
    let (fifo, number, program) = (fifo.display(), number.display(), worker().program);
    let script =
        format!("exec 3>'{fifo}'; echo $$ >&3; echo $$ >'{number}'; exec '{}'", program.display(),);
    let number = folder.path("number");
    std::thread::spawn(move || {
        loop {
            let process = fs::read_to_string(&number).unwrap_or_default();
            // Opening takes far less, so now it is busy with the text.
            if processor_ticks(process.trim()).is_some_and(|ticks| ticks > 100) {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            std::thread::yield_now();
        }
    });
    let arguments = ["-c", &script].map(OsString::from).to_vec();
    let options = PackOptions {
        tokenizer: TokenizerSource::File(folder.path("tokenizer.json")),
        worker: WorkerCommand { program: "/bin/sh".into(), arguments, ..worker() },
        threads: 1,
        ..folder.options(&[&folder.path("a.txt")])
    };
    packed(&options).unwrap();
}

#[test]
fn a_killed_pack_takes_its_busy_tokenizer_along() {
    if let Some(folder) = rerun_folder() {
        return pack_without_end(&folder);
    }
    let folder = Folder::new();
    folder.write("tokenizer.json", endless_json().to_string());
    folder.write("a.txt", endless_text());
    let fifo = folder.path("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut reader = File::open(fifo).unwrap();
        let mut text = Vec::new();
        loop {
            // Ends when no process has the other end open any more.
            let mut bytes = [0; 64];
            let count = reader.read(&mut bytes).unwrap();
            text.extend(&bytes[..count]);
            if count == 0 || text.ends_with(b"\n") {
                sender.send((count == 0, String::from_utf8(text.clone()).unwrap())).unwrap();
            }
            if count == 0 {
                break;
            }
        }
    });
    let killed = rerun("workers::a_killed_pack_takes_its_busy_tokenizer_along", &folder);
    assert_eq!(killed.status.signal(), Some(Signal::KILL.as_raw()), "{killed:?}");
    let (_, number) = receiver.recv_timeout(WATCHDOG).unwrap();
    let is_gone = receiver.recv_timeout(WATCHDOG).is_ok_and(|(ends, _)| ends);
    if !is_gone {
        let number = number.trim().parse().unwrap();
        kill_process(Pid::from_raw(number).unwrap(), Signal::KILL).unwrap();
    }
    assert!(is_gone, "the tokenizer goes on without anybody to read its reply");
}

/// A tokenizer depends on the process that opened it, not on the thread.
#[test]
fn a_tokenizer_outlives_the_thread_that_opened_it() {
    let folder = Folder::new();
    let path = folder.write("tokenizer.json", tokenizer_json(&[]).to_string());
    let open = || Tokenizer::open(&TokenizerSource::File(path), None, &worker()).unwrap();
    let tokenizer = std::thread::scope(|scope| scope.spawn(open).join().unwrap());
    for _ in 0..100 {
        assert_eq!(tokenizer.encode("hello").unwrap(), [258, u32::from(b'o')]);
    }
}

/// The worker, spoken to by hand.
struct ByHand(Child);

impl ByHand {
    fn open(json: &Value, parent: u32, request_seconds_max: u64) -> ByHand {
        let program = worker().program;
        let pipes = || Stdio::piped();
        let mut command = Command::new(program);
        command.stdin(pipes()).stdout(pipes()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let mut worker = ByHand(child);
        let open = json!({
            "parent": parent, "request_seconds_max": request_seconds_max,
            "task": {"tokenizer": {"kind": "hugging_face", "chat": null, "end_of_text": null}},
        });
        let open = open.to_string();
        let length = (open.len() as u32).to_le_bytes();
        worker.send(&[&length, open.as_bytes(), json.to_string().as_bytes()].concat());
        worker
    }

    fn send(&mut self, request: &[u8]) {
        let input = self.0.stdin.as_mut().unwrap();
        input.write_all(&(request.len() as u32).to_le_bytes()).unwrap();
        input.write_all(request).unwrap();
    }

    fn encode(&mut self, text: &str) {
        let (ask, count) = ([1], 1u32.to_le_bytes());
        let length = (text.len() as u32).to_le_bytes();
        self.send(&[&ask[..], &count, &length, text.as_bytes()].concat());
    }

    /// The next reply; none at the end.
    fn reply(&mut self) -> Option<Vec<u8>> {
        let output = self.0.stdout.as_mut().unwrap();
        let mut length = [0; 4];
        output.read_exact(&mut length).ok()?;
        let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
        output.read_exact(&mut bytes).ok()?;
        Some(bytes)
    }

    fn processor_ticks(&self) -> u64 {
        processor_ticks(&self.0.id().to_string()).expect("it lives")
    }
}

#[test]
fn a_request_may_take_so_much_processor_time_and_the_next_as_much_again() {
    let mut worker = ByHand::open(&endless_json(), std::process::id(), 1);
    worker.reply().expect("it is open");
    // Many requests together take longer than one may.
    while worker.processor_ticks() < 300 {
        worker.encode(&"a".repeat(2000));
        worker.reply().expect("short requests go on");
    }
    worker.encode(&endless_text());
    assert_eq!(worker.reply(), None);
    let status = worker.0.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::XCPU.as_raw()));
}

/// The parent may die before the worker can ask to be killed with it.
#[test]
fn a_worker_whose_parent_is_another_leaves() {
    let mut worker = ByHand::open(&tokenizer_json(&[]), 1, 100);
    assert_eq!(worker.reply(), None);
    assert!(!worker.0.wait().unwrap().success());
}

#[test]
fn a_tokenizer_that_makes_too_much_of_a_text_is_an_error() {
    let folder = Folder::new();
    let mut json = tokenizer_json(&[]);
    json["normalizer"] =
        json!({"type": "Replace", "pattern": {"String": "a"}, "content": "b".repeat(1000)});
    let path = folder.write("tokenizer.json", json.to_string());
    let tokenizer = Tokenizer::open(&TokenizerSource::File(path), None, &worker()).unwrap();
    let error = tokenizer.encode("aaaa").unwrap_err().to_string();
    assert!(error.contains("4000 tokens of 4 bytes of text"), "{error}");
    assert!(tokenizer.encode("ab").unwrap_err().to_string().contains("2 bytes"));
    assert_eq!(tokenizer.encode("hello").unwrap().len(), 2);
}
