//! Parallel map on all cores that still works if the system refuses threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// More threads gain nothing, because the disk is the bottleneck.
const THREADS_MAX: usize = 64;

/// Applies `apply` to each item, and returns the results in order. `state` is created once per
/// thread.
pub(super) fn map<T: Sync, R: Send, S>(
    items: &[T],
    state: impl Fn() -> S + Sync,
    apply: impl Fn(&mut S, &T) -> R + Sync,
) -> Vec<R> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut state = state();
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, apply(&mut state, item)));
        }
    };
    let mut results = thread::scope(|scope| {
        let others = cores.min(items.len()).min(THREADS_MAX).saturating_sub(1);
        // If the system allows fewer threads, this one does the rest.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let threads: Vec<_> = (0..others).map_while(spawn).collect();
        let mut results = work();
        for thread in threads {
            match thread.join() {
                Ok(done) => results.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_are_in_the_order_of_the_items() {
        for count in [0, 1, 2, 1000] {
            let items: Vec<u64> = (0..count).collect();
            let squares = super::map(
                &items,
                || 0,
                |calls, item| {
                    *calls += 1;
                    item * item
                },
            );
            assert!(squares.into_iter().eq((0..count).map(|item| item * item)));
        }
    }
}
