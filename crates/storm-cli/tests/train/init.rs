//! `storm init`: a config that can be trained, and never one that replaces another.

use crate::support::{Place, tree};
use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

fn storm(place: &Place, args: &[&str], answers: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("storm starts");
    // It may exit before it has read all answers.
    child.stdin.take().expect("a pipe").write_all(answers.as_bytes()).ok();
    child.wait_with_output().expect("it ends")
}

#[track_caller]
fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What was written passes a dry run, and only the config was written.
#[track_caller]
fn check(place: &Place, args: &[&str], answers: &str, config: &str) -> String {
    let before = tree(place.path());
    succeeded(&storm(place, args, answers));
    let text = fs::read_to_string(place.path().join(config)).expect("a config");
    let mut after = tree(place.path());
    after.remove(std::path::Path::new(config));
    assert!(after == before, "only {config} is new");
    succeeded(&storm(place, &["train", config, "--dry-run", "--quiet"], ""));
    text
}

#[test]
fn without_questions_it_takes_what_it_finds() {
    let place = Place::new();
    fs::remove_file(place.path().join("tiny.toml")).expect("a file");
    let text = check(&place, &["init", "--yes"], "", "storm.toml");
    for line in ["name = \"storm\"", "data = \"text.txt\"", "steps = 1000", "seq = 256"] {
        assert!(text.lines().any(|of| of == line), "{line} is not in: {text}");
    }
    assert!(text.lines().filter(|line| line.starts_with('#')).count() > 10, "{text}");
    // The existing config stays.
    let again = storm(&place, &["init", "--yes"], "");
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("storm.toml already exists"));
    assert_eq!(fs::read_to_string(place.path().join("storm.toml")).expect("a config"), text);
}

#[test]
fn answers_are_asked_for_and_checked() {
    let place = Place::new();
    // Weights of a run, a file name with a space, and an existing run of that name.
    succeeded(&storm(&place, &["train", "tiny.toml", "--steps", "1", "--quiet"], ""));
    fs::rename(place.path().join("runs/tiny"), place.path().join("runs/my-tune")).expect("a run");
    let answers = "runs/my-tune/model\n\n0.5\n16\n";
    let text = check(&place, &["init", "my tune.toml"], answers, "my tune.toml");
    let lines =
        ["name = \"my-tune-2\"", "model = \"runs/my-tune/model\"", "epochs = 0.5", "seq = 16"];
    for line in lines {
        assert!(text.lines().any(|of| of == line), "{line} is not in: {text}");
    }
    for (answers, part) in [
        ("gpt-5\n", "gpt-5"),
        ("\nmissing.txt\n\n\n", "missing.txt"),
        ("\n\nmany\n", "`many` is not a number"),
        ("\n\n5\n", "standard input ended"),
        ("runs/my-tune/model\n\n\n999\n", "positions"),
    ] {
        let before = tree(place.path());
        let output = storm(&place, &["init", "bad.toml"], answers);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(part), "{answers:?}: {errors}");
        assert!(tree(place.path()) == before, "{answers:?} left something");
    }
    fs::remove_file(place.path().join("text.txt")).expect("a file");
    let output = storm(&place, &["init", "bad.toml", "--yes"], "");
    assert!(String::from_utf8_lossy(&output.stderr).contains("--data"));
}
