//! The nonlinear part of a block, between the products: from scores in f32 to weights in bf16, in
//! the order of operands.
//!
//! Scores have rows of [`BLOCK`] values. Each is multiplied by `factor` first: the scale, or 1 if
//! the scale has been applied. 16 columns are computed together, in registers.

use super::super::super::element::Element;
use super::super::super::gemm::{PAIRS_PER_STEP, pair_place};
use super::super::super::math::exp;
use super::BLOCK;
use crate::simd_dispatch;
use half::bf16;

/// Columns that are computed together. Their pairs are side by side in an operand.
const LANES: usize = 16;

type Lanes = [f32; LANES];

/// The bits of a value rounded to bf16.
#[inline(always)]
fn rounded(value: f32) -> u32 {
    u32::from(<bf16 as Element>::from_f32(value).to_bits())
}

/// 16 values of a block.
#[inline(always)]
fn lanes(values: &[f32], row: usize, column: usize) -> &Lanes {
    values[row * BLOCK + column..].first_chunk().expect("blocks are whole")
}

/// 16 values of a row.
#[inline(always)]
fn lanes_mut(values: &mut [f32], column: usize) -> &mut Lanes {
    values[column..].first_chunk_mut().expect("blocks are whole")
}

/// Writes a pair of rows of bits as part of a right operand with `steps` steps.
#[inline(always)]
fn write_pair(rows: [[u32; LANES]; 2], pair: usize, column: usize, steps: usize, to: &mut [f32]) {
    let to = lanes_mut(to, pair_place(pair, column, steps));
    for lane in 0..LANES {
        to[lane] = f32::from_bits(rows[0][lane] | rows[1][lane] << 16);
    }
}

simd_dispatch! {
    /// One step of the running softmax over `keys` rows of scores (key × query), as
    /// `softmax_step` without AMX. Writes the rounded weights to `weights`, a right operand whose
    /// rows are padded with zeros.
    pub(super) fn weigh_by_column(
        scores: &[f32],
        factor: f32,
        keys: usize,
        columns: usize,
        state: Running,
        weights: &mut [f32],
    ) {
        let steps = keys.div_ceil(2 * PAIRS_PER_STEP);
        for column in (0..columns).step_by(LANES) {
            let maximum = lanes_mut(state.maximum, column);
            let mut reference = *maximum;
            for key in 0..keys {
                let scores = lanes(scores, key, column);
                for lane in 0..LANES {
                    let score = scores[lane] * factor;
                    reference[lane] = if score > reference[lane] { score } else { reference[lane] };
                }
            }
            let rescale = lanes_mut(state.rescale, column);
            for lane in 0..LANES {
                let new = reference[lane];
                // A query that has seen no key yet has the maximum −∞. Subtracting it would give
                // NaN.
                reference[lane] = if new == f32::NEG_INFINITY { 0.0 } else { new };
                rescale[lane] = exp(maximum[lane] - reference[lane]);
                maximum[lane] = new;
            }
            let mut sum = [0.0; LANES];
            for pair in 0..steps * PAIRS_PER_STEP {
                let mut rows = [[0; LANES]; 2];
                for (half, row) in rows.iter_mut().enumerate() {
                    let key = 2 * pair + half;
                    if key < keys {
                        let scores = lanes(scores, key, column);
                        for lane in 0..LANES {
                            let weight = exp(scores[lane] * factor - reference[lane]);
                            sum[lane] += weight;
                            row[lane] = rounded(weight);
                        }
                    }
                }
                write_pair(rows, pair, column, steps, weights);
            }
            let total = lanes_mut(state.total, column);
            for lane in 0..LANES {
                total[lane] = total[lane].mul_add(rescale[lane], sum[lane]);
            }
        }
    }

    /// From scores and gradients of weights dP (query × key) of some queries, P = exp(s − lse) and
    /// dS = P (dP − delta), rounded.
    pub(super) fn weigh_by_row(
        scores: &[f32],
        d_weights: &[f32],
        factor: f32,
        keys: usize,
        lse: &[f32],
        delta: &[f32],
        result: &mut Weighed,
    ) {
        let (queries, columns) = (lse.len(), keys.next_multiple_of(LANES));
        let steps = queries.div_ceil(2 * PAIRS_PER_STEP);
        for pair in 0..steps * PAIRS_PER_STEP {
            for column in (0..columns).step_by(LANES) {
                let (mut weights, mut d_scores) = ([[0; LANES]; 2], [[0; LANES]; 2]);
                for half in 0..2 {
                    let query = 2 * pair + half;
                    if query < queries {
                        let (lse, delta) = (lse[query], delta[query]);
                        let scores = lanes(scores, query, column);
                        let d_weights = lanes(d_weights, query, column);
                        let by_query = &mut result.d_scores_by_query[query * BLOCK + column..];
                        let by_query = &mut by_query[..LANES];
                        for lane in 0..LANES {
                            let weight = exp(scores[lane] * factor - lse);
                            let d_score = rounded(weight * (d_weights[lane] - delta));
                            weights[half][lane] = rounded(weight);
                            d_scores[half][lane] = d_score;
                            by_query[lane] = bf16::from_bits(d_score as u16);
                        }
                    }
                }
                write_pair(weights, pair, column, steps, result.weights);
                write_pair(d_scores, pair, column, steps, result.d_scores);
            }
        }
        for row in result.d_scores_by_query.chunks_exact_mut(BLOCK).take(queries) {
            row[keys..].fill(bf16::ZERO);
        }
    }
}

/// The state of the running softmax, and the factors for earlier weights, of each query.
pub(super) struct Running<'a> {
    pub(super) maximum: &'a mut [f32],
    pub(super) total: &'a mut [f32],
    pub(super) rescale: &'a mut [f32],
}

/// P and dS of a pair of blocks (query × key).
pub(super) struct Weighed<'a> {
    /// Right operand of a product over queries. The columns beyond the last key have any values.
    pub(super) weights: &'a mut [f32],
    /// The same of dS.
    pub(super) d_scores: &'a mut [f32],
    /// dS as left operand of a product over keys, in rows of [`BLOCK`] values. Keys are padded with
    /// zeros.
    pub(super) d_scores_by_query: &'a mut [bf16],
}
