//! Many file reads in flight at once, with io_uring.
//!
//! The kernel writes into a buffer until it reports the read as complete. So the ring owns the
//! buffers of all reads in flight, and nothing else can access or free them. Dropping a ring waits
//! for its reads. If waiting fails, it leaks their buffers.

use crate::PageBuffer;
use crate::ring::Ring;
use io_uring::{opcode, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// A read request.
#[derive(Debug)]
pub struct RingRead {
    /// The file. It stays open while the read is in flight.
    pub file: Arc<File>,
    /// The first byte of the file to read.
    pub at: u64,
    /// Receives the bytes, from its beginning.
    pub buffer: PageBuffer,
    /// How many bytes to read, at most the length of the buffer.
    pub bytes: usize,
    /// Returned with the result.
    pub tag: u64,
}

/// A completed read.
#[derive(Debug)]
pub struct RingResult {
    /// The tag of the request.
    pub tag: u64,
    /// The read's buffer.
    pub buffer: PageBuffer,
    /// Bytes read. May be fewer than requested, at the end of the file or at any other time.
    pub result: io::Result<usize>,
}

/// A queue of reads that one thread fills and empties.
#[derive(Debug)]
pub struct ReadRing {
    ring: Ring,
    /// The reads pushed and not yet completed. The index is the read's `user_data` in the ring.
    in_flight: Vec<Option<RingRead>>,
}

impl ReadRing {
    /// A queue of this depth, at least 1.
    ///
    /// # Errors
    /// The system has no io_uring, or denies it to this process.
    pub fn new(depth: usize) -> io::Result<ReadRing> {
        let ring = Ring::new(depth, &[opcode::Read::CODE])?;
        let in_flight = (0..ring.depth()).map(|_| None).collect();
        Ok(ReadRing { ring, in_flight })
    }

    /// How many reads can be in flight at once.
    pub fn depth(&self) -> usize {
        self.in_flight.len()
    }

    /// How many reads are in flight.
    pub fn count(&self) -> usize {
        self.ring.in_flight()
    }

    /// How many reads have not been submitted.
    pub fn unsubmitted(&mut self) -> usize {
        self.ring.unsubmitted()
    }

    /// Adds a read. It starts with the next call to [`ReadRing::submit`] or [`ReadRing::wait`].
    ///
    /// # Errors
    /// Returns the read if the queue is full or its buffer is too short.
    pub fn push(&mut self, mut read: RingRead) -> Result<(), RingRead> {
        let Some(place) = self.in_flight.iter().position(Option::is_none) else { return Err(read) };
        let Ok(bytes) = u32::try_from(read.bytes) else { return Err(read) };
        if read.bytes > read.buffer.len() {
            return Err(read);
        }
        let start = read.buffer.as_mut_slice().as_mut_ptr();
        let entry = opcode::Read::new(types::Fd(read.file.as_raw_fd()), start, bytes)
            .offset(read.at)
            .build()
            .user_data(place as u64);
        // SAFETY: the buffer is large enough. `in_flight` owns it and the file until the kernel
        // reports completion. Moving the buffer does not move its memory. Dropping the ring waits
        // for completion or leaks the buffer.
        match unsafe { self.ring.push(&entry) } {
            true => {
                self.in_flight[place] = Some(read);
                Ok(())
            }
            false => Err(read),
        }
    }

    /// Starts the reads that were pushed.
    ///
    /// # Errors
    /// The system call failed. The reads stay in flight.
    pub fn submit(&mut self) -> io::Result<()> {
        self.ring.submit()
    }

    /// Waits for any read to complete. Returns `None` if none is in flight.
    ///
    /// # Errors
    /// The system call failed. The reads stay in flight, and the ring keeps their buffers.
    pub fn wait(&mut self) -> io::Result<Option<RingResult>> {
        while let Some((place, result)) = self.ring.wait()? {
            let read = self.in_flight.get_mut(place as usize).and_then(Option::take);
            let Some(read) = read else { continue };
            let result = result.map(|bytes| bytes.min(read.bytes));
            return Ok(Some(RingResult { tag: read.tag, buffer: read.buffer, result }));
        }
        Ok(None)
    }
}

impl Drop for ReadRing {
    fn drop(&mut self) {
        while let Ok(Some(_)) = self.wait() {}
        if self.ring.in_flight() > 0 {
            // The kernel may still write into these buffers.
            std::mem::forget(std::mem::take(&mut self.in_flight));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::path::PathBuf;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str, bytes: &[u8]) -> (Scratch, Arc<File>) {
            let path = std::env::temp_dir().join(format!("storm-{name}-{}", std::process::id()));
            File::create(&path).expect("a file").write_all(bytes).expect("written");
            let file = Arc::new(File::open(&path).expect("there"));
            (Scratch(path), file)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).ok();
        }
    }

    /// `None` where the system has no io_uring.
    fn ring(depth: usize) -> Option<ReadRing> {
        ReadRing::new(depth).inspect_err(|error| eprintln!("no io_uring here: {error}")).ok()
    }

    fn read(file: &Arc<File>, at: u64, bytes: usize, tag: u64) -> RingRead {
        RingRead { file: Arc::clone(file), at, buffer: PageBuffer::new(bytes), bytes, tag }
    }

    fn content() -> Vec<u8> {
        (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    #[test]
    fn each_read_gets_its_own_bytes() {
        let Some(mut ring) = ring(4) else { return };
        let content = content();
        let (_scratch, file) = Scratch::new("ring", &content);
        for round in 0..5 {
            for tag in 0..4 {
                let at = round * 1000 + tag * 10_000;
                ring.push(read(&file, at, 5000, tag)).expect("room");
            }
            let refused = ring.push(read(&file, 0, 1, 9)).expect_err("full");
            assert_eq!((refused.tag, ring.count(), ring.depth()), (9, 4, 4));
            ring.submit().expect("submitted");
            let mut seen = Vec::new();
            while let Some(done) = ring.wait().expect("done") {
                let at = (round * 1000 + done.tag * 10_000) as usize;
                assert_eq!(done.result.expect("read"), 5000);
                assert_eq!(done.buffer.as_slice()[..5000], content[at..at + 5000]);
                seen.push(done.tag);
            }
            seen.sort_unstable();
            assert_eq!(seen, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn ends_and_refusals_come_back_as_results() {
        let Some(mut ring) = ring(2) else { return };
        let (_scratch, file) = Scratch::new("ring-end", &content());
        ring.push(read(&file, 99_000, 4096, 1)).expect("room");
        let done = ring.wait().expect("done").expect("one");
        assert_eq!(done.result.expect("the rest"), 1000);
        // A directory cannot be read.
        let directory = Arc::new(File::open("/").expect("there"));
        ring.push(read(&directory, 0, 4096, 2)).expect("room");
        let done = ring.wait().expect("done").expect("one");
        assert_eq!(done.result.expect_err("refused").raw_os_error(), Some(libc::EISDIR));
        let mut long = read(&file, 0, 4096, 3);
        long.bytes = 4097;
        assert_eq!(ring.push(long).expect_err("more than the buffer has").tag, 3);
        assert!(ring.wait().expect("nothing").is_none());
    }

    #[test]
    fn a_ring_that_is_dropped_waits_for_its_reads() {
        let (_scratch, file) = Scratch::new("ring-drop", &content());
        for submitted in [false, true] {
            let Some(mut ring) = ring(8) else { return };
            for tag in 0..8 {
                ring.push(read(&file, tag * 4096, 4096, tag)).expect("room");
            }
            if submitted {
                ring.submit().expect("submitted");
            }
            drop(ring);
            // Nothing holds the file anymore: every read completed and was dropped.
            assert_eq!(Arc::strong_count(&file), 1);
        }
    }
}
