//! `storm … | head`: readers that close early.

use std::io::pipe;
use std::process::{Command, Stdio};

/// A pipe without a reader.
fn unread() -> Stdio {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    writer.into()
}

/// Runs `storm` with both outputs unread, and with only standard output unread, and checks the exit
/// code.
#[track_caller]
fn check(line: &str, code: i32) {
    let storm = |stderr: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
        command.args(line.split_whitespace()).stdout(unread()).stderr(stderr).output().unwrap()
    };
    let output = storm(Stdio::piped());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{line}: {stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("Broken pipe"), "{line}: {stderr}");
    assert_eq!(storm(unread()).status.code(), Some(code), "{line}");
}

#[test]
fn commands_end_as_if_somebody_read() {
    check("model list", 0);
    check("model show gpt2", 0);
    check("plan --hardware list", 0);
    check("plan --model gpt2 --batch 1 --seq 64", 0);
    check("doctor", 0);
}

#[test]
fn failures_keep_their_code() {
    check("model show no-such-model", 4);
    check("plan --model gpt2 --batch 1 --vram 1MiB", 3);
}
