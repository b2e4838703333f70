use crate::show_bytes;
use std::io;
use std::path::PathBuf;
use storm_files::Holder;

/// Why scratch space cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// The path is not a folder.
    #[error("{} is no folder: name one on a local disk", .folder.display())]
    NoFolder {
        /// The path given.
        folder: PathBuf,
    },
    /// The folder is on an in-memory file system.
    #[error(
        "{} is in memory ({file_system}), so it would take the memory that it is to save: name a folder on a disk",
        .folder.display()
    )]
    InMemory {
        /// The path given.
        folder: PathBuf,
        /// `tmpfs`.
        file_system: &'static str,
    },
    /// No file can be created in the folder.
    #[error("{} cannot be written to: {error}; name a folder on a disk where you may write", .folder.display())]
    Unwritable {
        /// The path given.
        folder: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Another process uses the folder.
    #[error(
        "{} is the scratch space of another run, {}: give each run a folder of its own",
        .folder.display(),
        .holder.as_ref().map_or("which did not say its name".to_owned(), Holder::to_string)
    )]
    InUse {
        /// The path given.
        folder: PathBuf,
        /// The process that uses it, if known.
        holder: Option<Holder>,
    },
    /// There is not enough free space.
    #[error(
        "{} are needed in {}, and {} are free: free some, or name a folder on another disk",
        show_bytes(*.wanted_bytes), .folder.display(), show_bytes(*.available_bytes)
    )]
    Full {
        /// The folder.
        folder: PathBuf,
        /// The size of the file.
        wanted_bytes: u64,
        /// Free bytes.
        available_bytes: u64,
    },
    /// The folder cannot be used.
    #[error("{what} in {}: {error}", .folder.display())]
    Folder {
        /// What was attempted, such as `making a scratch file`.
        what: &'static str,
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The disk is full although the space was allocated.
    #[error(
        "writing {} at byte {offset} of the scratch file: the disk is full, although the space was allocated. Something else filled \
         it, and its file system copies what is written again or promises more than it has",
        show_bytes(*.bytes as u64)
    )]
    Filled {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        bytes: usize,
    },
    /// Reading or writing failed.
    #[error("{access} {} at byte {offset} of the scratch file: {error}", show_bytes(*.bytes as u64))]
    Io {
        /// `reading` or `writing`.
        access: &'static str,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        bytes: usize,
        /// The system's error.
        error: io::Error,
    },
    /// The bytes read differ from the bytes written.
    #[error(
        "{} at byte {offset} of the scratch file are not what was written there, twice: the disk or the way to it is faulty",
        show_bytes(*.bytes as u64)
    )]
    Damaged {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        bytes: usize,
    },
    /// The operating system refused to start a thread.
    #[error("cannot start threads for the disk: {0}; allow more processes (ulimit -u)")]
    Thread(io::Error),
}
