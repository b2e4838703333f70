use crate::show_bytes;
use std::io;
use std::path::PathBuf;
use storm_files::Holder;

/// Why scratch space cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// There is no such folder.
    #[error("{} is no folder: name one on a local disk", .folder.display())]
    NoFolder {
        /// What was named.
        folder: PathBuf,
    },
    /// The folder is in memory.
    #[error(
        "{} is in memory ({file_system}), so it would take the memory that it is to save: name a folder on a disk",
        .folder.display()
    )]
    InMemory {
        /// What was named.
        folder: PathBuf,
        /// `tmpfs`.
        file_system: &'static str,
    },
    /// No file can be made in the folder.
    #[error("{} cannot be written to: {error}; name a folder on a disk where you may write", .folder.display())]
    Unwritable {
        /// What was named.
        folder: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Another process uses the folder.
    #[error(
        "{} is the scratch space of another run, {}: give each run a folder of its own",
        .folder.display(),
        .holder.as_ref().map_or("which did not say its name".to_owned(), Holder::to_string)
    )]
    InUse {
        /// What was named.
        folder: PathBuf,
        /// Who uses it, if it recorded itself.
        holder: Option<Holder>,
    },
    /// There is not enough room.
    #[error(
        "{} are needed in {}, and {} are free: free some, or name a folder on another disk",
        show_bytes(*.wanted_bytes), .folder.display(), show_bytes(*.available_bytes)
    )]
    Full {
        /// Where.
        folder: PathBuf,
        /// The size of the file.
        wanted_bytes: u64,
        /// What the file system has.
        available_bytes: u64,
    },
    /// The folder cannot be used.
    #[error("{what} in {}: {error}", .folder.display())]
    Folder {
        /// What was tried: `making a scratch file`.
        what: &'static str,
        /// Where.
        folder: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The disk has no room for bytes whose space was allocated.
    #[error(
        "writing {} at byte {offset} of the scratch file: the disk is full, although the space was allocated. Something else filled \
         it, and its file system copies what is written again or promises more than it has",
        show_bytes(*.bytes as u64)
    )]
    Filled {
        /// First byte.
        offset: u64,
        /// How many.
        bytes: usize,
    },
    /// The disk refused to read or write.
    #[error("{access} {} at byte {offset} of the scratch file: {error}", show_bytes(*.bytes as u64))]
    Io {
        /// `reading`.
        access: &'static str,
        /// First byte.
        offset: u64,
        /// How many.
        bytes: usize,
        /// What the system said.
        error: io::Error,
    },
    /// The disk returned other bytes than were written.
    #[error(
        "{} at byte {offset} of the scratch file are not what was written there, twice: the disk or the way to it is faulty",
        show_bytes(*.bytes as u64)
    )]
    Damaged {
        /// First byte.
        offset: u64,
        /// How many.
        bytes: usize,
    },
    /// The operating system refused to start a thread.
    #[error("cannot start threads for the disk: {0}; allow more processes (ulimit -u)")]
    Thread(io::Error),
}
