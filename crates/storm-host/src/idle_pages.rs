//! Idle memory: its pages go back to the system, and come back as zeros.

use crate::{HostLimit, HostMemoryRefused, limits};
use std::io;
use std::ops::Range;

const PAGE_BYTES: usize = 4096;

/// The whole pages inside a range of addresses.
fn whole_pages(start: usize, bytes: usize) -> Range<usize> {
    let first = start.next_multiple_of(PAGE_BYTES);
    let end = (start + bytes) / PAGE_BYTES * PAGE_BYTES;
    first..end.max(first)
}

/// Returns the whole pages of a range to the system. The whole range reads as zeros from then on.
///
/// # Errors
/// `madvise` failed. The pages stay.
///
/// # Safety
/// The range is private anonymous memory of the caller, and nothing else uses it during the call.
pub unsafe fn release_pages(start: *mut u8, bytes: usize) -> io::Result<()> {
    let pages = whole_pages(start.addr(), bytes);
    let end = start.addr() + bytes;
    let rests = match pages.is_empty() {
        true => [start.addr()..end, end..end],
        false => [start.addr()..pages.start, pages.end..end],
    };
    for rest in rests {
        // SAFETY: inside the range that the caller owns.
        unsafe { start.with_addr(rest.start).write_bytes(0, rest.len()) };
    }
    if pages.is_empty() {
        return Ok(());
    }
    let address = start.with_addr(pages.start).cast();
    // SAFETY: whole pages inside the range that the caller owns.
    match unsafe { libc::madvise(address, pages.len(), libc::MADV_DONTNEED) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How many bytes in whole pages of a range are not resident.
///
/// # Errors
/// The range is not mapped.
pub fn absent_bytes(start: *const u8, bytes: usize) -> io::Result<usize> {
    // Pages per call.
    const PART: usize = 1 << 16;
    let pages = whole_pages(start.addr(), bytes);
    let mut present = vec![0u8; (pages.len() / PAGE_BYTES).min(PART)];
    let mut absent = 0;
    for first in pages.clone().step_by(PART * PAGE_BYTES) {
        let length = (pages.end - first).min(PART * PAGE_BYTES);
        let address = start.with_addr(first).cast_mut().cast();
        // SAFETY: `present` has one byte per page.
        if unsafe { libc::mincore(address, length, present.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let known = &present[..length / PAGE_BYTES];
        absent += PAGE_BYTES * known.iter().filter(|&&page| page & 1 == 0).count();
    }
    Ok(absent)
}

/// Makes the pages of a range present again, as zeros if they were released.
///
/// # Errors
/// The machine or its control group has less memory. The range is unchanged.
///
/// # Safety
/// As [`release_pages`]. The range was released, so its whole pages are zero or absent.
pub unsafe fn restore_pages(start: *mut u8, bytes: usize) -> Result<(), HostMemoryRefused> {
    let pages = whole_pages(start.addr(), bytes);
    let refused = |limit| HostMemoryRefused { wanted_bytes: pages.len(), limit };
    let absent = absent_bytes(start, bytes)
        .map_err(|error| refused(HostLimit::System { reason: error.to_string() }))?;
    // If the system runs out of pages later, it kills the process, so check first.
    limits::check(absent).map_err(refused)?;
    for page in pages.step_by(PAGE_BYTES) {
        // SAFETY: inside the range, whose pages are zero.
        unsafe { start.with_addr(page).write_volatile(0) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostPages;

    #[test]
    fn pages_go_and_come_back_as_zeros() {
        let mut pages = HostPages::new(64 * PAGE_BYTES, |_| {}).expect("memory");
        pages.as_mut_slice().fill(7);
        let (first, bytes) = (3 * PAGE_BYTES + 1, 20 * PAGE_BYTES);
        let start = pages.start().wrapping_add(first);
        assert_eq!(absent_bytes(start, bytes).expect("mapped"), 0);
        // SAFETY: nothing else uses these pages.
        unsafe { release_pages(start, bytes) }.expect("private memory");
        // The pages at both ends are not whole.
        assert_eq!(absent_bytes(start, bytes).expect("mapped"), 19 * PAGE_BYTES);
        // SAFETY: as above.
        unsafe { restore_pages(start, bytes) }.expect("there is memory");
        assert_eq!(absent_bytes(start, bytes).expect("mapped"), 0);
        for (at, byte) in pages.as_slice().iter().enumerate() {
            let is_released = (first..first + bytes).contains(&at);
            assert_eq!(*byte, if is_released { 0 } else { 7 }, "{at}");
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        // An address that is not mapped: nothing is touched.
        let start = std::ptr::null_mut::<u8>().with_addr(PAGE_BYTES);
        // SAFETY: it is refused before anything is written.
        assert!(unsafe { restore_pages(start, 1 << 40) }.is_err());
    }
}
