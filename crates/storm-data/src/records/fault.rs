//! Reads that go wrong on purpose, for tests.

use std::fmt::Debug;
use std::io;
use std::path::Path;

/// What the system is made to have done with one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFault {
    /// It failed with this error number.
    Fails(i32),
    /// It read no more than so many bytes.
    Short(usize),
    /// It changed a bit of the byte at this place.
    Corrupt(usize),
}

/// Decides which reads go wrong. A read that should be slow waits here.
pub trait ReadFaults: Debug + Send + Sync {
    /// Called with the result of every read that the system did: of which file, from where, how many bytes. Reads that
    /// follow from a fault, such as of the rest, count too.
    fn next(&self, path: &Path, at: u64, bytes: usize) -> Option<ReadFault>;
}

/// Fills what was not read, so that nothing is right by accident.
const GARBAGE: u8 = 0xa5;

/// The result of a read with the fault that was decided on.
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
