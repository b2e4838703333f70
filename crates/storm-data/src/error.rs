use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use storm_files::StageError;
use storm_host::MapError;

/// Where a record is in its file, counted from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordPlace {
    /// A line.
    Line(u64),
    /// A row of a table, without its header.
    Row(u64),
    /// Neighbouring rows of a table.
    Rows {
        /// The first of them.
        first: u64,
        /// The last of them.
        last: u64,
    },
    /// A value among others.
    Record(u64),
}

impl RecordPlace {
    /// How many records are there.
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
    /// The system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The system has no thread for reading.
    #[error("the system refuses another thread: {0}")]
    NoThread(io::Error),
    /// A mapped file cannot be read.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A file of a dataset is damaged, or no such file.
    #[error("{path}: {problem}; pack the dataset again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
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
    /// A dataset holds something else than what is to be done with it needs.
    #[error("{path} holds {holds}, and this needs a dataset of {wanted}")]
    OtherKind {
        /// The dataset.
        path: PathBuf,
        /// What it holds.
        holds: &'static str,
        /// What is needed.
        wanted: &'static str,
    },
    /// The system refused to read a block of records.
    #[error("{path}, block {block}: {source}")]
    ReadBlock {
        /// The shard.
        path: PathBuf,
        /// Which of its blocks.
        block: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A block of records is damaged.
    #[error("{path}, block {block}: {problem}; pack the dataset again")]
    DamagedBlock {
        /// The shard.
        path: PathBuf,
        /// Which of its blocks.
        block: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// Text that cannot be packed.
    #[error("{path}: {problem}")]
    Input {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A record of a file that cannot be packed.
    #[error("{path}, {place}: {problem}")]
    Record {
        /// The file.
        path: PathBuf,
        /// Where it is.
        place: RecordPlace,
        /// What is wrong with it.
        problem: String,
    },
    /// The tokenizer cannot be used.
    #[error("tokenizer {path}: {problem}")]
    Tokenizer {
        /// Its file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A chat that cannot be rendered for an answer.
    #[error("the chat cannot be rendered (tokenizer {path}): {problem}")]
    Chat {
        /// The tokenizer's file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The output cannot be written to its place.
    #[error("{path} {problem}")]
    Output {
        /// Where it should go.
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
    /// Samples that are longer than a row, where that is an error.
    #[error(
        "{count} samples of the {split} part of {path} are longer than a row of {sequence} tokens: a sequence of \
         {longest} would hold all, or let them be left out, truncated or split (overlong)"
    )]
    Overlong {
        /// The dataset.
        path: PathBuf,
        /// Which part.
        split: &'static str,
        /// How many.
        count: u64,
        /// Tokens in a row.
        sequence: usize,
        /// The sequence length that would hold all.
        longest: u64,
    },
    /// A position of another run.
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
        /// What is wrong with it.
        problem: String,
    },
}

impl DataError {
    /// For `map_err`: adds where it happened.
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> DataError + '_ {
        move |source| DataError::Io { path: path.to_owned(), source }
    }

    /// For `map_err`: an output could not be moved to its place.
    pub(crate) fn stage(output: &Path) -> impl Fn(StageError) -> DataError + '_ {
        move |error| match error {
            StageError::Refused { problem } => {
                DataError::Output { path: output.to_owned(), problem }
            }
            StageError::Io { path, source, .. } => DataError::Io { path, source },
        }
    }

    /// Something wrong with a file of a dataset.
    pub(crate) fn damaged(path: &Path, problem: impl Into<String>) -> DataError {
        DataError::Damaged { path: path.to_owned(), problem: problem.into() }
    }

    /// Something wrong with a file that is to be packed.
    pub(crate) fn input(path: &Path, problem: impl Into<String>) -> DataError {
        DataError::Input { path: path.to_owned(), problem: problem.into() }
    }
}
