//! A thin wrapper around io_uring.

use io_uring::{IoUring, Probe, squeue};
use std::io;

/// A queue that one thread at a time fills and drains.
pub(crate) struct Ring {
    ring: IoUring,
    depth: usize,
    /// Entries pushed and not yet reaped.
    in_flight: usize,
    /// Fault injection: act as if the system refused io_uring.
    is_refused: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl Ring {
    /// A queue of this depth, at least 1.
    ///
    /// # Errors
    /// The system has no io_uring, denies it to this process, or does not support one of these
    /// operations.
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

    /// How many entries can be in flight at once.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// How many entries are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// How many entries have not been submitted.
    pub(crate) fn unsubmitted(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// Registers buffers with the kernel, given as address and length, at most 1 GiB each.
    ///
    /// # Errors
    /// The system refuses, for example because of the limit on locked memory.
    ///
    /// # Safety
    /// The memory stays mapped as long as entries refer to it by buffer index.
    pub(crate) unsafe fn register(&self, regions: &[(usize, usize)]) -> io::Result<()> {
        let vectors: Vec<libc::iovec> = regions
            .iter()
            .map(|&(address, bytes)| libc::iovec { iov_base: address as *mut _, iov_len: bytes })
            .collect();
        // SAFETY: the caller's promise.
        unsafe { self.ring.submitter().register_buffers(&vectors) }
    }

    /// Adds an entry. It starts with the next call to [`Ring::submit`] or [`Ring::wait`]. Returns
    /// false if the queue is full or refused.
    ///
    /// # Safety
    /// Its memory and file stay valid until its result is reaped, or until this is dropped with
    /// nothing in flight.
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        if self.is_refused || self.in_flight == self.depth {
            return false;
        }
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.ring.submission().push(entry) }.is_ok();
        self.in_flight += usize::from(pushed);
        pushed
    }

    /// Makes all later calls fail, as the system may.
    pub(crate) fn refuse(&mut self) {
        self.is_refused = true;
    }

    /// Submits the entries that were pushed.
    ///
    /// # Errors
    /// The system call failed. All entries stay in flight.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        self.enter(0)
    }

    /// Waits for any entry. Returns its `user_data` and the bytes transferred, or `None` if none is
    /// in flight.
    ///
    /// # Errors
    /// The system call failed. All entries stay in flight.
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

    /// Submits the entries that were pushed, and waits for this many completions.
    fn enter(&self, results: usize) -> io::Result<()> {
        match self.is_refused {
            true => Err(io::ErrorKind::Unsupported.into()),
            false => again(|| self.ring.submit_and_wait(results)),
        }
    }

    /// Polls until everything the kernel has accepted is complete, without another system call. For
    /// use after the kernel refused one. Entries not yet submitted never start.
    pub(crate) fn abandon(mut self) {
        let never_begun = self.ring.submission().len();
        while self.in_flight > never_begun {
            if self.take_done().is_none() {
                std::thread::yield_now();
            }
        }
    }

    /// Reaps one completion, if there is one.
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

/// Retries a call that a signal interrupted. EBUSY counts as success.
fn again(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<()> {
    loop {
        match call() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The completion queue has overflowed: reap completions first.
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
        // SAFETY: memory and pipe outlive the ring, which is abandoned below.
        assert!(unsafe { ring.push(&entry) });
        ring.submit().expect("begun");
        // SAFETY: as above. It is never submitted.
        assert!(unsafe { ring.push(&entry) });
        ring.refuse();
        assert!(ring.submit().is_err() && ring.wait().is_err());
        // SAFETY: as above.
        assert!(!unsafe { ring.push(&entry) });
        std::thread::scope(|scope| {
            scope.spawn(move || writer.write_all(&[7; 16]).expect("room"));
            ring.abandon();
            // SAFETY: a volatile read of memory that the kernel has written.
            assert_eq!(unsafe { std::ptr::read_volatile(&raw const memory) }, [7; 16]);
        });
    }
}
