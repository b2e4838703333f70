//! Page-granular host memory: exactly as much as requested, resident before it is used.

use crate::{HostLimit, HostMemoryRefused, limits};
use memmap2::{Advice, MmapOptions, MmapRaw};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// How much a thread touches at a time: many huge pages, yet small enough for several progress
/// reports a second.
const PIECE_BYTES: usize = 64 << 20;

/// More threads would only contend in the kernel.
const THREADS_MAX: usize = 16;

/// The smallest page size. Touching every such page also covers larger ones.
const PAGE_BYTES: usize = 4096;

/// Zeroed anonymous memory, in huge pages where available, fully resident.
#[derive(Debug)]
pub struct HostPages {
    map: MmapRaw,
}

impl HostPages {
    /// Allocates `bytes`, at least one, and faults them in with several threads. `progress`
    /// receives how many are resident so far.
    ///
    /// # Errors
    /// The machine or its control group has less memory.
    pub fn new(
        bytes: usize,
        mut progress: impl FnMut(usize),
    ) -> Result<HostPages, HostMemoryRefused> {
        let refused = |limit| HostMemoryRefused { wanted_bytes: bytes, limit };
        // If the system runs out of pages, it kills the process later, so check first.
        limits::check(bytes).map_err(refused)?;
        let map = MmapOptions::new()
            .len(bytes.max(1))
            .map_anon()
            .map_err(|error| refused(HostLimit::System { reason: error.to_string() }))?;
        // Only a hint: without huge pages it is just slower.
        let _ = map.advise(Advice::HugePage);
        let pages = HostPages { map: map.into() };

        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        pages.make_present(cores.min(THREADS_MAX), &mut progress);
        Ok(pages)
    }

    /// Touches all pages with this many threads, or as many as the system allows. If it allows
    /// none, the calling thread does the work.
    fn make_present(&self, threads: usize, progress: &mut impl FnMut(usize)) {
        let pieces = self.bytes().div_ceil(PIECE_BYTES);
        let next = AtomicUsize::new(0);
        let touch_all = |report: mpsc::Sender<usize>| {
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    break;
                }
                // Sending fails only if `progress` has panicked.
                let _ = report.send(self.touch(piece));
            }
        };
        let (report, reports) = mpsc::channel();
        let touch_all = &touch_all;
        std::thread::scope(|scope| {
            let start = |_: &usize| {
                let report = report.clone();
                std::thread::Builder::new().spawn_scoped(scope, move || touch_all(report)).is_ok()
            };
            let started = (0..threads.min(pieces)).take_while(start).count();
            match started {
                0 => touch_all(report),
                _ => drop(report),
            }
            let mut present = 0;
            for bytes in reports {
                present += bytes;
                progress(present);
            }
        });
    }

    /// Writes to each page of a piece and returns the piece's bytes.
    fn touch(&self, piece: usize) -> usize {
        let start = piece * PIECE_BYTES;
        let end = self.bytes().min(start + PIECE_BYTES);
        for offset in (start..end).step_by(PAGE_BYTES) {
            // SAFETY: inside the map, which is new: there is no other reference, and one thread
            // touches each piece. Writing zero does not change the zeroed page.
            unsafe { self.start().add(offset).write_volatile(0) };
        }
        end - start
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Its address, for a driver or for threads that copy. Write through it only while no slice of
    /// the pages is borrowed.
    pub fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// The memory, while only the host uses it.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped and initialized as long as `self` lives. No writes go through `start`
        // while a slice is borrowed.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes()) }
    }

    /// As [`HostPages::as_slice`], mutable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zero_and_as_many_as_asked_for() {
        for bytes in [1, 5000, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 12_345] {
            let mut heard = Vec::new();
            let pages = HostPages::new(bytes, |present| heard.push(present)).expect("little");
            assert_eq!(pages.bytes(), bytes);
            assert_eq!(heard.last(), Some(&bytes));
            assert!(heard.is_sorted(), "{heard:?}");
            // SAFETY: the memory belongs to the map, and only this test uses it.
            let slice = unsafe { std::slice::from_raw_parts(pages.start(), bytes) };
            assert!(slice.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn pages_are_made_present_without_threads_too() {
        let pages = HostPages::new(2 * PIECE_BYTES + 1, |_| {}).expect("little");
        for threads in [0, 1, 3] {
            let mut heard = Vec::new();
            pages.make_present(threads, &mut |present| heard.push(present));
            assert_eq!((heard.len(), heard.last()), (3, Some(&pages.bytes())), "{threads}");
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused_beforehand() {
        let refusal =
            HostPages::new(1 << 50, |_| panic!("nothing is taken")).expect_err("too much");
        assert_eq!(refusal.wanted_bytes, 1 << 50);
        let limit = refusal.limit;
        assert!(matches!(limit, HostLimit::Machine { .. } | HostLimit::ControlGroup { .. }));
    }
}
