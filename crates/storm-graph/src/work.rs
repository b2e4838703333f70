//! Counts work, for tests of how the cost of planning grows with a model. They count visited items
//! rather than time. Only builds with debug assertions count.

/// Counts visited items.
#[inline(always)]
pub fn count(things: usize) {
    #[cfg(debug_assertions)]
    counter::add(things as u64);
    #[cfg(not(debug_assertions))]
    let _ = things;
}

#[cfg(debug_assertions)]
pub use counter::work_of;

#[cfg(debug_assertions)]
mod counter {
    use std::cell::Cell;

    thread_local! {
        static WORK: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn add(things: u64) {
        WORK.set(WORK.get() + things);
    }

    /// The number of items that this thread visits in a call.
    pub fn work_of<R>(call: impl FnOnce() -> R) -> (R, u64) {
        let before = WORK.get();
        let result = call();
        (result, WORK.get() - before)
    }
}
