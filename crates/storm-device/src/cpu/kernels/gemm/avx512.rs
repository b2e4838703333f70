//! AVX-512 kernels: up to 14 rows × 32 columns, which takes 28 of the 32 registers for sums.

use std::arch::x86_64::*;

use super::micro::{Kernels, Tile};

macro_rules! table {
    ($($rows:literal)+) => { &[$(kernel::<$rows>),+] };
}

/// One kernel per height.
pub(super) static KERNELS: Kernels = Kernels { by_rows: table!(1 2 3 4 5 6 7 8 9 10 11 12 13 14) };

/// Two registers of columns.
type Row = (__m512, __m512);

/// # Safety
/// See [`super::micro::Kernel`].
#[target_feature(enable = "avx512f")]
unsafe fn kernel<const R: usize>(tile: &Tile) {
    // SAFETY: the caller guarantees every address of the tile.
    unsafe {
        // With the packed layout, row offsets are constants that fold into the instructions.
        if tile.a_row == 1 {
            run::<R, true>(tile);
        } else {
            run::<R, false>(tile);
        }
    }
}

/// Prefetches 32 columns.
#[inline(always)]
fn prefetch_row(row: *const f32) {
    // SAFETY: prefetching has no effect but on caches.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(row.cast());
        _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(16).cast());
    }
}

/// # Safety
/// See [`super::micro::Kernel`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn run<const R: usize, const UNIT_ROWS: bool>(tile: &Tile) {
    let Tile { k, a_row, a_k, b_k, c, c_row, .. } = *tile;
    let zero = _mm512_setzero_ps();
    let mut sums: [Row; R] = [(zero, zero); R];
    // SAFETY: the caller guarantees every address of the tile, and all of these are in it.
    unsafe {
        if tile.resume {
            for (r, sum) in sums.iter_mut().enumerate() {
                let at = c.add(r * c_row);
                *sum = (_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16)));
            }
        }
        let mut a = tile.a;
        let mut b = tile.b;
        // A macro: sums that a closure captured would be kept in memory.
        macro_rules! step {
            ($p:expr) => {
                let (a, b) = (a.wrapping_add($p * a_k), b.wrapping_add($p * b_k));
                let b0 = _mm512_loadu_ps(b);
                let b1 = _mm512_loadu_ps(b.add(16));
                for (r, sum) in sums.iter_mut().enumerate() {
                    let offset = if UNIT_ROWS { r } else { r * a_row };
                    let value = _mm512_set1_ps(*a.add(offset));
                    sum.0 = _mm512_fmadd_ps(value, b0, sum.0);
                    sum.1 = _mm512_fmadd_ps(value, b1, sum.1);
                }
            };
        }
        macro_rules! two_steps {
            () => {
                step!(0);
                step!(1);
                a = a.wrapping_add(2 * a_k);
                b = b.wrapping_add(2 * b_k);
            };
        }
        // Results are farther away than operands, and so are the sums from which the next tile starts:
        // those that follow, if they are packed. They are prefetched a row at a time, since only a
        // few cache misses can be outstanding at once, and operands need some of these.
        let pairs = k / R / 2;
        for r in 0..R {
            if let Some(finish) = &tile.finish {
                prefetch_row(finish.out.wrapping_add(r * finish.out_row));
                if !finish.addend.is_null() {
                    prefetch_row(finish.addend.wrapping_add(r * finish.addend_row));
                }
            }
            if tile.resume {
                prefetch_row(c.wrapping_add((R + r) * c_row));
            }
            for _ in 0..pairs {
                two_steps!();
            }
        }
        let left = k - 2 * pairs * R;
        for _ in 0..left / 2 {
            two_steps!();
        }
        if left % 2 == 1 {
            step!(0);
        }
        let (mut out, mut out_row) = (c, c_row);
        if let Some(finish) = &tile.finish {
            (out, out_row) = (finish.out, finish.out_row);
            // A loop for each term: a long loop would not be unrolled, and the sums would be kept
            // in memory.
            let read = |at: *const f32| (_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16)));
            let add = |a: Row, b: Row| (_mm512_add_ps(a.0, b.0), _mm512_add_ps(a.1, b.1));
            if finish.scale != 1.0 {
                let scale = _mm512_set1_ps(finish.scale);
                for sum in &mut sums {
                    *sum = (_mm512_mul_ps(sum.0, scale), _mm512_mul_ps(sum.1, scale));
                }
            }
            if !finish.bias.is_null() {
                let bias = read(finish.bias);
                for sum in &mut sums {
                    *sum = add(*sum, bias);
                }
            }
            if !finish.addend.is_null() {
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = add(*sum, read(finish.addend.add(r * finish.addend_row)));
                }
            }
            if finish.adds_old {
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = add(*sum, read(out.add(r * out_row)));
                }
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            let at = out.add(r * out_row);
            _mm512_storeu_ps(at, sum.0);
            _mm512_storeu_ps(at.add(16), sum.1);
        }
    }
}
