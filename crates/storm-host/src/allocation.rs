//! A global allocator that counts, for tests of "allocates nothing" and "allocates little".
//!
//! It is here because a global allocator needs `unsafe`, which few crates may have.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, metered. A test binary installs it:
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

/// Allocations of this thread so far, reallocations included. By thread, because tests of one
/// binary run side by side: ask every thread of a pool for that of the pool.
pub fn count() -> usize {
    COUNT.get()
}

/// Allocations of all threads so far, for a test that is alone in its binary.
pub fn count_of_all_threads() -> usize {
    COUNT_OF_ALL.load(Ordering::SeqCst)
}

/// Runs something and returns the most bytes that this thread held at once meanwhile, beyond what
/// it held before.
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

// SAFETY: every call is passed on to the system's allocator unchanged. The counters are cells
// without a destructor, which are valid for the whole life of a thread and do not allocate.
unsafe impl GlobalAlloc for AllocationMeter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller keeps the promises of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller keeps the promises of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        given_back(layout.size());
        // SAFETY: `pointer` came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Old and new exist at once while the bytes are copied.
        taken(size);
        given_back(layout.size());
        // SAFETY: `pointer` came from `System` with this layout; the caller keeps the other promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
