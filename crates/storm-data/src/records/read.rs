//! Reads shards past the page cache.

use super::layout::PAGE_BYTES;
use crate::DataError;
use rustix::fs::{Advice, OFlags, fadvise};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use storm_files::open_plain;

/// How to read a dataset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reading {
    /// Directly where the file system allows it.
    #[default]
    Direct,
    /// Through the page cache, from which every page is dropped once it was read.
    Advised,
}

/// How a dataset is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadingPath {
    /// Past the page cache.
    Direct,
    /// Through the page cache, from which every page is dropped once it was read.
    Advised,
}

impl fmt::Display for ReadingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReadingPath::Direct => "O_DIRECT pread",
            ReadingPath::Advised => "pread+fadvise",
        })
    }
}

/// An open shard.
#[derive(Debug)]
pub(super) struct ShardFile {
    path: PathBuf,
    plain: File,
    direct: Option<File>,
    /// The file system opens files for direct reads and then refuses to read them.
    direct_refused: AtomicBool,
}

impl ShardFile {
    pub(super) fn open(path: &Path, reading: Reading) -> Result<ShardFile, DataError> {
        let plain = open_plain(path).map_err(|error| match error.kind() {
            ErrorKind::InvalidInput => DataError::damaged(path, error.to_string()),
            _ => DataError::io(path)(error),
        })?;
        // Otherwise the system reads on past what is asked for, and those pages would stay.
        fadvise(&plain, 0, None, Advice::Random).ok();
        let direct = match reading {
            Reading::Advised => None,
            // The path leads to a plain file, as was just seen; if that changed, the nonblocking flag still keeps
            // this from waiting. Any refusal means to read it the other way.
            Reading::Direct => {
                let flags = (OFlags::DIRECT | OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
                let file = OpenOptions::new().read(true).custom_flags(flags as i32).open(path).ok();
                file.filter(|file| is_same(file, &plain))
            }
        };
        let (path, direct_refused) = (path.to_owned(), AtomicBool::new(false));
        Ok(ShardFile { path, plain, direct, direct_refused })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn reading_path(&self) -> ReadingPath {
        match self.direct.is_some() && !self.direct_refused.load(Ordering::Relaxed) {
            true => ReadingPath::Direct,
            false => ReadingPath::Advised,
        }
    }

    pub(super) fn length(&self) -> Result<u64, DataError> {
        Ok(self.plain.metadata().map_err(DataError::io(&self.path))?.len())
    }

    /// Fills `pages`, which are aligned to [`PAGE_BYTES`] in memory, from a place that is as well.
    pub(super) fn read_pages(&self, at: u64, pages: &mut [u8]) -> io::Result<()> {
        if let Some(direct) = &self.direct
            && !self.direct_refused.load(Ordering::Relaxed)
        {
            match direct.read_exact_at(pages, at) {
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    self.direct_refused.store(true, Ordering::Relaxed);
                }
                result => return result,
            }
        }
        self.read_plain(at, pages)
    }

    /// Fills `bytes` from anywhere, and leaves nothing of them in the page cache.
    pub(super) fn read_plain(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let result = self.plain.read_exact_at(bytes, at);
        // Whole pages only: the system keeps a page of which only a part is given up.
        let page = PAGE_BYTES as u64;
        let (start, end) = (at / page * page, (at + bytes.len() as u64).next_multiple_of(page));
        // A file system that cannot do it, such as one in memory, has no second copy either.
        fadvise(&self.plain, start, NonZeroU64::new(end - start), Advice::DontNeed).ok();
        result
    }
}

fn is_same(one: &File, other: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |file: &File| file.metadata().map(|data| (data.dev(), data.ino())).ok();
    identity(one).is_some() && identity(one) == identity(other)
}

/// Memory that direct reads can fill.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    /// At least so many bytes.
    pub(super) fn new(bytes: usize) -> Buffer {
        let length = bytes.next_multiple_of(PAGE_BYTES);
        let bytes = vec![0; length + PAGE_BYTES];
        let address = bytes.as_ptr().addr();
        Buffer { start: address.next_multiple_of(PAGE_BYTES) - address, bytes }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len() - PAGE_BYTES
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len()]
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        let length = self.len();
        &mut self.bytes[self.start..][..length]
    }
}

/// Buffers of one size that are used again, so that memory neither grows nor scatters.
#[derive(Debug)]
pub(super) struct Buffers {
    bytes: usize,
    free: Mutex<Vec<Buffer>>,
}

impl Buffers {
    pub(super) fn new(bytes: usize) -> Buffers {
        Buffers { bytes, free: Mutex::default() }
    }

    pub(super) fn take(&self) -> Buffer {
        let free = self.free.lock().map(|mut free| free.pop()).unwrap_or_default();
        free.unwrap_or_else(|| Buffer::new(self.bytes))
    }

    pub(super) fn give_back(&self, buffer: Buffer) {
        if let Ok(mut free) = self.free.lock() {
            free.push(buffer);
        }
    }
}
