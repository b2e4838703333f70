//! A counting global allocator, for tests of "allocates nothing" and "allocates little".
//!
//! It is here because a global allocator needs `unsafe`, which few crates may use.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, with counters. A test binary installs it:
///
/// ```
/// use storm_host::allocation::{AllocationMeter, count, peak_bytes};
///
/// #[global_allocator]
/// static METER: AllocationMeter = AllocationMeter;
///
/// let before = count();
/// let (numbers, peak) = peak_bytes(|| vec![0u8; 1000]);
/// assert!(count() > before && peak >= 1000);
/// drop(numbers);
/// ```
pub struct AllocationMeter;

static COUNT_OF_ALL: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
    static CURRENT_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

/// Allocations of this thread so far, including reallocations. Per thread, because tests of one
/// binary run concurrently. For a pool, ask each of its threads.
pub fn count() -> usize {
    COUNT.get()
}

/// Allocations of all threads so far, for a test that runs alone in its binary.
pub fn count_of_all_threads() -> usize {
    COUNT_OF_ALL.load(Ordering::SeqCst)
}

/// Runs a closure and returns this thread's peak allocated bytes during it, minus what was
/// allocated before.
pub fn peak_bytes<T>(run: impl FnOnce() -> T) -> (T, isize) {
    let before = CURRENT_BYTES.get();
    PEAK_BYTES.set(before);
    let result = run();
    (result, PEAK_BYTES.get() - before)
}

fn taken(bytes: usize) {
    COUNT.set(COUNT.get() + 1);
    COUNT_OF_ALL.fetch_add(1, Ordering::SeqCst);
    let current = CURRENT_BYTES.get() + bytes as isize;
    CURRENT_BYTES.set(current);
    PEAK_BYTES.set(PEAK_BYTES.get().max(current));
}

fn given_back(bytes: usize) {
    CURRENT_BYTES.set(CURRENT_BYTES.get() - bytes as isize);
}

// SAFETY: every call is forwarded to the system's allocator unchanged. The counters are cells
// without a destructor, so they are valid for the whole life of a thread and do not allocate.
unsafe impl GlobalAlloc for AllocationMeter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        given_back(layout.size());
        // SAFETY: `pointer` came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The old and new blocks coexist while the bytes are copied.
        taken(size);
        given_back(layout.size());
        // SAFETY: `pointer` came from `System` with this layout. The caller upholds the rest of the
        // contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
