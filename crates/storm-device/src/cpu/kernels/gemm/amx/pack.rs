//! Packing for AMX: copies parts of operands, as bf16, into the order that tiles have.
//!
//! Values are only moved. Padding along k is 0, which is part of the definition of the sums.
//! Padding of rows and columns is 0 too, but none of its results is stored.

#[cfg(target_arch = "x86_64")]
use super::super::super::simd::{Isa, isa};
use super::super::pack::Source;
#[cfg(target_arch = "x86_64")]
use super::super::turn::turn_16;
use super::kernel::STEP;
use half::bf16;

/// Rows of A, or columns of B, in a piece.
pub(super) const LANES: usize = 16;

/// Elements of a packed piece: 16 lanes of 32 steps of k.
pub(super) const PIECE: usize = LANES * STEP;

/// The order of elements in a packed piece.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The steps of each lane are side by side, for A.
    ByLane,
    /// The lanes of each pair of steps are side by side, for B.
    ByPair,
}

/// Packs `lanes` × `steps` elements of the source, at most a whole piece, and pads with zeros. Row
/// i of the result (a lane, or a pair of steps) starts at `target[i * target_row]` and has 32
/// elements.
///
/// # Safety
/// The elements must be readable, and 16 rows of the target writable.
pub(super) unsafe fn pack_piece(
    source: Source<bf16>,
    (lanes, steps): (usize, usize),
    order: Order,
    target: *mut bf16,
    target_row: usize,
) {
    // SAFETY: the caller's promise. The instruction set is available.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if lanes == LANES && steps == STEP && isa() == Isa::Avx512 {
            if source.k_stride == 1 {
                return along_k(source, order, target, target_row);
            }
            if source.lane_stride == 1 {
                return along_lanes(source, order, target, target_row);
            }
        }
        plain(source, (lanes, steps), order, target, target_row);
    }
}

/// Any strides, any size.
///
/// # Safety
/// See [`pack_piece`].
unsafe fn plain(
    source: Source<bf16>,
    (lanes, steps): (usize, usize),
    order: Order,
    target: *mut bf16,
    target_row: usize,
) {
    for lane in 0..LANES {
        for step in 0..STEP {
            let (row, column) = match order {
                Order::ByLane => (lane, step),
                Order::ByPair => (step / 2, 2 * lane + step % 2),
            };
            let inside = lane < lanes && step < steps;
            // SAFETY: the caller's promise.
            unsafe {
                let value = if inside { *source.at(lane, step) } else { bf16::ZERO };
                *target.add(row * target_row + column) = value;
            }
        }
    }
}

/// A whole piece whose steps are contiguous.
///
/// # Safety
/// See [`pack_piece`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn along_k(source: Source<bf16>, order: Order, target: *mut bf16, target_row: usize) {
    use std::arch::x86_64::*;
    let mut rows = [_mm512_setzero_ps(); LANES];
    for (lane, row) in rows.iter_mut().enumerate() {
        // SAFETY: the lane has 32 steps, which are 64 bytes.
        *row = unsafe { _mm512_loadu_ps(source.at(lane, 0).cast()) };
    }
    let rows = if order == Order::ByPair { turn_16(rows) } else { rows };
    for (i, row) in rows.into_iter().enumerate() {
        // SAFETY: there are 16 rows of 64 bytes.
        unsafe { _mm512_storeu_ps(target.add(i * target_row).cast(), row) };
    }
}

/// A whole piece whose lanes are contiguous.
///
/// # Safety
/// See [`pack_piece`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn along_lanes(source: Source<bf16>, order: Order, target: *mut bf16, target_row: usize) {
    use std::arch::x86_64::*;
    let mut rows = [_mm512_setzero_ps(); LANES];
    for (pair, row) in rows.iter_mut().enumerate() {
        // The same lanes of the next steps. They are far apart, so the processor does not prefetch
        // them.
        for step in [2 * pair + STEP, 2 * pair + 1 + STEP] {
            _mm_prefetch::<_MM_HINT_T0>(source.at(0, step).cast());
        }
        // SAFETY: each step has 16 lanes, which are 32 bytes.
        let (even, odd) = unsafe {
            (
                _mm256_loadu_si256(source.at(0, 2 * pair).cast()),
                _mm256_loadu_si256(source.at(0, 2 * pair + 1).cast()),
            )
        };
        let odd = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
        *row = _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu16_epi32(even), odd));
    }
    let rows = if order == Order::ByLane { turn_16(rows) } else { rows };
    for (i, row) in rows.into_iter().enumerate() {
        // SAFETY: there are 16 rows of 64 bytes.
        unsafe { _mm512_storeu_ps(target.add(i * target_row).cast(), row) };
    }
}
