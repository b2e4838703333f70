//! Calling the `storm` binary.

use std::ffi::OsStr;
use std::process::Command;

/// What a call came to.
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    #[track_caller]
    pub(crate) fn succeeded(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout
    }

    /// Fails unless it ended with this code and a message with all of these parts.
    #[track_caller]
    pub(crate) fn failed(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}\n{}", self.stdout, self.stderr);
        let mut lines = self.stderr.lines();
        assert!(lines.any(|line| line.starts_with("error: ")), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "{part} is not in: {}", self.stderr);
        }
    }
}

pub(crate) fn storm<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Done {
    let output = Command::new(env!("CARGO_BIN_EXE_storm")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Done { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

pub(crate) fn words(line: &str) -> Done {
    storm(line.split_whitespace())
}
