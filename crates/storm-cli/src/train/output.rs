//! Output styles of a run, and the commands it prints.

use crate::streams;
use std::path::Path;

/// The output format of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// Tables, sentences and a progress bar.
    People,
    /// JSON objects, one per line.
    Json,
    /// Only errors and results.
    Quiet,
}

impl Style {
    /// Prints text in the `People` style only.
    pub(super) fn say(self, text: &str) {
        if self == Style::People {
            print(text);
        }
    }
}

/// Prints a line to standard output. The run continues if the pipe is closed.
pub(super) fn print(text: &str) {
    streams::line_if_read(text);
}

/// The command that resumes the run in a folder.
pub(super) fn resume_command(folder: &Path) -> String {
    format!("storm train {} --resume", shell_word(&folder.join("config.toml")))
}

/// Quotes a path for the shell.
pub(crate) fn shell_word(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "-_./".contains(c);
    match path.chars().all(is_plain) {
        true => path,
        false => format!("'{}'", path.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_pasted() {
        let command = |folder: &str| resume_command(Path::new(folder));
        assert_eq!(command("runs/a"), "storm train runs/a/config.toml --resume");
        assert_eq!(command("my runs/a"), "storm train 'my runs/a/config.toml' --resume");
        assert_eq!(command("it's/a"), "storm train 'it'\\''s/a/config.toml' --resume");
    }
}
