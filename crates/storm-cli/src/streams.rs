//! Standard output and standard error of a program whose reader may leave: `storm … | head`.
//!
//! The standard library's `println!` and `eprintln!` panic when nobody reads any more. These take their
//! names, so that no command can use the others by mistake. The work goes on without a reader: a run still
//! saves, a probe still writes its file, and the exit code is that of the work.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};

macro_rules! println {
    () => { $crate::streams::line(format_args!("")) };
    ($($text:tt)+) => { $crate::streams::line(format_args!($($text)+)) };
}

macro_rules! eprintln {
    ($($text:tt)+) => { $crate::streams::error_line(format_args!($($text)+)) };
}

/// A line of standard output. Ends the program if it cannot be written although somebody reads: a file
/// on a full disk must not pass for a result.
pub(crate) fn line(text: Arguments<'_>) {
    match writeln!(io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            error_line(format_args!("error: cannot write to standard output: {error}"));
            std::process::exit(1);
        }
        _ => {}
    }
}

/// A line of standard error; where that cannot be written, there is nobody to tell.
pub(crate) fn error_line(text: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{text}");
}
