//! How a run talks.

use crate::streams::plain;
use std::io::{self, Write};

/// Who reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
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
    let _ = writeln!(io::stdout(), "{}", plain(text));
}
