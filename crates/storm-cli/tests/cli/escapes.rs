//! Control characters in names and files do not reach the terminal.

use crate::storm;
use std::fs;
use tempfile::TempDir;

/// A window title, red text, and the single character that also begins an escape.
const HOSTILE: &str = "x\x1b]0;title\x07\x1b[31m\u{9b}1m-marked";

/// Runs `storm`. Its output must have the hostile text without its control characters.
#[track_caller]
fn check(arguments: &[&str]) {
    let done = storm(arguments);
    let written = done.stdout + &done.stderr;
    let hidden = written.chars().find(|c| c.is_control() && *c != '\n' && *c != '\t');
    assert_eq!(hidden, None, "{arguments:?}: {written:?}");
    assert!(written.contains("marked"), "{arguments:?}: {written}");
}

#[test]
fn names_are_shown_without_control_characters() {
    check(&["model", "show", HOSTILE]);
    check(&["plan", "--model", HOSTILE, "--batch", "1"]);
    check(&["plan", "--model", "gpt2", "--batch", "1", "--hardware", HOSTILE]);
    check(&["data", "pack", HOSTILE, "--tokenizer", "bytes", "--out", "out"]);
    check(&["data", "inspect", HOSTILE]);
    check(&["sample", HOSTILE]);
    check(&["train", HOSTILE]);
    // Messages of the argument parser.
    check(&[HOSTILE]);
    check(&["plan", &format!("--{HOSTILE}")]);
    check(&["plan", "--model", "gpt2", "--batch", HOSTILE]);
}

#[test]
fn what_files_hold_is_shown_without_control_characters() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let record = serde_json::json!({"messages": [{"role": HOSTILE, "content": "x"}]});
    fs::write(path("a.jsonl"), record.to_string()).unwrap();
    let (input, out) = (path("a.jsonl"), path("out"));
    let pack = ["data", "pack", &input, "--tokenizer", "bytes", "--chat-template", "plain"];
    check(&[&pack[..], &["--out", &out]].concat());
    fs::write(path("config.toml"), format!("\"{HOSTILE}\" = 1\n")).unwrap();
    check(&["train", &path("config.toml")]);
    fs::write(path("keys.toml"), r#""x\u001b]0;title\u0007-marked" = 1"#).unwrap();
    check(&["train", &path("keys.toml")]);
    fs::create_dir(path("model")).unwrap();
    let config = serde_json::json!({"model_type": HOSTILE, "architectures": [HOSTILE]});
    fs::write(path("model/config.json"), config.to_string()).unwrap();
    check(&["model", "show", &path("model")]);
    // Output for valid data.
    fs::write(path("a.txt"), HOSTILE).unwrap();
    let out = path(HOSTILE);
    check(&["data", "pack", &path("a.txt"), "--tokenizer", "bytes", "--out", &out]);
    check(&["data", "inspect", &out]);
    check(&["data", "inspect", &out, "--json"]);
}
