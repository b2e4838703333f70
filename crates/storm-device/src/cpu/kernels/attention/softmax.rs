//! The nonlinear part of a block, between the matrix products.
//!
//! Blocks of scores have rows of [`BLOCK`] values. The forward pass and the sweep for dQ keep them
//! transposed, with a column per query, so that maxima and sums over keys are plain vector
//! operations over rows.

use super::super::math::exp;
use super::BLOCK;
use crate::simd_dispatch;

simd_dispatch! {
    /// One step of the running softmax over `keys` rows of scores (key × query). Replaces scores by
    /// weights relative to the new maximum. `rescale` gets the factors for earlier weights.
    pub(super) fn softmax_step(
        scores: &mut [f32],
        keys: usize,
        queries: usize,
        maximum: &mut [f32],
        total: &mut [f32],
        rescale: &mut [f32],
    ) {
        let (maximum, total) = (&mut maximum[..queries], &mut total[..queries]);
        let rescale = &mut rescale[..queries];
        let mut reference = [0.0f32; BLOCK];
        let reference = &mut reference[..queries];
        reference.copy_from_slice(maximum);
        for row in scores.chunks_exact(BLOCK).take(keys) {
            for (new, score) in reference.iter_mut().zip(row) {
                *new = if *score > *new { *score } else { *new };
            }
        }
        for query in 0..queries {
            let new = reference[query];
            // A query that has seen no key yet has the maximum −∞. Subtracting it would give NaN.
            reference[query] = if new == f32::NEG_INFINITY { 0.0 } else { new };
            rescale[query] = exp(maximum[query] - reference[query]);
            maximum[query] = new;
        }
        let mut sum = [0.0f32; BLOCK];
        let sum = &mut sum[..queries];
        for row in scores.chunks_exact_mut(BLOCK).take(keys) {
            let row = &mut row[..queries];
            for query in 0..queries {
                row[query] = exp(row[query] - reference[query]);
                sum[query] += row[query];
            }
        }
        for query in 0..queries {
            total[query] = total[query].mul_add(rescale[query], sum[query]);
        }
    }

    /// Multiplies each of the rows, `stride` apart, by its factor.
    pub(super) fn scale_rows(rows: &mut [f32], stride: usize, factors: &[f32]) {
        for (row, factor) in rows.chunks_exact_mut(stride).zip(factors) {
            for value in row {
                *value *= *factor;
            }
        }
    }

    /// Multiplies rows of [`BLOCK`] values by the factors of their columns.
    pub(super) fn scale_columns(rows: &mut [f32], factors: &[f32]) {
        for row in rows.chunks_exact_mut(BLOCK) {
            for (value, factor) in row.iter_mut().zip(factors) {
                *value *= *factor;
            }
        }
    }

    /// For transposed blocks (key × query): computes dS = P (dP − delta) with P = exp(s − lse) from
    /// the scores s and the gradients of weights dP, in place of `d_weights`.
    pub(super) fn d_scores_by_column(
        scores: &[f32],
        d_weights: &mut [f32],
        keys: usize,
        queries: usize,
        lse: &[f32],
        delta: &[f32],
    ) {
        let (lse, delta) = (&lse[..queries], &delta[..queries]);
        let rows = scores.chunks_exact(BLOCK).zip(d_weights.chunks_exact_mut(BLOCK));
        for (scores, d_weights) in rows.take(keys) {
            let (scores, d_weights) = (&scores[..queries], &mut d_weights[..queries]);
            for query in 0..queries {
                let weight = exp(scores[query] - lse[query]);
                d_weights[query] = weight * (d_weights[query] - delta[query]);
            }
        }
    }

    /// The same for blocks that are not transposed (query × key). Also writes P in place of
    /// `scores`.
    pub(super) fn d_scores_by_row(
        scores: &mut [f32],
        d_weights: &mut [f32],
        keys: usize,
        lse: &[f32],
        delta: &[f32],
    ) {
        let rows = scores.chunks_exact_mut(BLOCK).zip(d_weights.chunks_exact_mut(BLOCK));
        for ((scores, d_weights), (lse, delta)) in rows.zip(lse.iter().zip(delta)) {
            let (scores, d_weights) = (&mut scores[..keys], &mut d_weights[..keys]);
            for key in 0..keys {
                let weight = exp(scores[key] - *lse);
                scores[key] = weight;
                d_weights[key] = weight * (d_weights[key] - *delta);
            }
        }
    }
}
