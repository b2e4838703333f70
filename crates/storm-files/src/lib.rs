//! Safe access to files named by the user.
//!
//! Such a file may be a pipe, a device, or something that another process has just created. The
//! functions here never block on a special file and never replace a file that the caller has not
//! checked. Errors are plain [`std::io::Error`]s without the path, which callers add in their own
//! error types. Only outputs that appear complete or not at all have their own error type,
//! [`StageError`].

mod claim;
mod exchange;
mod identity;
mod lock;
mod open;
mod place;
mod private;
mod staged_directory;
mod staged_file;
mod write;

pub use lock::{FolderLock, Holder, LockError};
pub use open::open_plain;
pub use place::{rename_new, sync_directory};
pub use private::{read_private, write_private};
pub use staged_directory::{StageError, StagedDirectory};
pub use staged_file::{IfPresent, StagedFile};
pub use write::{append_plain, replace_file};
