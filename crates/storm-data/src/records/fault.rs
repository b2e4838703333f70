//! Fault injection for reads, for tests.

use std::fmt::Debug;
use std::io;
use std::path::Path;

/// A simulated fault of one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFault {
    /// It fails with this errno.
    Fails(i32),
    /// It reads at most this many bytes.
    Short(usize),
    /// It flips a bit of the byte at this offset.
    Corrupt(usize),
}

/// Decides which reads fail. To simulate a slow read, block here.
pub trait ReadFaults: Debug + Send + Sync {
    /// Called after every read with the file, the offset and the length. Reads that follow from a
    /// fault, such as of the rest, count too.
    fn next(&self, path: &Path, at: u64, bytes: usize) -> Option<ReadFault>;
}

/// Fills bytes that were not read, so that they are never correct by accident.
const GARBAGE: u8 = 0xa5;

/// Applies a fault to the result of a read.
pub(super) fn apply(
    fault: Option<ReadFault>,
    bytes: &mut [u8],
    result: io::Result<usize>,
) -> io::Result<usize> {
    match fault {
        None => result,
        Some(ReadFault::Fails(number)) => {
            bytes.fill(GARBAGE);
            Err(io::Error::from_raw_os_error(number))
        }
        Some(ReadFault::Short(count)) => {
            let count = result?.min(count);
            bytes[count..].fill(GARBAGE);
            Ok(count)
        }
        Some(ReadFault::Corrupt(at)) => {
            let count = result?;
            if let Some(byte) = bytes[..count].get_mut(at) {
                *byte ^= 1;
            }
            Ok(count)
        }
    }
}
