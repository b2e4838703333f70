//! The ways to read a dataset, from the fastest to the one that always works.

use crate::DataError;
use std::env::{self, VarError};
use std::fmt;

/// Names the fastest way that may be used, for tests and for systems where a faster one misbehaves.
const VARIABLE: &str = "STORM_READING";

/// The fastest way that may be used. Where the system refuses it, the next one is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reading {
    /// Past the page cache, many reads at once.
    #[default]
    Ring,
    /// Past the page cache, one read at a time for each thread.
    Direct,
    /// Through the page cache, from which every page is dropped once it was read.
    Advised,
}

impl Reading {
    /// All of them, the fastest first.
    pub const ALL: [Reading; 3] = [Reading::Ring, Reading::Direct, Reading::Advised];

    fn name(self) -> &'static str {
        match self {
            Reading::Ring => "io_uring",
            Reading::Direct => "direct",
            Reading::Advised => "cached",
        }
    }

    /// What the environment asks for: `STORM_READING` is `io_uring`, `direct` or `cached`.
    ///
    /// # Errors
    /// It is something else.
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

/// How a dataset is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadingPath {
    /// Past the page cache, many reads at once.
    Ring,
    /// Past the page cache, one read at a time for each thread.
    Direct,
    /// Through the page cache, from which every page is dropped once it was read.
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
