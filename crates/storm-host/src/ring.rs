//! io_uring as its users here need it: entries in, results out.

use io_uring::{IoUring, Probe, squeue};
use std::io;

/// A queue of accesses that one thread at a time fills and empties.
pub(crate) struct Ring {
    ring: IoUring,
    depth: usize,
    /// Entries that were added and have no result yet.
    in_flight: usize,
    /// Whether it acts as if the system refused it.
    is_refused: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl Ring {
    /// A queue for so many accesses in flight, at least one.
    ///
    /// # Errors
    /// The system has no io_uring, refuses it to this process, or does not know one of these operations.
    pub(crate) fn new(depth: usize, operations: &[u8]) -> io::Result<Ring> {
        let entries = u32::try_from(depth.max(1)).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ring = IoUring::new(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !operations.iter().all(|&operation| probe.is_supported(operation)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Ring { ring, depth: entries as usize, in_flight: 0, is_refused: false })
    }

    /// How many accesses can be in flight.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// How many are.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Lets the kernel keep these parts of memory at hand: addresses and bytes, at most 1 GiB each.
    ///
    /// # Errors
    /// The system refuses, such as by its limit on locked memory.
    ///
    /// # Safety
    /// The memory stays where it is as long as entries name it by its number.
    pub(crate) unsafe fn register(&self, regions: &[(usize, usize)]) -> io::Result<()> {
        let vectors: Vec<libc::iovec> = regions
            .iter()
            .map(|&(address, bytes)| libc::iovec { iov_base: address as *mut _, iov_len: bytes })
            .collect();
        // SAFETY: the caller's promise.
        unsafe { self.ring.submitter().register_buffers(&vectors) }
    }

    /// Adds an access, which begins with the next call of [`Ring::submit`] or [`Ring::wait`]; false if that is not possible.
    ///
    /// # Safety
    /// Its memory and its file stay until its result has come, or this is dropped while nothing is in flight.
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        if self.is_refused || self.in_flight == self.depth {
            return false;
        }
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.ring.submission().push(entry) }.is_ok();
        self.in_flight += usize::from(pushed);
        pushed
    }

    /// Lets everything fail from now on, as the system may.
    pub(crate) fn refuse(&mut self) {
        self.is_refused = true;
    }

    /// Begins what was added.
    ///
    /// # Errors
    /// The system refuses. Everything stays in flight.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        self.enter(0)
    }

    /// Waits for any access: what it was named, and the bytes that it transferred. None if none is in flight.
    ///
    /// # Errors
    /// The system refuses. Everything stays in flight.
    pub(crate) fn wait(&mut self) -> io::Result<Option<(u64, io::Result<usize>)>> {
        while self.in_flight > 0 {
            if !self.is_refused
                && let Some(done) = self.take_done()
            {
                return Ok(Some(done));
            }
            self.enter(1)?;
        }
        Ok(None)
    }

    /// Begins what was added, and waits for so many results.
    fn enter(&self, results: usize) -> io::Result<()> {
        match self.is_refused {
            true => Err(io::ErrorKind::Unsupported.into()),
            false => again(|| self.ring.submit_and_wait(results)),
        }
    }

    /// Waits for what the kernel has begun without asking it to, after it has refused that. What it has not begun, it
    /// never will.
    pub(crate) fn abandon(mut self) {
        let never_begun = self.ring.submission().len();
        while self.in_flight > never_begun {
            if self.take_done().is_none() {
                std::thread::yield_now();
            }
        }
    }

    /// What the kernel has reported.
    fn take_done(&mut self) -> Option<(u64, io::Result<usize>)> {
        let done = self.ring.completion().next()?;
        self.in_flight -= 1;
        let result = match done.result() {
            code if code < 0 => Err(io::Error::from_raw_os_error(-code)),
            bytes => Ok(bytes as usize),
        };
        Some((done.user_data(), result))
    }
}

/// Repeats a call that a signal interrupted, or that the kernel has no room for at the moment.
fn again(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<()> {
    loop {
        match call() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Results wait to be taken, or memory is short for the moment: take what there is.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::{opcode, types};
    use std::io::Write;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_ring_that_is_given_up_waits_for_what_has_begun() {
        // Without io_uring there is nothing to wait for.
        let Ok(mut ring) = Ring::new(2, &[opcode::Read::CODE]) else { return };
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let mut memory = [0u8; 16];
        let file = types::Fd(reader.as_raw_fd());
        let entry = opcode::Read::new(file, memory.as_mut_ptr(), 16).build();
        // SAFETY: memory and pipe outlive the ring, which is given up below.
        assert!(unsafe { ring.push(&entry) });
        ring.submit().expect("begun");
        // SAFETY: as above. It never begins.
        assert!(unsafe { ring.push(&entry) });
        ring.refuse();
        assert!(ring.submit().is_err() && ring.wait().is_err());
        // SAFETY: as above.
        assert!(!unsafe { ring.push(&entry) });
        std::thread::scope(|scope| {
            scope.spawn(move || writer.write_all(&[7; 16]).expect("room"));
            ring.abandon();
            // SAFETY: memory that the kernel has written is read as it is.
            assert_eq!(unsafe { std::ptr::read_volatile(&raw const memory) }, [7; 16]);
        });
    }
}
