//! A limit on input that was read but not written yet.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Limit on input in flight: the longest record, or two pieces per thread if that is more.
pub(super) fn bytes_max(threads: usize) -> u64 {
    let for_threads = 2 * super::cut::PIECE_BYTES as u64 * threads as u64;
    for_threads.max(super::records::RECORD_BYTES_MAX)
}

/// Bytes of input between the reader and the writer.
pub(super) struct UnderWay {
    state: Mutex<State>,
    /// Signaled when bytes were written, or the writer has stopped.
    changed: Condvar,
    bytes_max: u64,
}

#[derive(Default)]
struct State {
    bytes: u64,
    closed: bool,
}

impl UnderWay {
    pub(super) fn new(bytes_max: u64) -> UnderWay {
        UnderWay { state: Mutex::default(), changed: Condvar::new(), bytes_max }
    }

    /// Waits until there is room for this many bytes, or nothing else is in flight. Returns false
    /// if the writer has stopped.
    pub(super) fn enter(&self, bytes: u64) -> bool {
        let is_full = |state: &mut State| {
            !state.closed && state.bytes > 0 && state.bytes + bytes > self.bytes_max
        };
        let waited = self.changed.wait_while(self.lock(), is_full);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.bytes += bytes;
        !state.closed
    }

    /// Called after this many bytes were written.
    pub(super) fn leave(&self, bytes: u64) {
        self.lock().bytes -= bytes;
        self.changed.notify_one();
    }

    /// Called when the writer stops.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_bound_is_under_way_except_alone() {
        let under_way = UnderWay::new(10);
        assert!(under_way.enter(25), "alone, whatever its size");
        under_way.leave(25);
        assert!(under_way.enter(4) && under_way.enter(6));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| under_way.enter(5));
            under_way.leave(4);
            under_way.leave(6);
            assert!(waits.join().unwrap());
            let refused = scope.spawn(|| under_way.enter(6));
            under_way.close();
            assert!(!refused.join().unwrap());
        });
    }
}
