//! Child processes. [`run`] prints a command before it starts it.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::workspace;

/// The cargo that started this program. It runs in the root folder.
pub(crate) fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(workspace::root());
    command
}

/// Runs a command with its output on the terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = show(command);
    eprintln!("$ {line}");
    let status = command.status().with_context(|| format!("could not start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// Runs a command and returns what it wrote to standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = show(command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("could not start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed ({})", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{line}` did not write UTF-8"))
}

/// The command as typed in a shell, with paths relative to the repository.
fn show(command: &Command) -> String {
    let root = format!("{}/", workspace::root().display());
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let shorten = |word: &OsStr| word.to_string_lossy().replace(&root, "");
    let mut words: Vec<String> = words.map(shorten).collect();
    if words[0].ends_with("/cargo") {
        words[0] = "cargo".to_owned();
    }
    words.join(" ")
}
