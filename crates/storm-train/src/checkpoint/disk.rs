//! File system operations of checkpoints, behind a trait so that tests can make any of them fail.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Every change that saving makes to a disk. Called from any thread.
pub trait Storage: Send + Sync + 'static {
    /// A file being written.
    type File: OutputFile;

    /// Creates a folder and its parents.
    ///
    /// # Errors
    /// From the file system, like all methods here.
    fn create_directories(&self, path: &Path) -> io::Result<()>;

    /// Creates a new file.
    ///
    /// # Errors
    /// The file already exists, among others.
    fn create_file(&self, path: &Path) -> io::Result<Self::File>;

    /// Renames a file or folder atomically.
    ///
    /// # Errors
    /// The new name already exists.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Waits until the directory entries of a folder are on disk.
    ///
    /// # Errors
    /// From the file system.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// Deletes a folder and everything in it.
    ///
    /// # Errors
    /// From the file system.
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
}

/// A file being written.
pub trait OutputFile: Write {
    /// Waits until all of the file is on disk.
    ///
    /// # Errors
    /// From the file system.
    fn sync(&mut self) -> io::Result<()>;
}

/// The real file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Storage for Disk {
    type File = File;

    fn create_directories(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<File> {
        File::create_new(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        storm_files::rename_new(from, to)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        storm_files::sync_directory(path)
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

impl OutputFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
