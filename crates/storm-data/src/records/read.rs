//! Reads shards without filling the page cache.

use super::fault::{ReadFaults, apply};
use super::layout::PAGE_BYTES;
use super::reading::Reading;
use crate::DataError;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_setfl};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use storm_files::open_plain;
use storm_host::{PageBuffer, cached_bytes};

/// An open shard.
#[derive(Debug)]
pub(super) struct ShardFile {
    path: PathBuf,
    plain: File,
    direct: Option<Arc<File>>,
    /// The file system opens files with O_DIRECT but then refuses to read them.
    direct_refused: AtomicBool,
    faults: Option<Arc<dyn ReadFaults>>,
}

impl ShardFile {
    pub(super) fn open(path: &Path, reading: Reading) -> Result<ShardFile, DataError> {
        let plain = open_plain(path).map_err(|error| match error.kind() {
            ErrorKind::InvalidInput => DataError::damaged(path, error.to_string()),
            _ => DataError::io(path)(error),
        })?;
        // Disables readahead, whose pages would stay in the page cache.
        fadvise(&plain, 0, None, Advice::Random).ok();
        let direct = match reading {
            Reading::Advised => None,
            Reading::Ring | Reading::Direct => open_direct(path, &plain).map(Arc::new),
        };
        Ok(ShardFile {
            path: path.to_owned(),
            plain,
            direct,
            direct_refused: AtomicBool::new(false),
            faults: None,
        })
    }

    /// Injects faults into reads from now on.
    pub(super) fn set_faults(&mut self, faults: Arc<dyn ReadFaults>) {
        self.faults = Some(faults);
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn length(&self) -> Result<u64, DataError> {
        Ok(self.plain.metadata().map_err(DataError::io(&self.path))?.len())
    }

    /// Drops the file's pages from the page cache.
    pub(super) fn drop_page_cache(&self) {
        fadvise(&self.plain, 0, None, Advice::DontNeed).ok();
    }

    /// Bytes of the file that are in the page cache.
    pub(super) fn cached_bytes(&self) -> Result<u64, DataError> {
        cached_bytes(&self.plain).map_err(DataError::io(&self.path))
    }

    /// The O_DIRECT file, unless direct reads are refused.
    pub(super) fn direct(&self) -> Option<&Arc<File>> {
        self.direct.as_ref().filter(|_| !self.direct_refused.load(Ordering::Relaxed))
    }

    /// Fills `pages`. Memory and file offset are aligned to [`PAGE_BYTES`].
    pub(super) fn read_pages(&self, at: u64, pages: &mut [u8]) -> io::Result<()> {
        match self.direct() {
            None => self.read_plain(at, pages),
            Some(direct) => {
                let result = direct.read_at(pages, at);
                self.complete(at, pages, result)
            }
        }
    }

    /// Completes a direct read after a short read or an error.
    pub(super) fn complete(
        &self,
        at: u64,
        pages: &mut [u8],
        mut result: io::Result<usize>,
    ) -> io::Result<()> {
        loop {
            let error = match self.with_fault(at, pages, result) {
                Ok(count) if count == pages.len() => return Ok(()),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                // The rest may be unaligned, which a direct read cannot be.
                Ok(count) => return self.read_plain(at + count as u64, &mut pages[count..]),
                Err(error) => error,
            };
            match (Errno::from_io_error(&error), &self.direct) {
                (Some(Errno::INTR), Some(direct)) => result = direct.read_at(pages, at),
                (Some(Errno::INVAL | Errno::OPNOTSUPP), _) => {
                    self.direct_refused.store(true, Ordering::Relaxed);
                    return self.read_plain(at, pages);
                }
                // The ring had no resources for it.
                (Some(Errno::AGAIN), _) => return self.read_plain(at, pages),
                _ => return Err(error),
            }
        }
    }

    /// Reads at any offset, and evicts the pages from the page cache.
    pub(super) fn read_plain(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let result = self.read_all(at, bytes);
        // Whole pages, because the system keeps a page that is only partly discarded.
        let page = PAGE_BYTES as u64;
        let (start, end) = (at / page * page, (at + bytes.len() as u64).next_multiple_of(page));
        // Where this fails, such as in tmpfs, there is no second copy either.
        fadvise(&self.plain, start, NonZeroU64::new(end - start), Advice::DontNeed).ok();
        result
    }

    fn read_all(&self, mut at: u64, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let result = self.plain.read_at(bytes, at);
            match self.with_fault(at, bytes, result) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    at += count as u64;
                    bytes = &mut bytes[count..];
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn with_fault(
        &self,
        at: u64,
        bytes: &mut [u8],
        result: io::Result<usize>,
    ) -> io::Result<usize> {
        match &self.faults {
            None => result,
            Some(faults) => apply(faults.next(&self.path, at, bytes.len()), bytes, result),
        }
    }
}

/// Opens the same file with O_DIRECT. `None` if the file system refuses.
fn open_direct(path: &Path, plain: &File) -> Option<File> {
    // The path led to a regular file a moment ago. If that changed, O_NONBLOCK keeps this from
    // blocking.
    let flags = (OFlags::DIRECT | OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags as i32).open(path).ok()?;
    let file = is_same(&file, plain).then_some(file)?;
    // With O_NONBLOCK, io_uring fails reads that would have to wait.
    fcntl_setfl(&file, OFlags::DIRECT).ok()?;
    Some(file)
}

fn is_same(one: &File, other: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |file: &File| file.metadata().map(|data| (data.dev(), data.ino())).ok();
    identity(one).is_some() && identity(one) == identity(other)
}

/// A pool of buffers of one size, which avoids growth and fragmentation.
#[derive(Debug)]
pub(super) struct Buffers {
    bytes: usize,
    free: Mutex<Vec<PageBuffer>>,
}

impl Buffers {
    pub(super) fn new(bytes: usize) -> Buffers {
        Buffers { bytes, free: Mutex::default() }
    }

    pub(super) fn take(&self) -> PageBuffer {
        let free = self.free.lock().map(|mut free| free.pop()).unwrap_or_default();
        free.unwrap_or_else(|| PageBuffer::new(self.bytes))
    }

    pub(super) fn give_back(&self, buffer: PageBuffer) {
        if let Ok(mut free) = self.free.lock() {
            free.push(buffer);
        }
    }
}
