//! Memory-mapped files that survive truncation by another process.
//!
//! Reading a mapped page beyond the end of its file raises SIGBUS, which kills the process. Here a
//! signal handler maps a page of zeros there instead and marks the file as damaged.
//! [`MappedFile::read`] copies, then checks the mark and the file's length. The mapped bytes cannot
//! be borrowed, because they may change at any time.

mod guard;

use guard::Guarded;
use memmap2::{Advice, MmapOptions, MmapRaw};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use storm_files::open_plain;

/// Why a mapped file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// It cannot be opened or mapped, or it is a device, pipe or folder.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A read beyond the length the file had when opened.
    #[error("{path}: bytes {offset}..{end} are not in a file of {length}")]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// First byte requested.
        offset: u64,
        /// One past the last byte.
        end: u64,
        /// The length of the file when it was opened.
        length: u64,
    },
    /// It was truncated after it was opened, or its disk cannot read some bytes.
    #[error("{path}: the file was cut short, or its disk failed, while it was in use")]
    Lost {
        /// The file.
        path: PathBuf,
    },
    /// The table of mapped files is full.
    #[error("{path}: {limit} files are mapped already, and there can be no more")]
    TooMany {
        /// The file.
        path: PathBuf,
        /// How many files can be mapped.
        limit: usize,
    },
}

/// Access pattern of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Front to back, with readahead.
    Sequential,
    /// Random access, without readahead.
    Random,
}

/// A read-only mapped file.
#[derive(Debug)]
pub struct MappedFile {
    // Before the map: dropped first, so the table never names memory that is no longer mapped.
    guarded: Option<Guarded>,
    map: Option<MmapRaw>,
    file: File,
    path: PathBuf,
    length: u64,
}

impl MappedFile {
    /// Maps all of a regular file.
    ///
    /// # Errors
    /// If it cannot be opened, is not a regular file, or too many files are mapped.
    pub fn open(path: &Path) -> Result<MappedFile, MapError> {
        let io = |source| MapError::Io { path: path.to_owned(), source };
        let file = open_plain(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let size = usize::try_from(length).map_err(|_| io(io::ErrorKind::FileTooLarge.into()))?;
        // An empty range cannot be mapped, and has nothing to read.
        let map = match size {
            0 => None,
            _ => Some(MmapOptions::new().len(size).map_raw_read_only(&file).map_err(io)?),
        };
        let guarded = map.as_ref().map(|map| Guarded::new(map.as_ptr() as usize, map.len()));
        let guarded = match guarded.transpose() {
            Ok(guarded) => guarded,
            Err(limit) => return Err(MapError::TooMany { path: path.to_owned(), limit }),
        };
        Ok(MappedFile { guarded, map, file, path: path.to_owned(), length })
    }

    /// Its length when it was opened.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Copies bytes out of the file.
    ///
    /// # Errors
    /// If the range is outside the file, or the file is no longer complete.
    pub fn read(&self, offset: u64, dest: &mut [u8]) -> Result<(), MapError> {
        let end = offset.saturating_add(dest.len() as u64);
        if end > self.length {
            let (path, length) = (self.path.clone(), self.length);
            return Err(MapError::OutOfRange { path, offset, end, length });
        }
        let (Some(map), Some(guarded)) = (&self.map, &self.guarded) else { return Ok(()) };
        // SAFETY: the range lies in the map, which lives as long as `self`. `dest` is exclusively
        // borrowed. The handler replaces pages that the file lost.
        unsafe {
            let source = map.as_ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(source, dest.as_mut_ptr(), dest.len());
        }
        // The mark must be read after the copy, not before.
        fence(Ordering::SeqCst);
        // Truncation inside a page raises no signal: the rest of that page reads as zeros.
        let whole = self.file.metadata().is_ok_and(|metadata| metadata.len() >= end);
        if guarded.is_lost() || !whole {
            return Err(MapError::Lost { path: self.path.clone() });
        }
        Ok(())
    }

    /// Tells the system how the file will be accessed. Only a hint: errors are ignored.
    pub fn advise(&self, access: Access) {
        let advice = match access {
            Access::Sequential => Advice::Sequential,
            Access::Random => Advice::Random,
        };
        if let Some(map) = &self.map {
            map.advise(advice).ok();
        }
    }

    /// Asks the system to prefetch these bytes, without waiting. Only a hint: errors are ignored.
    pub fn will_need(&self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.length);
        if let Some(map) = self.map.as_ref().filter(|_| offset < end) {
            map.advise_range(Advice::WillNeed, offset as usize, (end - offset) as usize).ok();
        }
    }
}
