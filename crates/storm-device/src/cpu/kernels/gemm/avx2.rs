//! AVX2 kernels: up to 6 rows × 16 columns, twice for the 32 columns of a panel.

use std::arch::x86_64::*;

use super::micro::{Kernels, PANEL_COLS, Tile};

/// One kernel per height.
pub(super) static KERNELS: Kernels = Kernels {
    by_rows: &[kernel::<1>, kernel::<2>, kernel::<3>, kernel::<4>, kernel::<5>, kernel::<6>],
};

/// Two registers of columns.
type Row = (__m256, __m256);

/// # Safety
/// See [`super::micro::Kernel`].
#[target_feature(enable = "avx2,fma")]
unsafe fn kernel<const R: usize>(tile: &Tile) {
    let Tile { k, a_row, a_k, b_k, c_row, .. } = *tile;
    for first in (0..PANEL_COLS).step_by(16) {
        let zero = _mm256_setzero_ps();
        let mut sums = [(zero, zero); R];
        // SAFETY: the caller guarantees every address of the tile, and all of these are in it.
        unsafe {
            let c = tile.c.add(first);
            if tile.resume {
                for (r, sum) in sums.iter_mut().enumerate() {
                    let at = c.add(r * c_row);
                    *sum = (_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8)));
                }
            }
            let mut a = tile.a;
            let mut b = tile.b.add(first);
            for _ in 0..k {
                let b0 = _mm256_loadu_ps(b);
                let b1 = _mm256_loadu_ps(b.add(8));
                for (r, sum) in sums.iter_mut().enumerate() {
                    let value = _mm256_broadcast_ss(&*a.add(r * a_row));
                    sum.0 = _mm256_fmadd_ps(value, b0, sum.0);
                    sum.1 = _mm256_fmadd_ps(value, b1, sum.1);
                }
                a = a.wrapping_add(a_k);
                b = b.wrapping_add(b_k);
            }
            let (mut out, mut out_row) = (c, c_row);
            if let Some(finish) = &tile.finish {
                (out, out_row) = (finish.out.add(first), finish.out_row);
                // A loop for each term: a long loop would not be unrolled, and the sums would be
                // kept in memory.
                let read = |at: *const f32| (_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8)));
                let add = |a: Row, b: Row| (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1));
                if finish.scale != 1.0 {
                    let scale = _mm256_set1_ps(finish.scale);
                    for sum in &mut sums {
                        *sum = (_mm256_mul_ps(sum.0, scale), _mm256_mul_ps(sum.1, scale));
                    }
                }
                if !finish.bias.is_null() {
                    let bias = read(finish.bias.add(first));
                    for sum in &mut sums {
                        *sum = add(*sum, bias);
                    }
                }
                if !finish.addend.is_null() {
                    let addend = finish.addend.add(first);
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = add(*sum, read(addend.add(r * finish.addend_row)));
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
                _mm256_storeu_ps(at, sum.0);
                _mm256_storeu_ps(at.add(8), sum.1);
            }
        }
    }
}
