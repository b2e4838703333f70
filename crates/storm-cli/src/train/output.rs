//! Output of a run.

use crate::streams;
use std::path::Path;

/// What a run prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// Tables, sentences, a bar.
    People,
    /// Objects of JSON, one per line.
    Json,
    /// Errors and results.
    Quiet,
}

impl Style {
    /// For people only.
    pub(super) fn say(self, text: &str) {
        if self == Style::People {
            print(text);
        }
    }
}

/// A line on standard output. The reader may stop early; the run continues.
pub(super) fn print(text: &str) {
    streams::line_if_read(text);
}

/// The command that resumes the run in a folder.
pub(super) fn resume_command(folder: &Path) -> String {
    format!("storm train {} --resume", shell_word(&folder.join("config.toml")))
}

/// A path as a shell takes it.
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
