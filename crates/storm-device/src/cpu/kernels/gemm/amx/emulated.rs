//! `TDPBF16PS` in plain Rust: the definition of the sums, and their kernel on machines without AMX.
//!
//! The instruction multiplies 16 pairs of A with 16 pairs of B. Even and odd products each have a
//! chain of fused multiply-adds, starting from zero. The two chains are added, and the result is
//! added to the previous sum. Every operation rounds to nearest, and denormal numbers count as
//! zeros, as operands and as results. If an operand is NaN, it is not defined which NaN results.

use super::kernel::{COLUMNS, Operands, ROWS, STEP};
use crate::simd_dispatch;

/// Columns computed together, as in a tile.
const LANES: usize = 16;

/// Replaces a denormal number by a zero of the same sign.
#[inline(always)]
fn flush(value: f32) -> f32 {
    let kept = if value.abs() < f32::MIN_POSITIVE { 0x8000_0000 } else { u32::MAX };
    f32::from_bits(value.to_bits() & kept)
}

/// `a · b + sum`, rounded once, with tiny results flushed to 0. The instruction detects them after
/// rounding with unlimited exponents. So just below the smallest normal number, `mul_add` may round
/// up to it while the instruction returns 0.
fn multiply_add(a: f32, b: f32, sum: f32) -> f32 {
    let rounded = a.mul_add(b, sum);
    if rounded.abs() != f32::MIN_POSITIVE {
        return flush(rounded);
    }
    // Halfway to the next number below, with the precision of normal numbers.
    let least = f64::from(f32::MIN_POSITIVE) * (1.0 - f64::from(f32::EPSILON) / 4.0);
    let sign = f64::from(rounded.signum());
    // The product is exact. The sum and its error are computed as in Knuth's two-sum.
    let (product, sum) = (sign * f64::from(a) * f64::from(b), sign * f64::from(sum));
    let total = product + sum;
    let part = total - product;
    let error = (product - (total - part)) + (sum - part);
    if total < least || (total == least && error < 0.0) {
        return 0.0f32.copysign(rounded);
    }
    rounded
}

/// The even and the odd element of a word of two bf16 values.
#[inline(always)]
fn halves(word: u32) -> (f32, f32) {
    (flush(f32::from_bits(word << 16)), flush(f32::from_bits(word & 0xffff_0000)))
}

simd_dispatch! {
    /// One instruction, for one row: `sums += a · b`, where B has 16 rows of 16 pairs.
    fn row(a: &[u32; 16], b: &[[u32; 16]; 16], sums: &mut [f32; 16]) {
        let (mut even, mut odd) = ([0.0f32; LANES], [0.0f32; LANES]);
        for (&a, b) in a.iter().zip(b) {
            let (a_even, a_odd) = halves(a);
            let (even_before, odd_before) = (even, odd);
            let mut smallest = false;
            for lane in 0..LANES {
                let (b_even, b_odd) = halves(b[lane]);
                let next = (a_even.mul_add(b_even, even[lane]), a_odd.mul_add(b_odd, odd[lane]));
                smallest |= next.0.abs() == f32::MIN_POSITIVE || next.1.abs() == f32::MIN_POSITIVE;
                (even[lane], odd[lane]) = (flush(next.0), flush(next.1));
            }
            // This is rare, see `multiply_add`.
            if smallest {
                for lane in 0..LANES {
                    let (b_even, b_odd) = halves(b[lane]);
                    even[lane] = multiply_add(a_even, b_even, even_before[lane]);
                    odd[lane] = multiply_add(a_odd, b_odd, odd_before[lane]);
                }
            }
        }
        for lane in 0..LANES {
            sums[lane] = flush(flush(sums[lane]) + flush(even[lane] + odd[lane]));
        }
    }
}

/// Emulates [`super::hardware::Tiles::multiply`].
///
/// # Safety
/// All addresses of the operands must be valid.
pub(super) unsafe fn multiply(operands: &Operands) {
    let Operands { steps, a, a_row, b, sums, sums_row, resume } = *operands;
    for r in 0..ROWS {
        for half in 0..COLUMNS / LANES {
            // SAFETY: the caller guarantees the addresses. Reads of A and B may be unaligned.
            unsafe {
                let place = sums.add(r * sums_row + half * LANES).cast::<[f32; LANES]>();
                let mut sums = if resume { place.read() } else { [0.0; LANES] };
                for step in 0..steps {
                    let a = a.add(r * a_row + step * STEP).cast::<[u32; 16]>().read_unaligned();
                    let b = b.add(step * STEP * COLUMNS + half * STEP * LANES);
                    row(&a, &b.cast::<[[u32; 16]; 16]>().read_unaligned(), &mut sums);
                }
                place.write(sums);
            }
        }
    }
}
