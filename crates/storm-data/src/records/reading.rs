//! Methods to read a dataset, from the fastest to the one that always works.

use crate::DataError;
use std::env::{self, VarError};
use std::fmt;

/// Selects the fastest method that may be used, for tests and for systems where a faster one
/// misbehaves.
const VARIABLE: &str = "STORM_READING";

/// The fastest method that may be used. If the system refuses it, the next one is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reading {
    /// O_DIRECT with many reads in flight (io_uring).
    #[default]
    Ring,
    /// O_DIRECT with one read at a time per thread.
    Direct,
    /// Through the page cache. Pages are evicted once read.
    Advised,
}

impl Reading {
    /// All methods, fastest first.
    pub const ALL: [Reading; 3] = [Reading::Ring, Reading::Direct, Reading::Advised];

    fn name(self) -> &'static str {
        match self {
            Reading::Ring => "io_uring",
            Reading::Direct => "direct",
            Reading::Advised => "cached",
        }
    }

    /// The method in `STORM_READING`: `io_uring`, `direct` or `cached`.
    ///
    /// # Errors
    /// It has another value.
    pub fn from_environment() -> Result<Reading, DataError> {
        let text = match env::var(VARIABLE) {
            Ok(text) => text,
            Err(VarError::NotPresent) => return Ok(Reading::default()),
            Err(VarError::NotUnicode(text)) => text.to_string_lossy().into_owned(),
        };
        Reading::ALL.into_iter().find(|reading| reading.name() == text).ok_or_else(|| {
            let names = Reading::ALL.map(Reading::name).join(", ");
            let problem = format!("`{}` is none of {names}", text.escape_debug());
            DataError::Option { option: VARIABLE, problem }
        })
    }
}

/// The read method in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadingPath {
    /// O_DIRECT with many reads in flight (io_uring).
    Ring,
    /// O_DIRECT with one read at a time per thread.
    Direct,
    /// Through the page cache. Pages are evicted once read.
    Advised,
}

impl fmt::Display for ReadingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReadingPath::Ring => "io_uring O_DIRECT",
            ReadingPath::Direct => "O_DIRECT pread",
            ReadingPath::Advised => "pread+fadvise",
        })
    }
}
