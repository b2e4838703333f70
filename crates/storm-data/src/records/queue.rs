//! The reads of one thread, in order, with as many in flight as the system allows.

use super::read::ShardFile;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use storm_host::{PageBuffer, ReadRing, RingRead};

/// A queue of reads. Without io_uring, each read runs when its result is requested.
#[derive(Debug)]
pub(super) struct ReadQueue {
    ring: Option<ReadRing>,
    /// Shared by all threads of a dataset: set once io_uring is refused.
    ring_refused: Arc<AtomicBool>,
    /// Oldest first.
    pending: VecDeque<Pending>,
    /// Sequence number of the oldest read.
    first: u64,
    /// A read was added after the last result.
    has_grown: bool,
}

/// Reads are submitted once they are this fraction (an eighth) of those that are pending. A system
/// call for each read, and on virtual disks a notification, would cost more than a short read itself.
const SUBMITTED_SHARE: usize = 8;

#[derive(Debug)]
struct Pending {
    shard: Arc<ShardFile>,
    at: u64,
    bytes: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Not started. Runs when its result is requested.
    Waiting(PageBuffer),
    /// The ring has it, with its buffer of this size.
    InFlight {
        capacity: usize,
    },
    Done(PageBuffer, io::Result<usize>),
}

impl ReadQueue {
    /// A queue of this depth, or 1 if io_uring is refused.
    pub(super) fn new(depth: usize, ring_refused: &Arc<AtomicBool>) -> ReadQueue {
        let ring = match ring_refused.load(Ordering::Relaxed) {
            true => None,
            false => ReadRing::new(depth).ok(),
        };
        if ring.is_none() {
            ring_refused.store(true, Ordering::Relaxed);
        }
        let ring_refused = Arc::clone(ring_refused);
        ReadQueue { ring, ring_refused, pending: VecDeque::new(), first: 0, has_grown: false }
    }

    /// How many reads can be in flight at once.
    pub(super) fn depth(&self) -> usize {
        self.ring.as_ref().map_or(1, ReadRing::depth)
    }

    /// How many reads are pending.
    pub(super) fn count(&self) -> usize {
        self.pending.len()
    }

    /// Whether there is room for another.
    pub(super) fn has_room(&self) -> bool {
        self.pending.len() < self.depth()
    }

    /// Adds a read of whole pages into the beginning of a buffer.
    pub(super) fn push(
        &mut self,
        shard: &Arc<ShardFile>,
        at: u64,
        bytes: usize,
        buffer: PageBuffer,
    ) {
        let tag = self.first + self.pending.len() as u64;
        let state = match (&mut self.ring, shard.direct()) {
            (Some(ring), Some(file)) => {
                let (file, capacity) = (Arc::clone(file), buffer.len());
                match ring.push(RingRead { file, at, buffer, bytes, tag }) {
                    Ok(()) => State::InFlight { capacity },
                    Err(read) => State::Waiting(read.buffer),
                }
            }
            _ => State::Waiting(buffer),
        };
        self.pending.push_back(Pending { shard: Arc::clone(shard), at, bytes, state });
        self.has_grown = true;
        let together = (self.pending.len() / SUBMITTED_SHARE).max(1);
        if self.ring.as_mut().is_some_and(|ring| ring.unsubmitted() >= together) {
            self.submit();
        }
    }

    /// Waits for the result of the oldest read. `None` if there is no read.
    pub(super) fn pop(&mut self) -> Option<(PageBuffer, io::Result<()>)> {
        // While reads are being added, later ones submit these. Now nothing else would.
        if !std::mem::take(&mut self.has_grown) {
            self.submit();
        }
        self.wait_for_oldest();
        let Pending { shard, at, bytes, state } = self.pending.pop_front()?;
        self.first += 1;
        Some(match state {
            State::Done(mut buffer, result) => {
                let result = shard.complete(at, &mut buffer.as_mut_slice()[..bytes], result);
                (buffer, result)
            }
            State::Waiting(mut buffer) => {
                let result = shard.read_pages(at, &mut buffer.as_mut_slice()[..bytes]);
                (buffer, result)
            }
            State::InFlight { .. } => unreachable!("the oldest read was waited for"),
        })
    }

    /// Starts all reads that were added.
    fn submit(&mut self) {
        if self.ring.as_mut().is_some_and(|ring| ring.submit().is_err()) {
            self.give_up_ring();
        }
    }

    /// Waits for all reads and discards them.
    pub(super) fn clear(&mut self) {
        while !self.pending.is_empty() {
            self.wait_for_oldest();
            self.pending.pop_front();
            self.first += 1;
        }
    }

    fn wait_for_oldest(&mut self) {
        while let Some(Pending { state: State::InFlight { .. }, .. }) = self.pending.front() {
            match self.ring.as_mut().map(ReadRing::wait) {
                Some(Ok(Some(done))) => {
                    let place = (done.tag - self.first) as usize;
                    self.pending[place].state = State::Done(done.buffer, done.result);
                }
                // The kernel refused after all.
                _ => self.give_up_ring(),
            }
        }
    }

    /// Repeats the reads that were in flight, one at a time. The ring keeps their buffers as long
    /// as it must.
    fn give_up_ring(&mut self) {
        self.ring = None;
        self.ring_refused.store(true, Ordering::Relaxed);
        for read in &mut self.pending {
            if let State::InFlight { capacity } = read.state {
                read.state = State::Waiting(PageBuffer::new(capacity));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::layout::PAGE_BYTES;
    use crate::records::reading::Reading;
    use std::path::Path;

    const READS: usize = 6;

    /// A queue with all reads of a shard pending, and their expected results.
    fn begun(dir: &Path, reading: Reading) -> (ReadQueue, Vec<Vec<u8>>) {
        let path = dir.join("shard");
        let bytes: Vec<u8> = (0..READS * PAGE_BYTES).map(|at| (at / 7) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let shard = Arc::new(ShardFile::open(&path, reading).unwrap());
        let refused = Arc::new(AtomicBool::new(reading != Reading::Ring));
        let mut queue = ReadQueue::new(READS, &refused);
        for number in 0..READS {
            let buffer = PageBuffer::new(2 * PAGE_BYTES);
            queue.push(&shard, (number * PAGE_BYTES) as u64, PAGE_BYTES, buffer);
        }
        (queue, bytes.chunks(PAGE_BYTES).map(<[u8]>::to_vec).collect())
    }

    fn check(queue: &mut ReadQueue, expected: &[Vec<u8>]) {
        for expected in expected {
            let (buffer, result) = queue.pop().unwrap();
            result.unwrap();
            assert_eq!(buffer.as_slice()[..PAGE_BYTES], expected[..]);
            // It can be reused for a block of any size.
            assert_eq!(buffer.len(), 2 * PAGE_BYTES);
        }
    }

    #[test]
    fn results_come_in_the_order_of_the_reads() {
        let dir = tempfile::tempdir().unwrap();
        for reading in Reading::ALL {
            let (mut queue, expected) = begun(dir.path(), reading);
            check(&mut queue, &expected);
            assert!(queue.pop().is_none());
        }
    }

    #[test]
    fn a_ring_that_is_refused_halfway_loses_no_read() {
        let dir = tempfile::tempdir().unwrap();
        for done in [0, 2] {
            let (mut queue, expected) = begun(dir.path(), Reading::Ring);
            check(&mut queue, &expected[..done]);
            queue.give_up_ring();
            check(&mut queue, &expected[done..]);
            assert!(queue.ring_refused.load(Ordering::Relaxed));
            assert_eq!(queue.depth(), 1);
        }
    }

    #[test]
    fn reads_are_submitted_together_and_none_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard");
        std::fs::write(&path, vec![3; PAGE_BYTES]).unwrap();
        let open = |reading| Arc::new(ShardFile::open(&path, reading).unwrap());
        // Reads of this one never enter the ring, so that it is known when the ring is called.
        let (plain, direct) = (open(Reading::Advised), open(Reading::Ring));
        let mut queue = ReadQueue::new(4 * SUBMITTED_SHARE, &Arc::default());
        if queue.ring.is_none() || direct.direct().is_none() {
            eprintln!("no io_uring here");
            return;
        }
        let push = |queue: &mut ReadQueue, shard| {
            queue.push(shard, 0, PAGE_BYTES, PageBuffer::new(PAGE_BYTES));
        };
        let unsubmitted = |queue: &mut ReadQueue| queue.ring.as_mut().unwrap().unsubmitted();
        push(&mut queue, &direct);
        assert_eq!(unsubmitted(&mut queue), 0, "few reads are pending");
        queue.pop().unwrap().1.unwrap();
        for _ in 0..2 * SUBMITTED_SHARE {
            push(&mut queue, &plain);
        }
        for left in [1, 0, 1] {
            push(&mut queue, &direct);
            assert_eq!(unsubmitted(&mut queue), left);
        }
        queue.pop().unwrap().1.unwrap();
        assert_eq!(unsubmitted(&mut queue), 1, "a later read would submit it");
        queue.pop().unwrap().1.unwrap();
        assert_eq!(unsubmitted(&mut queue), 0, "no read was added");
        while let Some((_, result)) = queue.pop() {
            result.unwrap();
        }
    }

    #[test]
    fn reads_that_are_forgotten_leave_room_for_others() {
        let dir = tempfile::tempdir().unwrap();
        for reading in Reading::ALL {
            let (mut queue, _) = begun(dir.path(), reading);
            queue.clear();
            assert!(queue.has_room() && queue.pop().is_none());
        }
    }
}
