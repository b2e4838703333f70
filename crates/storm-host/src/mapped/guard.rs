//! The table of guarded ranges, and the SIGBUS handler that looks addresses up in it.

use std::ffi::c_int;
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Maximum number of maps. The table has a fixed size because a signal handler can neither lock nor
/// allocate.
const PLACES: usize = 16_384;

static TABLE: [Place; PLACES] = [const { Place::new() }; PLACES];

/// The previous handler of the signal, and the page size.
static BEFORE: OnceLock<Before> = OnceLock::new();

struct Before {
    action: libc::sigaction,
    page_bytes: usize,
}

/// One guarded range. The signal handler reads it while other threads may reassign the entry to
/// another map.
///
/// `start` and `end` are valid only together, under a sequence lock: a writer makes `version` odd,
/// changes both, and makes it even again. A reader that finds `version` odd, or changed since
/// before it read both, has not read a range. Reading `end` twice would not be enough: a later map
/// may end where an earlier one did.
struct Place {
    taken: AtomicBool,
    version: AtomicU64,
    start: AtomicUsize,
    /// Not above `start` while the entry guards nothing.
    end: AtomicUsize,
    lost: AtomicBool,
}

impl Place {
    const fn new() -> Place {
        Place {
            taken: AtomicBool::new(false),
            version: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }

    /// Only called by the thread that has taken the entry, so two threads never write at once.
    fn set(&self, range: Range<usize>) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(range.start, Ordering::SeqCst);
        self.end.store(range.end, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether the entry guards an address. False if the entry changes meanwhile. A guarded map is
    /// read only while its [`Guarded`] lives, so the entry that guards an address being read does
    /// not change. It is never missed, and no retry is needed.
    fn holds(&self, address: usize) -> bool {
        self.holds_despite(address, || {})
    }

    /// The same, with a callback between the reads of `end` and `start`.
    fn holds_despite(&self, address: usize, meanwhile: impl FnOnce()) -> bool {
        let version = self.version.load(Ordering::SeqCst);
        let end = self.end.load(Ordering::SeqCst);
        meanwhile();
        let start = self.start.load(Ordering::SeqCst);
        let is_range = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        is_range && (start..end).contains(&address)
    }
}

/// A mapped range whose lost pages read as zeros, until dropped.
#[derive(Debug)]
pub(super) struct Guarded {
    place: usize,
}

impl Guarded {
    /// Guards a map. If the table is full, returns its size.
    pub(super) fn new(start: usize, length: usize) -> Result<Guarded, usize> {
        install();
        let free = |place: &Place| !place.taken.swap(true, Ordering::SeqCst);
        let place = TABLE.iter().position(free).ok_or(PLACES)?;
        let entry = &TABLE[place];
        entry.lost.store(false, Ordering::SeqCst);
        // Last: from here on the handler sees the entry.
        entry.set(start..start + length);
        Ok(Guarded { place })
    }

    /// Whether a page had to be replaced.
    pub(super) fn is_lost(&self) -> bool {
        TABLE[self.place].lost.load(Ordering::SeqCst)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let entry = &TABLE[self.place];
        entry.set(0..0);
        // Last: from here on other threads may write the entry.
        entry.taken.store(false, Ordering::SeqCst);
    }
}

fn install() {
    BEFORE.get_or_init(|| {
        // SAFETY: only queries the current handler. A zeroed `sigaction` is valid and is
        // overwritten.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, ptr::null(), &mut action);
            action
        };
        // SAFETY: has no preconditions.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        Before { action, page_bytes: usize::try_from(page_bytes).unwrap_or(4096) }
    });
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        // SAFETY: `handler` does only what a signal handler may: atomics and system calls. `BEFORE`
        // is already set, as it needs.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            // On the alternate stack if there is one: the thread may have little stack left.
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
        }
    });
}

extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return };
    // SAFETY: the kernel hands a valid `siginfo_t` to a handler installed with SA_SIGINFO.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // Only signals from the kernel carry an address. Others were sent by a process.
    if code <= 0 || !replace_page(address, before.page_bytes) {
        pass_on(before, signal, info, context);
    }
}

/// Maps zeros over a lost page. False if the address is not guarded, or mapping fails.
fn replace_page(address: usize, page_bytes: usize) -> bool {
    let Some(place) = TABLE.iter().find(|place| place.holds(address)) else { return false };
    // Set before any thread can read the zeros.
    place.lost.store(true, Ordering::SeqCst);
    let page = address & !(page_bytes - 1);
    // SAFETY: replaces one page of our own read-only map, which nothing borrows from. It is our map
    // because `start` and `end` belong to one range. It stays mapped because the interrupted read
    // borrows the file, so map and entry live until this handler returns. `errno` is restored for
    // the interrupted code.
    unsafe {
        let errno = *libc::__errno_location();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let at = libc::mmap(page as *mut _, page_bytes, libc::PROT_READ, flags, -1, 0);
        *libc::__errno_location() = errno;
        at != libc::MAP_FAILED
    }
}

/// Passes the signal to the handler that was installed before.
fn pass_on(before: &Before, signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let action = &before.action;
    match action.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restores the default action and raises the signal again, which ends the
            // process when this handler returns and unblocks it.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, ptr::null_mut());
                libc::raise(signal);
            }
        }
        function if action.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the kernel accepted it as a handler of this type.
            let function: extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(function) };
            function(signal, info, context);
        }
        function => {
            // SAFETY: the kernel accepted it as a handler of this type.
            let function: extern "C" fn(c_int) = unsafe { std::mem::transmute(function) };
            function(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether an entry that guards `before` seems to hold an address if it is reassigned to
    /// another map between two reads by the handler.
    fn held_despite(before: Range<usize>, after: Range<usize>, address: usize) -> bool {
        let place = Place::new();
        place.set(before);
        place.holds_despite(address, || {
            place.set(0..0);
            if !after.is_empty() {
                place.set(after);
            }
        })
    }

    #[test]
    fn a_range_is_read_whole_or_not_at_all() {
        // Freed: `start` is 0, and anything below the old end would seem inside.
        assert!(!held_despite(1000..2000, 0..0, 500));
        // Another map: the old end with the new start.
        assert!(!held_despite(1000..2000, 100..200, 500));
        // Another map with the same end, which a second read of `end` would not detect.
        assert!(!held_despite(1000..2000, 400..2000, 500));
    }

    #[test]
    fn a_range_in_the_middle_of_a_change_is_none() {
        let place = Place::new();
        place.set(1000..2000);
        // A writer interrupted after its first store.
        place.version.fetch_add(1, Ordering::SeqCst);
        place.start.store(0, Ordering::SeqCst);
        assert!(!place.holds(500));
    }

    #[test]
    fn what_is_guarded_is_held() {
        let place = Place::new();
        assert!(!place.holds(0));
        place.set(1000..2000);
        for (address, held) in [(999, false), (1000, true), (1999, true), (2000, false)] {
            assert_eq!(place.holds(address), held, "{address}");
        }
        place.set(0..0);
        assert!(!place.holds(1500) && !place.holds(0));
    }
}
