//! What a checkpoint does to the file system, behind a trait so that tests can make any of it fail.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Everything that saving changes on a disk, from any thread.
pub trait Storage: Send + Sync + 'static {
    /// A file that is being written.
    type File: OutputFile;

    /// Makes a folder and those that it is in.
    ///
    /// # Errors
    /// From the file system, as all of these.
    fn create_directories(&self, path: &Path) -> io::Result<()>;

    /// Makes a file that does not exist.
    ///
    /// # Errors
    /// It exists already, among others.
    fn create_file(&self, path: &Path) -> io::Result<Self::File>;

    /// Gives a file or folder another name, at once or not at all.
    ///
    /// # Errors
    /// There is something under that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Waits until the names in a folder are on the disk.
    ///
    /// # Errors
    /// From the file system.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// Deletes a folder with all that is in it.
    ///
    /// # Errors
    /// From the file system.
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub trait OutputFile: Write {
    /// Waits until all of it is on the disk.
    ///
    /// # Errors
    /// From the file system.
    fn sync(&mut self) -> io::Result<()>;
}

/// The file system.
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
