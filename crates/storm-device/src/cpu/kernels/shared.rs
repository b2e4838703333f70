//! An output that the tasks of one parallel kernel write in disjoint pieces.

use std::marker::PhantomData;
use std::ops::Range;

/// A slice that several threads write to. The borrow that it was created from stays exclusive.
/// Kernels must ensure that pieces do not overlap, by how they partition the work.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it represents an exclusive borrow. A caller that takes pieces guarantees that they are
// disjoint.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares `slice` until the end of its borrow.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// The address of the first element of a range, for kernels that write parts of it.
    #[inline]
    pub(crate) fn address(&self, range: Range<usize>) -> *mut T {
        assert!(range.start <= range.end && range.end <= self.len);
        self.start.wrapping_add(range.start)
    }

    /// A piece of the slice.
    ///
    /// # Safety
    /// While the piece lives, no other piece may overlap it.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn piece(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds of a live exclusive borrow. The caller guarantees disjointness.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
