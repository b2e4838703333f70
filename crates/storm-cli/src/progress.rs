//! What is being done, on a line that is written over.

use std::io::{IsTerminal, Write};

/// Shows it; nothing where nobody looks, and an empty text clears the line.
pub(crate) fn show(what: &str) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let dots = if what.is_empty() { "" } else { " …" };
        let _ = write!(stderr, "\r\x1b[K{what}{dots}");
    }
}
