//! Many reads of files in flight at once, by io_uring.
//!
//! The kernel writes into a buffer until it reports the read as done. So the ring owns the buffers of all reads in
//! flight: nobody can touch or free one, whatever happens to the rest of the program. A ring that is dropped waits for
//! its reads. If it cannot even wait, it leaks their buffers.

use crate::PageBuffer;
use crate::ring::Ring;
use io_uring::{opcode, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// A read to do.
#[derive(Debug)]
pub struct RingRead {
    /// The file. It stays open while the read is in flight.
    pub file: Arc<File>,
    /// The first byte of the file to read.
    pub at: u64,
    /// Where its bytes go, from the beginning.
    pub buffer: PageBuffer,
    /// How many to read. At most as many as the buffer has.
    pub bytes: usize,
    /// Comes back with the result.
    pub tag: u64,
}

/// A read that was done.
#[derive(Debug)]
pub struct RingResult {
    /// As the read had it.
    pub tag: u64,
    /// The read's buffer.
    pub buffer: PageBuffer,
    /// How many bytes were read: fewer than asked for at the end of the file, and whenever the system likes.
    pub result: io::Result<usize>,
}

/// A queue of reads that one thread fills and empties.
#[derive(Debug)]
pub struct ReadRing {
    ring: Ring,
    /// The reads that the kernel has or is about to get. Their places are the kernel's names for them.
    in_flight: Vec<Option<RingRead>>,
}

impl ReadRing {
    /// A queue for so many reads in flight, at least one.
    ///
    /// # Errors
    /// The system has no io_uring, or refuses it to this process.
    pub fn new(depth: usize) -> io::Result<ReadRing> {
        let ring = Ring::new(depth, &[opcode::Read::CODE])?;
        let in_flight = (0..ring.depth()).map(|_| None).collect();
        Ok(ReadRing { ring, in_flight })
    }

    /// How many reads can be in flight.
    pub fn depth(&self) -> usize {
        self.in_flight.len()
    }

    /// How many are.
    pub fn count(&self) -> usize {
        self.ring.in_flight()
    }

    /// Adds a read, which begins with the next call of [`ReadRing::submit`] or [`ReadRing::wait`].
    ///
    /// # Errors
    /// Returns the read if as many as possible are in flight, or its buffer is too short.
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
        // SAFETY: the buffer has as many bytes. It and the file belong to `in_flight` from here on, until the kernel
        // reports the read as done; moving the buffer does not move its memory. Dropping the ring waits for that or leaks.
        match unsafe { self.ring.push(&entry) } {
            true => {
                self.in_flight[place] = Some(read);
                Ok(())
            }
            false => Err(read),
        }
    }

    /// Begins the reads that were added.
    ///
    /// # Errors
    /// The system refuses. The reads stay in flight.
    pub fn submit(&mut self) -> io::Result<()> {
        self.ring.submit()
    }

    /// Waits for any read to be done; none if none is in flight.
    ///
    /// # Errors
    /// The system refuses. The reads stay in flight, and their buffers with the ring.
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
            // The kernel may still write into these.
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

    /// A ring; none where the system refuses it.
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
            // Nothing holds the file any more: every read was done and given up.
            assert_eq!(Arc::strong_count(&file), 1);
        }
    }
}
