//! Progress: a bar on a terminal, otherwise a line for every tenth.

use crate::size;
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::IsTerminal;

/// Whether to show progress.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Show {
    Progress,
    Nothing,
}

/// Bytes per line if the total is unknown.
const LINE_BYTES: u64 = 256 << 20;

/// Progress in bytes, on standard error.
pub(crate) struct ByteProgress {
    what: &'static str,
    form: Form,
}

enum Form {
    Bar(ProgressBar),
    /// Tenths shown so far, or lines if the total is unknown.
    Lines(Cell<u64>),
    Nothing,
}

impl ByteProgress {
    pub(crate) fn new(what: &'static str, show: Show) -> ByteProgress {
        let form = match (show, std::io::stderr().is_terminal()) {
            (Show::Nothing, _) => Form::Nothing,
            (Show::Progress, false) => Form::Lines(Cell::new(0)),
            (Show::Progress, true) => {
                let template = "{prefix} [{bar:30}] {percent} %  {bytes} of {total_bytes}, \
                                {bytes_per_sec}, {eta} left  {msg}";
                let style = ProgressStyle::with_template(template);
                let bar = ProgressBar::new(0).with_prefix(what);
                Form::Bar(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
            }
        };
        ByteProgress { what, form }
    }

    /// Shows how much is done. Calls `detail` only if it is shown.
    pub(crate) fn set(&self, done: u64, total: u64, detail: impl FnOnce() -> String) {
        match &self.form {
            Form::Nothing => {}
            Form::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
                bar.set_message(detail());
            }
            Form::Lines(shown) => {
                let tenths = u128::from(done) * 10 / u128::from(total.max(1));
                let tenths = tenths as u64;
                if tenths > shown.get() {
                    shown.set(tenths);
                    eprintln!("{}: {} % {}", self.what, 10 * tenths, detail());
                }
            }
        }
    }

    /// Shows how much is done if the total is unknown.
    pub(crate) fn set_unknown(&self, done: u64, detail: impl FnOnce() -> String) {
        match &self.form {
            Form::Nothing => {}
            Form::Bar(bar) => {
                bar.unset_length();
                bar.set_position(done);
                bar.set_message(detail());
            }
            Form::Lines(shown) if done / LINE_BYTES > shown.get() => {
                shown.set(done / LINE_BYTES);
                eprintln!("{}: {} {}", self.what, size::show(done), detail());
            }
            Form::Lines(_) => {}
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Form::Bar(bar) = &self.form {
            bar.finish_and_clear();
        }
    }
}
