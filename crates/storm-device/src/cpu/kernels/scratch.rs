//! Per-thread working memory of a kernel family: one aligned block, allocated once.

use half::bf16;
use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ptr::NonNull;

/// Alignment to a cache line, which is also the size of the widest vector.
const ALIGN_BYTES: usize = 64;

/// A fixed, zero-initialized, 64-byte aligned block of f32 values.
pub(crate) struct Scratch {
    start: NonNull<f32>,
    len: usize,
}

impl Scratch {
    /// Allocates `len` zeros.
    pub(crate) fn new(len: usize) -> Self {
        assert!(len > 0);
        let layout = Self::layout(len);
        // SAFETY: the layout has a size above zero.
        let start = unsafe { alloc_zeroed(layout) }.cast::<f32>();
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Self { start, len }
    }

    /// The whole block.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: the block holds `len` initialized values and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The block as consecutive pieces of the given lengths. A piece is 64-byte aligned if all
    /// lengths before it are multiples of 16.
    pub(crate) fn split<const N: usize>(&mut self, lens: [usize; N]) -> [&mut [f32]; N] {
        let mut rest = self.as_mut_slice();
        lens.map(|len| rest.split_off_mut(..len).expect("scratch is large enough"))
    }

    /// Writes to every page, so that the operating system allocates them now.
    pub(crate) fn touch(&mut self) {
        for value in self.as_mut_slice().iter_mut().step_by(1024) {
            // SAFETY: a write through a valid reference. Volatile, so that it is not removed.
            unsafe { std::ptr::write_volatile(value, 0.0) };
        }
    }

    fn layout(len: usize) -> Layout {
        Layout::array::<f32>(len)
            .and_then(|layout| layout.align_to(ALIGN_BYTES))
            .expect("scratch sizes are small constants")
    }
}

/// A piece of a block as bf16 values, two in place of each f32.
pub(crate) fn as_bf16(values: &mut [f32]) -> &mut [bf16] {
    // SAFETY: the same bytes, with less alignment. Any bits are a value of both types.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), 2 * values.len()) }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr().cast(), Self::layout(self.len)) };
    }
}
