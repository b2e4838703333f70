//! The bytes of an input, decompressed on the fly in bounded memory.

use super::format::Compression;
use crate::DataError;
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use storm_files::open_plain;

/// Limit on the zstd window, as a power of two: 128 MiB, enough for all of its regular levels.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

const BUFFER_BYTES: usize = 1 << 18;

/// How much of standard input can be inspected in advance.
const LOOKED_AT_BYTES_MAX: usize = 128 << 20;

/// The source of an input.
#[derive(Clone, Debug)]
pub(super) enum Origin {
    File(PathBuf),
    Stdin(Stdin),
}

/// Standard input, whose start can be inspected before it is consumed.
#[derive(Clone, Debug, Default)]
pub(super) struct Stdin {
    seen: Arc<Mutex<Vec<u8>>>,
}

/// Whether bytes are consumed or only inspected.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Look,
    Take,
}

impl Origin {
    pub(super) fn path(&self) -> &Path {
        match self {
            Origin::File(path) => path,
            Origin::Stdin(_) => Path::new("standard input"),
        }
    }

    fn open(&self, how: Use) -> Result<Box<dyn Read>, DataError> {
        Ok(match self {
            Origin::File(path) => Box::new(plain(path)?),
            Origin::Stdin(stdin) => match how {
                Use::Look => Box::new(Tee(stdin.clone())),
                Use::Take => {
                    let mut seen = stdin.seen.lock().unwrap_or_else(PoisonError::into_inner);
                    Box::new(Cursor::new(std::mem::take(&mut *seen)).chain(io::stdin()))
                }
            },
        })
    }
}

fn plain(path: &Path) -> Result<File, DataError> {
    open_plain(path).map_err(DataError::io(path))
}

/// Standard input, keeping a copy of what is read.
struct Tee(Stdin);

impl Read for Tee {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = io::stdin().read(bytes)?;
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() > LOOKED_AT_BYTES_MAX {
            return Err(io::Error::other("its first 128 MiB hold no record that can be used"));
        }
        seen.extend(&bytes[..count]);
        Ok(count)
    }
}

/// An input that is being read.
pub(super) struct Stream {
    path: PathBuf,
    reader: Box<dyn Read>,
    compression: Option<Compression>,
    taken: Arc<Taken>,
}

/// What was read from the raw input.
#[derive(Default)]
struct Taken {
    bytes: AtomicU64,
    /// Reading it failed with a system error.
    failed: AtomicBool,
}

struct Counted {
    reader: Box<dyn Read>,
    taken: Arc<Taken>,
}

impl Read for Counted {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let result = self.reader.read(bytes);
        match &result {
            Ok(count) => drop(self.taken.bytes.fetch_add(*count as u64, Ordering::Relaxed)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.taken.failed.store(true, Ordering::Relaxed),
        }
        result
    }
}

impl Stream {
    /// Opens an input. `named` is the compression that its name implies.
    pub(super) fn open(
        origin: &Origin,
        named: Option<Compression>,
        how: Use,
    ) -> Result<Stream, DataError> {
        let path = origin.path();
        let io = DataError::io(path);
        let taken = Arc::<Taken>::default();
        let mut reader = Counted { reader: origin.open(how)?, taken: Arc::clone(&taken) };
        let mut beginning = Vec::new();
        (&mut reader).take(4).read_to_end(&mut beginning).map_err(&io)?;
        let compression = Compression::of_beginning(&beginning);
        if let (Some(named), false) = (named, beginning.is_empty())
            && compression != Some(named)
        {
            let problem = format!("its name says {}, and it is not in that format", named.name());
            return Err(DataError::input(path, problem));
        }
        let whole = Cursor::new(beginning).chain(reader);
        let buffered = BufReader::with_capacity(BUFFER_BYTES, whole);
        let reader: Box<dyn Read> = match compression {
            None => Box::new(buffered),
            Some(Compression::Gzip) => Box::new(MultiGzDecoder::new(buffered)),
            Some(Compression::Zstd) => {
                let mut decoder =
                    zstd::stream::read::Decoder::with_buffer(buffered).map_err(&io)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(&io)?;
                Box::new(decoder)
            }
        };
        Ok(Stream { path: path.to_owned(), reader, compression, taken })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes read from the raw input, before decompression.
    pub(super) fn taken(&self) -> u64 {
        self.taken.bytes.load(Ordering::Relaxed)
    }

    /// Appends up to `bytes` bytes, fewer only at the end.
    pub(super) fn read_up_to(&mut self, bytes: usize, to: &mut Vec<u8>) -> Result<(), DataError> {
        let read = (&mut self.reader).take(bytes as u64).read_to_end(to);
        read.map(drop).map_err(|error| self.error(error))
    }

    /// Damaged compressed data is bad input, not a system error.
    fn error(&self, error: io::Error) -> DataError {
        match self.compression {
            Some(compression) if !self.taken.failed.load(Ordering::Relaxed) => {
                let name = compression.name();
                DataError::input(&self.path, format!("its {name} cannot be decompressed: {error}"))
            }
            _ => DataError::io(&self.path)(error),
        }
    }
}

/// A buffered stream with lookahead.
pub(super) struct Buffered {
    stream: Stream,
    buffer: Vec<u8>,
    at: usize,
}

impl Buffered {
    pub(super) fn new(stream: Stream) -> Buffered {
        Buffered { stream, buffer: Vec::with_capacity(BUFFER_BYTES), at: 0 }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The next bytes. Empty only at the end.
    pub(super) fn bytes(&mut self) -> Result<&[u8], DataError> {
        if self.at == self.buffer.len() {
            self.buffer.clear();
            self.at = 0;
            self.stream.read_up_to(BUFFER_BYTES, &mut self.buffer)?;
        }
        Ok(&self.buffer[self.at..])
    }

    /// The next byte. `None` at the end.
    pub(super) fn peek(&mut self) -> Result<Option<u8>, DataError> {
        Ok(self.bytes()?.first().copied())
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.at += count;
    }
}
