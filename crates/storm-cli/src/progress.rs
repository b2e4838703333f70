//! What is being done, on a line that is written over.

use crate::streams;

/// Shows it; nothing where there is no terminal, and an empty text clears the line.
pub(crate) fn show(what: &str) {
    match what {
        "" => streams::status(""),
        _ => streams::status(&format!("{what} …")),
    }
}
