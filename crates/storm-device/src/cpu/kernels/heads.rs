//! Ops on the query and key heads of packed rows: per-head RMS norm and rotary embedding.

use super::column_sum::finish;
use super::element::Element;
use super::gemm::Accumulate;
use super::norm::statistics;
use super::simd::lane_sum;
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::{
    HeadLayout, NormKind, RotaryDirection, RotaryFrequencies, norm_rows_per_partial,
};

/// Rows per task.
const ROWS: usize = 64;

/// The two weights of a per-head norm, (D) each.
#[derive(Clone, Copy)]
pub struct HeadWeights<'a, E> {
    /// For query heads.
    pub query: &'a [E],
    /// For key heads.
    pub key: &'a [E],
}

impl<'a, E> HeadWeights<'a, E> {
    fn of(&self, heads: &HeadLayout, head: usize) -> &'a [E] {
        if head < heads.query_heads { self.query } else { self.key }
    }
}

simd_dispatch! {
    fn norm_head[E: Element](x: &[E], weight: &[E], epsilon: f32, y: &mut [E]) -> f32 {
        let (_, rstd) = statistics(x, NormKind::Rms, epsilon);
        for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
            *y = E::from_f32(x.to_f32() * rstd * weight.to_f32());
        }
        rstd
    }

    fn norm_head_grad[E: Element](x: &[E], weight: &[E], rstd: f32, d: &mut [E]) {
        let width = d.len();
        let (x, weight) = (&x[..width], &weight[..width]);
        let sum = lane_sum([&*d, weight, x], |[d, weight, x]| d * weight * (x * rstd));
        let along = sum / width as f32;
        for i in 0..width {
            let normalized = x[i].to_f32() * rstd;
            d[i] = E::from_f32((d[i].to_f32() * weight[i].to_f32() - normalized * along) * rstd);
        }
    }

    fn add_head_weight_gradient[E: Element](dy: &[E], x: &[E], rstd: f32, sums: &mut [f32]) {
        for ((sum, dy), x) in sums.iter_mut().zip(dy).zip(x) {
            *sum += dy.to_f32() * (x.to_f32() * rstd);
        }
    }

    fn rotate_head[E: Element](x: &mut [E], table: &[f32], sign: f32) {
        let half = x.len() / 2;
        let (low, high) = x.split_at_mut(half);
        let (high, table) = (&mut high[..half], &table[..2 * half]);
        for i in 0..half {
            let (cosine, sine) = (table[2 * i], sign * table[2 * i + 1]);
            let (a, b) = (low[i].to_f32(), high[i].to_f32());
            low[i] = E::from_f32(a * cosine - b * sine);
            high[i] = E::from_f32(b * cosine + a * sine);
        }
    }
}

/// The angles of the pairs of each row.
#[derive(Clone, Copy)]
pub struct Angles<'a> {
    /// Cosines and sines: (rows, pairs, 2).
    pub table: &'a [f32],
    /// Pairs of each head. Elements behind them are not rotated.
    pub pairs: usize,
    /// Which way to rotate.
    pub direction: RotaryDirection,
}

impl Angles<'_> {
    /// Rotates the query and key heads of a row.
    fn rotate<E: Element>(&self, heads: &HeadLayout, row: usize, x: &mut [E]) {
        let turned = 2 * self.pairs;
        let table = &self.table[row * turned..(row + 1) * turned];
        let sign = match self.direction {
            RotaryDirection::Forward => 1.0,
            RotaryDirection::Inverse => -1.0,
        };
        for head in x.chunks_mut(heads.head_dim).take(heads.query_key_heads()) {
            rotate_head(&mut head[..turned], table, sign);
        }
    }
}

/// RMS norm of each query and key head, which is then rotated if there are `angles`. Value heads are
/// copied. `rstd` is (rows, Q+K).
pub fn qk_norm<E: Element>(
    heads: HeadLayout,
    qkv: &[E],
    weights: HeadWeights<'_, E>,
    angles: Option<Angles<'_>>,
    epsilon: f32,
    y: &mut [E],
    rstd: &mut [f32],
) {
    let (width, dim, count) = (heads.qkv_width(), heads.head_dim, heads.query_key_heads());
    y.par_chunks_mut(ROWS * width)
        .zip(qkv.par_chunks(ROWS * width))
        .zip(rstd.par_chunks_mut(ROWS * count))
        .enumerate()
        .for_each(|(part, ((y, x), rstd))| {
            let rows = y.chunks_mut(width).zip(x.chunks(width)).zip(rstd.chunks_mut(count));
            for (row, ((y, x), rstd)) in rows.enumerate() {
                for head in 0..count {
                    let at = head * dim..(head + 1) * dim;
                    let weight = weights.of(&heads, head);
                    rstd[head] = norm_head(&x[at.clone()], weight, epsilon, &mut y[at]);
                }
                y[count * dim..].copy_from_slice(&x[count * dim..]);
                if let Some(angles) = angles {
                    angles.rotate(&heads, part * ROWS + row, y);
                }
            }
        });
}

/// Gradient of the input of [`qk_norm`]. `d` has the gradient of the normalized heads, before they
/// were rotated, and receives the result.
pub fn qk_norm_grad<E: Element>(
    heads: HeadLayout,
    qkv: &[E],
    weights: HeadWeights<'_, E>,
    rstd: &[f32],
    d: &mut [E],
) {
    let (width, dim, count) = (heads.qkv_width(), heads.head_dim, heads.query_key_heads());
    d.par_chunks_mut(ROWS * width)
        .zip(qkv.par_chunks(ROWS * width))
        .zip(rstd.par_chunks(ROWS * count))
        .for_each(|((d, x), rstd)| {
            for ((d, x), rstd) in d.chunks_mut(width).zip(x.chunks(width)).zip(rstd.chunks(count)) {
                for head in 0..count {
                    let at = head * dim..(head + 1) * dim;
                    let weight = weights.of(&heads, head);
                    norm_head_grad(&x[at.clone()], weight, rstd[head], &mut d[at]);
                }
            }
        });
}

/// Gradients of both weights of [`qk_norm`]. `partials` is scratch: blocks × 2D, with the query
/// part, then the key part.
pub fn qk_norm_weight_grads<E: Element, G: Element>(
    heads: HeadLayout,
    dy: &[E],
    qkv: &[E],
    rstd: &[f32],
    partials: &mut [f32],
    d_query: (&mut [G], Accumulate),
    d_key: (&mut [G], Accumulate),
) {
    let (width, dim, count) = (heads.qkv_width(), heads.head_dim, heads.query_key_heads());
    let rows_per_block = norm_rows_per_partial(qkv.len() / width);
    partials
        .par_chunks_mut(2 * dim)
        .zip(qkv.par_chunks(rows_per_block * width))
        .zip(dy.par_chunks(rows_per_block * width))
        .zip(rstd.par_chunks(rows_per_block * count))
        .for_each(|(((sums, x), dy), rstd)| {
            sums.fill(0.0);
            let (query_sums, key_sums) = sums.split_at_mut(dim);
            let rows = x.chunks(width).zip(dy.chunks(width)).zip(rstd.chunks(count));
            for ((x, dy), rstd) in rows {
                for head in 0..count {
                    let at = head * dim..(head + 1) * dim;
                    let is_query = head < heads.query_heads;
                    let sums = if is_query { &mut *query_sums } else { &mut *key_sums };
                    add_head_weight_gradient(&dy[at.clone()], &x[at], rstd[head], sums);
                }
            }
        });
    finish(partials, 2 * dim, 0, d_query.1, d_query.0);
    finish(partials, 2 * dim, dim, d_key.1, d_key.0);
}

/// Cosine and sine of each position's angles: (rows, frequencies, 2).
pub fn rotary_table(frequencies: &RotaryFrequencies, positions: &[i32], table: &mut [f32]) {
    let RotaryFrequencies { inverse_wavelengths, factor } = frequencies;
    let width = 2 * inverse_wavelengths.len();
    table.par_chunks_mut(ROWS * width).zip(positions.par_chunks(ROWS)).for_each(
        |(table, positions)| {
            for (row, &position) in table.chunks_mut(width).zip(positions) {
                for (pair, frequency) in row.chunks_exact_mut(2).zip(inverse_wavelengths.iter()) {
                    // The product is rounded to f32, as in `transformers`. Cosine and sine of the
                    // angle are then computed in f64.
                    let angle = f64::from(position as f32 * frequency);
                    pair[0] = angle.cos() as f32 * factor;
                    pair[1] = angle.sin() as f32 * factor;
                }
            }
        },
    );
}

/// Copies rows, and rotates their query and key heads if there are `angles`.
pub fn rotary<E: Element>(heads: HeadLayout, angles: Option<Angles<'_>>, qkv: &[E], y: &mut [E]) {
    let width = heads.qkv_width();
    y.par_chunks_mut(ROWS * width).zip(qkv.par_chunks(ROWS * width)).enumerate().for_each(
        |(part, (y, x))| {
            y.copy_from_slice(x);
            let Some(angles) = angles else { return };
            for (row, y) in y.chunks_mut(width).enumerate() {
                angles.rotate(&heads, part * ROWS + row, y);
            }
        },
    );
}
