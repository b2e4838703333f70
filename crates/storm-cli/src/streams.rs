//! Standard output and standard error, safe against closed pipes as in `storm … | head`.
//!
//! The standard library's `println!` and `eprintln!` panic on a closed pipe. The macros here shadow them, so that no
//! command can use the standard ones by mistake. Work continues after the pipe closes: a run still saves, a probe still
//! writes its file, and the exit code reflects the work.
//!
//! File names, tensor names, text and settings are untrusted input. Their control characters could move the cursor,
//! rename the window or hide earlier output, so everything here goes through [`plain`].

use std::borrow::Cow;
use std::fmt::Arguments;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use terminal_size::{Width, terminal_size_of};

macro_rules! println {
    () => { $crate::streams::line(format_args!("")) };
    ($($text:tt)+) => { $crate::streams::line(format_args!($($text)+)) };
}

macro_rules! eprintln {
    ($($text:tt)+) => { $crate::streams::error_line(format_args!($($text)+)) };
}

/// Prints a line to standard output. Exits on a write error other than a closed pipe: a result file truncated by a full
/// disk must not look complete.
pub(crate) fn line(text: Arguments<'_>) {
    let text = text.to_string();
    match writeln!(io::stdout(), "{}", fitted(&plain(&text), &io::stdout())) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            error_line(format_args!("error: cannot write to standard output: {error}"));
            std::process::exit(1);
        }
        _ => {}
    }
}

/// Prints a line to standard error. A write error cannot be reported, so it is ignored.
pub(crate) fn error_line(text: Arguments<'_>) {
    let text = text.to_string();
    let _ = writeln!(io::stderr(), "{}", fitted(&plain(&text), &io::stderr()));
}

/// Prints a line to standard output and ignores write errors.
pub(crate) fn line_if_read(text: &str) {
    let _ = writeln!(io::stdout(), "{}", fitted(&plain(text), &io::stdout()));
}

/// The width of a terminal; `None` if this is not a terminal or its width is unknown.
pub(crate) fn columns(stream: impl AsFd) -> Option<usize> {
    terminal_size_of(stream)
        .map(|(Width(columns), _)| usize::from(columns))
        .filter(|&columns| columns > 0)
}

/// Wraps long lines for a terminal. Leaves JSON as it is: a line break inside of it would change it.
fn fitted<'a>(text: &'a str, stream: &impl AsFd) -> Cow<'a, str> {
    match columns(stream) {
        Some(columns) if !text.starts_with('{') => Cow::Owned(wrapped(text, columns)),
        _ => Cow::Borrowed(text),
    }
}

/// Wraps lines between words. Continuation lines are indented a little more; words too long for a line, such as paths,
/// stay whole.
pub(crate) fn wrapped(text: &str, columns: usize) -> String {
    let mut lines = Vec::new();
    for line in text.split('\n') {
        let indent = line.chars().take_while(|c| *c == ' ').count() + 2;
        let indent = if indent < columns / 2 { " ".repeat(indent) } else { String::new() };
        let mut rest = line.to_owned();
        while let Some(at) = break_of(&rest, columns) {
            lines.push(rest[..at].trim_end().to_owned());
            rest = format!("{indent}{}", rest[at..].trim_start());
        }
        lines.push(rest);
    }
    lines.join("\n")
}

/// Where to break a line that is too long: at the last space that fits, else at the first one.
fn break_of(line: &str, columns: usize) -> Option<usize> {
    let start = line.len() - line.trim_start().len();
    let end = line.char_indices().nth(columns).map(|(at, _)| at)?;
    let fits = line[start..].match_indices(' ').map(|(at, _)| start + at);
    let mut candidates = fits.filter(|at| !line[*at..].trim().is_empty());
    let first = candidates.next()?;
    Some(candidates.take_while(|at| *at <= end).last().unwrap_or(first))
}

/// Shows a status line on standard error, which the next one overwrites. Does nothing without a terminal; an empty text
/// clears it.
pub(crate) fn status(text: &str) {
    let mut stderr = io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r\x1b[K{}", plain(text));
    }
}

/// Prints a question to standard error; the answer follows on the same line.
pub(crate) fn ask(question: &str) {
    let mut stderr = io::stderr();
    let _ = write!(stderr, "{}", plain(question)).and_then(|()| stderr.flush());
}

/// Prints a piece of generated text and flushes, so that it appears immediately. Files and pipes get the raw text.
pub(crate) fn model_text(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout();
    let shown = if stdout.is_terminal() { plain(text) } else { Cow::Borrowed(text) };
    stdout.write_all(shown.as_bytes()).and_then(|()| stdout.flush())
}

/// `2:05` minutes, `3:02:05` hours, `12 days 3:02:05`.
pub(crate) fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let seconds = seconds % 60;
    match (days, hours) {
        (0, 0) => format!("{minutes}:{seconds:02}"),
        (0, _) => format!("{hours}:{minutes:02}:{seconds:02}"),
        (1, _) => format!("1 day {hours}:{minutes:02}:{seconds:02}"),
        _ => format!("{days} days {hours}:{minutes:02}:{seconds:02}"),
    }
}

/// Escapes control characters other than line breaks and tabs as in JSON, `\u001b`, so that JSON keeps its meaning.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_hidden(c) {
            true => shown.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// A control character, or one that changes the text direction.
fn is_hidden(c: char) -> bool {
    let is_direction = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && c != '\n' && c != '\t') || is_direction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(plain("a\tb\nc é 🦀"), "a\tb\nc é 🦀");
        assert_eq!(
            plain("\x1b[31mred\x07\r\x7f\u{9b}1m"),
            r"\u001b[31mred\u0007\u000d\u007f\u009b1m"
        );
        assert_eq!(plain("ab\u{202e}dc"), r"ab\u202edc");
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        assert_eq!(wrapped("short\n\n  also", 10), "short\n\n  also");
        assert_eq!(wrapped("one two three four", 9), "one two\n  three\n  four");
        assert_eq!(wrapped("  a bb ccc dddd", 8), "  a bb\nccc dddd");
        assert_eq!(wrapped("/a/very/long/path and", 8), "/a/very/long/path\n  and");
        assert_eq!(wrapped("/a/very/long/path", 8), "/a/very/long/path");
        assert_eq!(wrapped("größer als é", 10), "größer als\n  é");
        let text = "some words of different lengths in a sentence that goes on ".repeat(9);
        for columns in 1..130 {
            let broken = wrapped(&text, columns);
            assert!(broken.split_whitespace().eq(text.split_whitespace()), "{columns}");
            let is_fine = |line: &str| {
                line.chars().count() <= columns || line.split_whitespace().count() == 1
            };
            assert!(broken.lines().all(is_fine), "{columns}: {broken}");
        }
    }

    #[test]
    fn durations_have_the_units_that_they_need() {
        let shown = [0.0, 65.9, 3605.0, 86_400.0, 2.0 * 86_400.0 + 7325.0].map(duration);
        assert_eq!(shown, ["0:00", "1:05", "1:00:05", "1 day 0:00:00", "2 days 2:02:05"]);
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({"name": "\x1b]0;\u{9b}\u{7f}\\\u{2066}\n"});
        let shown = plain(&value.to_string()).into_owned();
        assert!(!shown.contains(is_hidden));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
