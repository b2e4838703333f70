use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use storm_files::StageError;
use storm_host::MapError;

/// Where a record is in its file, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordPlace {
    /// A line.
    Line(u64),
    /// A row of a table, not counting the header.
    Row(u64),
    /// Consecutive rows of a table.
    Rows {
        /// First row.
        first: u64,
        /// Last row.
        last: u64,
    },
    /// A record of any other format.
    Record(u64),
}

impl RecordPlace {
    /// How many records it covers.
    pub(crate) fn count(&self) -> u64 {
        match self {
            RecordPlace::Line(_) | RecordPlace::Row(_) | RecordPlace::Record(_) => 1,
            RecordPlace::Rows { first, last } => last.saturating_sub(*first).saturating_add(1),
        }
    }
}

impl fmt::Display for RecordPlace {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecordPlace::Line(number) => write!(out, "line {number}"),
            RecordPlace::Row(number) => write!(out, "row {number}"),
            RecordPlace::Rows { first, last } => write!(out, "rows {first} to {last}"),
            RecordPlace::Record(number) => write!(out, "record {number}"),
        }
    }
}

/// Why data cannot be packed or loaded.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The system reported an error.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The system refused to start a thread.
    #[error("the system refuses another thread: {0}")]
    NoThread(io::Error),
    /// A mapped file cannot be read.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A file of a dataset is damaged, or is not such a file.
    #[error("{path}: {problem}; pack the dataset again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A directory is not a dataset.
    #[error("{path} is not a dataset: {problem}; make one with `storm data pack`")]
    NotADataset {
        /// The directory.
        path: PathBuf,
        /// What is missing.
        problem: String,
    },
    /// A dataset is of a kind that the operation does not support.
    #[error("{path} holds {holds}, and this needs a dataset of {wanted}")]
    OtherKind {
        /// The dataset.
        path: PathBuf,
        /// What it holds.
        holds: &'static str,
        /// What is needed.
        wanted: &'static str,
    },
    /// A block of records cannot be read.
    #[error("{path}, block {block}: {source}")]
    ReadBlock {
        /// The shard.
        path: PathBuf,
        /// Index of the block in the shard.
        block: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A block of records is damaged.
    #[error("{path}, block {block}: {problem}; pack the dataset again")]
    DamagedBlock {
        /// The shard.
        path: PathBuf,
        /// Index of the block in the shard.
        block: u64,
        /// The problem.
        problem: String,
    },
    /// A file that cannot be packed.
    #[error("{path}: {problem}")]
    Input {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A record that cannot be packed.
    #[error("{path}, {place}: {problem}")]
    Record {
        /// The file.
        path: PathBuf,
        /// Where it is.
        place: RecordPlace,
        /// The problem.
        problem: String,
    },
    /// The tokenizer cannot be used.
    #[error("tokenizer {path}: {problem}")]
    Tokenizer {
        /// Its file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A chat that cannot be rendered into a prompt.
    #[error("the chat cannot be rendered (tokenizer {path}): {problem}")]
    Chat {
        /// The tokenizer's file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The output cannot be written.
    #[error("{path} {problem}")]
    Output {
        /// Its path.
        path: PathBuf,
        /// Why not, and what to do.
        problem: String,
    },
    /// A split has nothing to load.
    #[error("the {split} part of {path} is empty: {hint}")]
    Empty {
        /// The dataset.
        path: PathBuf,
        /// Which part.
        split: &'static str,
        /// What to do.
        hint: String,
    },
    /// Samples are longer than a row, and that is configured as an error.
    #[error(
        "{count} samples of the {split} part of {path} are longer than a row of {sequence} tokens: a sequence of \
         {longest} would hold all, or let them be left out, truncated or split (overlong)"
    )]
    Overlong {
        /// The dataset.
        path: PathBuf,
        /// Which part.
        split: &'static str,
        /// How many samples.
        count: u64,
        /// Tokens in a row.
        sequence: usize,
        /// The sequence length that would hold all.
        longest: u64,
    },
    /// The position belongs to another run.
    #[error("cannot resume from this position: {problem}")]
    Position {
        /// What does not match.
        problem: String,
    },
    /// An option that cannot be used.
    #[error("{option}: {problem}")]
    Option {
        /// Its name.
        option: &'static str,
        /// The problem.
        problem: String,
    },
}

impl DataError {
    /// For `map_err`: adds the path.
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> DataError + '_ {
        move |source| DataError::Io { path: path.to_owned(), source }
    }

    /// For `map_err`: an output could not be moved into place.
    pub(crate) fn stage(output: &Path) -> impl Fn(StageError) -> DataError + '_ {
        move |error| match error {
            StageError::Refused { problem } => {
                DataError::Output { path: output.to_owned(), problem }
            }
            StageError::Io { path, source, .. } => DataError::Io { path, source },
        }
    }

    /// A file of a dataset is damaged.
    pub(crate) fn damaged(path: &Path, problem: impl Into<String>) -> DataError {
        DataError::Damaged { path: path.to_owned(), problem: problem.into() }
    }

    /// An input file cannot be packed.
    pub(crate) fn input(path: &Path, problem: impl Into<String>) -> DataError {
        DataError::Input { path: path.to_owned(), problem: problem.into() }
    }
}
