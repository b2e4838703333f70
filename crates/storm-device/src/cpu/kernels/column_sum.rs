//! Sums over rows: partial sums of fixed blocks of rows, then the blocks in order.

use super::element::Element;
use super::gemm::Accumulate;
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::ROWS_PER_PARTIAL;

/// Columns that are finished per task.
const COLUMNS: usize = 256;

simd_dispatch! {
    fn add_rows[E: Element](x: &[E], sums: &mut [f32]) {
        for row in x.chunks_exact(sums.len()) {
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += x.to_f32();
            }
        }
    }

    fn finish_columns[G: Element](
        partials: &[f32], width: usize, first: usize, accumulate: Accumulate, out: &mut [G],
    ) {
        let mut sums = [0.0f32; COLUMNS];
        let sums = &mut sums[..out.len()];
        for partial in partials.chunks_exact(width) {
            for (sum, part) in sums.iter_mut().zip(&partial[first..]) {
                *sum += part;
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            let before = match accumulate {
                Accumulate::Replace => 0.0,
                Accumulate::Add => out.to_f32(),
            };
            *out = G::from_f32(*sum + before);
        }
    }
}

/// Sums the columns of `x` (rows × width) into `out`. `partials` (blocks × width) is scratch.
pub fn column_sum<E: Element, G: Element>(
    x: &[E],
    width: usize,
    partials: &mut [f32],
    accumulate: Accumulate,
    out: &mut [G],
) {
    partials.par_chunks_mut(width).zip(x.par_chunks(ROWS_PER_PARTIAL * width)).for_each(
        |(sums, rows)| {
            sums.fill(0.0);
            add_rows(rows, sums);
        },
    );
    finish(partials, width, 0, accumulate, out);
}

/// Sums the columns `first .. first + out.len()` of `partials` (blocks × width) into `out`.
pub(super) fn finish<G: Element>(
    partials: &[f32],
    width: usize,
    first: usize,
    accumulate: Accumulate,
    out: &mut [G],
) {
    out.par_chunks_mut(COLUMNS).enumerate().for_each(|(task, out)| {
        finish_columns(partials, width, first + task * COLUMNS, accumulate, out);
    });
}
