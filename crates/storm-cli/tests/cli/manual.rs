//! Shell completions and manual pages.

use crate::{contents, storm, words};
use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};
use tempfile::TempDir;

#[test]
fn completions_name_commands_and_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = words(&format!("completions {shell}")).succeeded();
        for part in ["train", "learning-rate", "bf16-stochastic"] {
            assert!(script.contains(part), "{part} is not in that of {shell}");
        }
    }
    words("completions tcsh").failed(2, &["tcsh"]);
    // Bash accepts it.
    let script = words("completions bash").succeeded();
    let mut bash = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn().expect("bash");
    bash.stdin.take().expect("a pipe").write_all(script.as_bytes()).expect("it reads");
    assert!(bash.wait().expect("it ends").success());
}

#[test]
fn there_is_a_page_for_every_command() {
    let folder = TempDir::new().expect("a folder");
    let pages = folder.path().join("man1");
    for _ in 0..2 {
        storm([OsStr::new("man"), pages.as_os_str()]).succeeded();
    }
    let pages = contents(&pages);
    let page = |name: &str| {
        let found = pages.iter().find(|(path, _)| path.file_name() == Some(OsStr::new(name)));
        let (_, bytes) = found.unwrap_or_else(|| panic!("{name} is missing"));
        String::from_utf8(bytes.clone()).expect("text")
    };
    for name in ["storm.1", "storm-train.1", "storm-data-pack.1", "storm-bench-cpu.1"] {
        assert!(page(name).contains(".TH"), "{name}");
    }
    assert!(page("storm-train.1").contains("default: cosine"));
    let is_hidden = |name: &str| name.contains("option-table") || name.contains("data-worker");
    assert!(!pages.keys().any(|path| is_hidden(&path.to_string_lossy())));
}
