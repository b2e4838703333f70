//! Huge pages, where a system gives them only to those who ask.

/// Asks for huge pages for memory that nothing has touched yet: pages that are there do not change. Only a hint. Without
/// them, strided access is slower.
pub fn prefer_huge_pages(start: *mut u8, bytes: usize) {
    // SAFETY: this changes only how pages are made, and fails if the range is not mapped.
    unsafe { libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE) };
}
