//! The data queue of a plan on a GPU: a thread that reads ahead.

use crate::DeviceError;
use crate::supply::{Supplied, Supply};
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use storm_plan::InstructionId;

/// The largest number of waiting reads. The host waits when it is that far ahead.
const WAITING_MAX: usize = 1024;

/// The largest number of reads of a step that are recorded.
const RUNS_MAX: usize = 1 << 16;

/// An instruction that a thread of the host ran, with times of the host's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostRun {
    pub(super) instruction: InstructionId,
    pub(super) start: Instant,
    pub(super) end: Instant,
}

/// A thread that reads ahead, one read after another.
pub(super) struct Reader {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Signaled at every change.
    news: Condvar,
}

struct State {
    /// Reads that are not done, and the number of micro-batches of each.
    waiting: VecDeque<(InstructionId, usize)>,
    done: u64,
    supply: Supplied,
    panicked: bool,
    stopping: bool,
    runs: Vec<HostRun>,
}

impl Reader {
    /// Starts the thread. `recorded` tells whether runs are recorded.
    pub(super) fn new(recorded: bool) -> Result<Reader, DeviceError> {
        let state = State {
            waiting: VecDeque::with_capacity(WAITING_MAX),
            done: 0,
            supply: None,
            panicked: false,
            stopping: false,
            runs: Vec::with_capacity(if recorded { RUNS_MAX } else { 0 }),
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), news: Condvar::new() });
        let theirs = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("data".to_owned()).spawn(move || theirs.run());
        let thread = thread.map_err(|error| DeviceError::Thread { reason: error.to_string() })?;
        Ok(Reader { shared, thread: Some(thread) })
    }

    /// Sets the source of later reads.
    pub(super) fn set_supply(&self, supply: Arc<dyn Supply>) {
        self.shared.lock().supply = Some(supply);
    }

    /// The source from which fetches take data.
    pub(super) fn supply(&self) -> Supplied {
        self.shared.lock().supply.clone()
    }

    /// Issues a read.
    pub(super) fn give(&self, instruction: InstructionId, micro_batches: usize) {
        let full = |state: &State| state.waiting.len() == WAITING_MAX && !state.panicked;
        let mut state = self.shared.wait_while(full);
        state.waiting.push_back((instruction, micro_batches));
        self.shared.news.notify_all();
    }

    /// Waits until this many reads are done in all. Returns whether none has panicked.
    pub(super) fn wait(&self, count: u64) -> bool {
        !self.shared.wait_while(|state| state.done < count && !state.panicked).panicked
    }

    /// Forgets the runs of the previous step.
    pub(super) fn begin(&self) {
        self.shared.lock().runs.clear();
    }

    /// The reads of the step.
    pub(super) fn runs(&self) -> Vec<HostRun> {
        self.shared.lock().runs.clone()
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let state = self.wait_while(|state| state.waiting.is_empty() && !state.stopping);
            let Some(&(instruction, micro_batches)) = state.waiting.front() else { return };
            if state.stopping {
                return;
            }
            let supply = state.supply.clone();
            drop(state);
            let start = Instant::now();
            let read = catch_unwind(AssertUnwindSafe(|| {
                if let Some(supply) = supply {
                    supply.read_ahead(micro_batches);
                }
            }));
            let end = Instant::now();
            let mut state = self.lock();
            if state.runs.len() < state.runs.capacity() {
                state.runs.push(HostRun { instruction, start, end });
            }
            state.waiting.pop_front();
            state.done += 1;
            state.panicked = read.is_err();
            let ends = state.panicked;
            drop(state);
            self.news.notify_all();
            if ends {
                return;
            }
        }
    }

    /// Waits while `is_early` is true, and returns holding the lock.
    fn wait_while(&self, is_early: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.news.wait_while(self.lock(), |state| is_early(state));
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.news.notify_all();
        if let Some(thread) = self.thread.take() {
            // Panics of the source are caught in the thread.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("done", &self.shared.lock().done).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PutInput;
    use storm_plan::Fetch;

    /// Lists the sizes of reads, and panics at a read of no micro-batches.
    #[derive(Default)]
    struct Counted(Mutex<Vec<usize>>);

    impl Supply for Counted {
        fn fetch(&self, _: &Fetch, _: &mut PutInput<'_>) -> Result<(), DeviceError> {
            Ok(())
        }

        fn read_ahead(&self, micro_batches: usize) {
            assert!(micro_batches > 0, "nothing to read");
            self.0.lock().unwrap().push(micro_batches);
        }
    }

    #[test]
    fn reads_are_done_in_order() {
        let reader = Reader::new(true).unwrap();
        let source = Arc::new(Counted::default());
        reader.set_supply(source.clone());
        for count in 1..=3000 {
            reader.give(InstructionId(7), count);
        }
        assert!(reader.wait(3000));
        assert_eq!(*source.0.lock().unwrap(), (1..=3000).collect::<Vec<_>>());
        assert_eq!(reader.runs().len(), 3000);
        reader.begin();
        assert!(reader.runs().is_empty());
    }

    #[test]
    fn a_panic_ends_the_queue_and_is_told() {
        let reader = Reader::new(false).unwrap();
        reader.set_supply(Arc::new(Counted::default()));
        reader.give(InstructionId(0), 1);
        assert!(reader.wait(1));
        reader.give(InstructionId(0), 0);
        reader.give(InstructionId(0), 1);
        assert!(!reader.wait(3));
        assert!(reader.runs().is_empty());
    }
}
