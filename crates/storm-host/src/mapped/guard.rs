//! The table of guarded memory and the handler of SIGBUS that looks things up in it.

use std::ffi::c_int;
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Maps at once. A table of fixed size: a signal handler cannot take locks or memory.
const PLACES: usize = 16_384;

static TABLE: [Place; PLACES] = [const { Place::new() }; PLACES];

/// What handled the signal before, and the size of a page.
static BEFORE: OnceLock<Before> = OnceLock::new();

struct Before {
    action: libc::sigaction,
    page_bytes: usize,
}

/// One guarded range, which a signal handler reads while other threads may give the place to another map.
///
/// `start` and `end` mean something only together. A writer makes `version` odd, changes both, and makes it even
/// again; a reader that finds `version` odd, or changed since before it read both, has not read a range. Looking
/// at `end` a second time would not do: a later map may well end where an earlier one did.
struct Place {
    taken: AtomicBool,
    version: AtomicU64,
    start: AtomicUsize,
    /// Not above `start` while the place guards nothing.
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

    /// Only for the thread that has taken the place, so that no two write at once.
    fn set(&self, range: Range<usize>) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(range.start, Ordering::SeqCst);
        self.end.store(range.end, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether the place guards an address; false if it changes meanwhile. A guarded map is read only while its
    /// [`Guarded`] lives, so the place that guards an address that was just read does not change: it is never
    /// missed, and there is no need to look again.
    fn holds(&self, address: usize) -> bool {
        self.holds_despite(address, || {})
    }

    /// The same, with something that happens between the reads of `end` and `start`.
    fn holds_despite(&self, address: usize, meanwhile: impl FnOnce()) -> bool {
        let version = self.version.load(Ordering::SeqCst);
        let end = self.end.load(Ordering::SeqCst);
        meanwhile();
        let start = self.start.load(Ordering::SeqCst);
        let is_range = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        is_range && (start..end).contains(&address)
    }
}

/// A range of mapped memory whose lost pages read as zeros; from construction to drop.
#[derive(Debug)]
pub(super) struct Guarded {
    place: usize,
}

impl Guarded {
    /// Guards a map. On failure says how many there can be.
    pub(super) fn new(start: usize, length: usize) -> Result<Guarded, usize> {
        install();
        let free = |place: &Place| !place.taken.swap(true, Ordering::SeqCst);
        let place = TABLE.iter().position(free).ok_or(PLACES)?;
        let entry = &TABLE[place];
        entry.lost.store(false, Ordering::SeqCst);
        // Last: from here on the handler believes the entry.
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
        // Last: from here on others write the entry.
        entry.taken.store(false, Ordering::SeqCst);
    }
}

fn install() {
    BEFORE.get_or_init(|| {
        // SAFETY: asks for the handler in place; a zeroed `sigaction` is a valid one to be written over.
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
        // SAFETY: `handler` does only what a signal handler may: atomics and system calls. It finds
        // `BEFORE` set, since that happened above.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            // On the alternate stack, where there is one: threads may have little stack left.
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
    // Only the kernel's own signals carry an address; others were sent by a process.
    if code <= 0 || !replace_page(address, before.page_bytes) {
        pass_on(before, signal, info, context);
    }
}

/// Puts zeros where a page was lost. False if the address is not guarded, or that cannot be done.
fn replace_page(address: usize, page_bytes: usize) -> bool {
    let Some(place) = TABLE.iter().find(|place| place.holds(address)) else { return false };
    // Before any thread can read the zeros.
    place.lost.store(true, Ordering::SeqCst);
    let page = address & !(page_bytes - 1);
    // SAFETY: replaces one page of a map that is ours and read only, which nothing borrows from. It is ours
    // because `start` and `end` were of one range, and still is: the interrupted read borrows the file, so its
    // map and its place stay until this handler has returned. `errno` is put back for the code that was
    // interrupted.
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
            // SAFETY: restores the default and sends the signal again, which ends the process when this
            // handler returns and lets it through.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, ptr::null_mut());
                libc::raise(signal);
            }
        }
        function if action.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the kernel took it for a handler of this type.
            let function: extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(function) };
            function(signal, info, context);
        }
        function => {
            // SAFETY: the kernel took it for a handler of this type.
            let function: extern "C" fn(c_int) = unsafe { std::mem::transmute(function) };
            function(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a place that guards `before` is taken to hold an address, if it is given to another map
    /// between two reads of the handler.
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
        // Given back: `start` is 0 and anything below the old end would be inside.
        assert!(!held_despite(1000..2000, 0..0, 500));
        // Another map: the old end with the new start.
        assert!(!held_despite(1000..2000, 100..200, 500));
        // Another map that ends in the same place, which a second look at `end` would not tell.
        assert!(!held_despite(1000..2000, 400..2000, 500));
    }

    #[test]
    fn a_range_in_the_middle_of_a_change_is_none() {
        let place = Place::new();
        place.set(1000..2000);
        // A writer stopped after its first store.
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
