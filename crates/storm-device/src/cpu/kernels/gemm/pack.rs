//! Packing: copies a part of an operand into the order in which the kernels read it, as f32.
//!
//! A packed strip contains, for each k, 16 lanes (rows of A or columns of B) side by side. Packing
//! only moves and widens values, so it cannot affect a result. Lanes beyond the requested ones may
//! have any value: no result computed from them is stored.

use super::super::element::Element;
use super::super::simd::{Isa, isa};
#[cfg(target_arch = "x86_64")]
use super::turn::turn_16;

/// Lanes of a strip. Also the number of steps of k that are moved together.
pub(super) const LANES: usize = 16;

/// A source of packing: lanes × k elements, with a stride for each direction.
#[derive(Clone, Copy)]
pub(super) struct Source<T> {
    pub(super) start: *const T,
    pub(super) lane_stride: usize,
    pub(super) k_stride: usize,
    /// Elements that may be read, counted from `start`.
    pub(super) readable: usize,
}

impl<T> Source<T> {
    /// The part that starts at this lane and step.
    #[inline(always)]
    pub(super) fn from(&self, lane: usize, p: usize) -> Source<T> {
        let skipped = lane * self.lane_stride + p * self.k_stride;
        Source { start: self.at(lane, p), readable: self.readable - skipped, ..*self }
    }

    /// The address of an element.
    #[inline(always)]
    pub(super) fn at(&self, lane: usize, p: usize) -> *const T {
        self.start.wrapping_add(lane * self.lane_stride + p * self.k_stride)
    }
}

/// One strip of the result.
pub(super) struct Strip {
    /// First lane in the source.
    pub(super) lane: usize,
    /// Number of lanes that are used, 1 to 16.
    pub(super) lanes: usize,
    /// Where lane 0 of step 0 goes.
    pub(super) offset: usize,
}

/// Packs `strips` strips of `k` steps: lane l of step p of a strip goes to
/// `target[offset + p * target_stride + l]`.
///
/// # Safety
/// All `lanes` × `k` elements of each strip must be readable. 16 lanes at each of k steps of the
/// target must be writable.
pub(super) unsafe fn pack<T: Element>(
    source: Source<T>,
    k: usize,
    strips: usize,
    strip: impl Fn(usize) -> Strip,
    target: *mut f32,
    target_stride: usize,
) {
    // SAFETY: the caller's promise covers every address. The instruction set is available.
    unsafe {
        match isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => pack_avx512(source, k, strips, strip, target, target_stride),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => pack_avx2(source, k, strips, strip, target, target_stride),
            _ => walk(source, k, strips, strip, |from, lanes, steps, to| {
                move_plain(
                    from,
                    lanes,
                    steps,
                    target.add(to.0 + to.1 * target_stride),
                    target_stride,
                );
            }),
        }
    }
}

/// # Safety
/// See [`pack`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn pack_avx2<T: Element>(
    source: Source<T>,
    k: usize,
    strips: usize,
    strip: impl Fn(usize) -> Strip,
    target: *mut f32,
    target_stride: usize,
) {
    walk(source, k, strips, strip, |from, lanes, steps, to| {
        // SAFETY: `walk` stays within the strips.
        unsafe {
            move_plain(from, lanes, steps, target.add(to.0 + to.1 * target_stride), target_stride);
        }
    });
}

/// # Safety
/// See [`pack`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn pack_avx512<T: Element>(
    source: Source<T>,
    k: usize,
    strips: usize,
    strip: impl Fn(usize) -> Strip,
    target: *mut f32,
    target_stride: usize,
) {
    walk(source, k, strips, strip, |from, lanes, steps, to| {
        // SAFETY: `walk` stays within the strips.
        unsafe {
            let target = target.add(to.0 + to.1 * target_stride);
            if from.k_stride == 1 && steps == LANES {
                prefetch_lanes(from, lanes);
                move_transposed(from, lanes, target, target_stride);
            } else {
                move_plain(from, lanes, steps, target, target_stride);
            }
        }
    });
}

/// Calls `each(source, lanes, steps, (offset, step))` for pieces of up to 16 × 16, in the order of
/// the source's memory: along k if k is contiguous, else across the strips. So few pages are in use
/// at a time.
#[inline(always)]
fn walk<T>(
    source: Source<T>,
    k: usize,
    strips: usize,
    strip: impl Fn(usize) -> Strip,
    mut each: impl FnMut(Source<T>, usize, usize, (usize, usize)),
) {
    let mut piece = |s: usize, p: usize| {
        let Strip { lane, lanes, offset } = strip(s);
        each(source.from(lane, p), lanes, LANES.min(k - p), (offset, p));
    };
    if source.k_stride == 1 {
        for s in 0..strips {
            for p in (0..k).step_by(LANES) {
                piece(s, p);
            }
        }
    } else {
        for p in (0..k).step_by(LANES) {
            for s in 0..strips {
                piece(s, p);
            }
        }
    }
}

/// Moves `steps` steps of a strip, with any strides.
///
/// # Safety
/// See [`pack`].
#[inline(always)]
unsafe fn move_plain<T: Element>(
    source: Source<T>,
    lanes: usize,
    steps: usize,
    target: *mut f32,
    target_stride: usize,
) {
    // Reading all 16 lanes is faster than reading only those in use, and possible except at the end
    // of the source.
    let whole_lanes =
        source.lane_stride == 1 && (steps - 1) * source.k_stride + LANES <= source.readable;
    // SAFETY: whole lanes are readable by the check above. Otherwise, only lanes below `lanes` and
    // steps below `steps` are read, which the caller guarantees to be readable.
    unsafe {
        if whole_lanes {
            for p in 0..steps {
                // The piece of the next steps. `walk` comes to it after those of the other strips.
                prefetch(source.at(0, p + LANES));
                let row = source.at(0, p).cast::<[T; LANES]>().read();
                let to = target.add(p * target_stride).cast::<[f32; LANES]>();
                to.write(T::widen(row));
            }
        } else {
            for p in 0..steps {
                for lane in 0..lanes {
                    *target.add(p * target_stride + lane) = (*source.at(lane, p)).to_f32();
                }
            }
        }
    }
}

/// Prefetches the piece of the next strip that has the same steps. Lanes are far apart in memory and
/// each is short, so the processor does not predict what is read next.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_lanes<T>(source: Source<T>, lanes: usize) {
    for lane in lanes..2 * lanes {
        prefetch(source.at(lane, 0));
    }
}

/// Loads a line into the first-level cache. Any address is allowed.
#[inline(always)]
fn prefetch<T>(_address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching has no effect but on caches.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(_address.cast());
    }
}

/// Moves 16 steps of a strip whose k is contiguous.
///
/// # Safety
/// See [`pack`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn move_transposed<T: Element>(
    source: Source<T>,
    lanes: usize,
    target: *mut f32,
    target_stride: usize,
) {
    use std::arch::x86_64::*;
    // Missing lanes repeat the last one, since a constant trip count keeps everything in registers.
    let mut rows = [_mm512_setzero_ps(); LANES];
    for (lane, row) in rows.iter_mut().enumerate() {
        // SAFETY: the lane exists and has 16 steps. A vector has the layout of 16 floats.
        unsafe {
            let values = source.at(lane.min(lanes - 1), 0).cast::<[T; LANES]>().read();
            *row = std::mem::transmute::<[f32; LANES], __m512>(T::widen(values));
        }
    }
    for (step, column) in turn_16(rows).into_iter().enumerate() {
        // SAFETY: there are 16 steps.
        unsafe { _mm512_storeu_ps(target.add(step * target_stride), column) };
    }
}
