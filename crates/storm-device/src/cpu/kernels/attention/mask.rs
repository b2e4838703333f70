//! Which scores of a block are visible.

use std::ops::Range;

use super::{Attention, BLOCK};
use crate::simd_dispatch;

/// How much of a block of scores is visible.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Visible {
    /// The block contributes nothing and is skipped.
    Nothing,
    /// No score needs hiding.
    Everything,
    /// Some scores are hidden.
    Part,
}

impl Attention<'_> {
    /// Whether queries of one block see keys of another.
    pub(super) fn visible(
        &self,
        batch: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) -> Visible {
        let mut everything = true;
        if self.mask.is_causal() {
            if keys.start >= queries.end {
                return Visible::Nothing;
            }
            everything = keys.end <= queries.start + 1;
        }
        if let Some(window) = self.mask.window() {
            // First the smallest distance, from the first query back to the last key, then the
            // largest, from the last query back to the first key.
            if queries.start >= keys.end.saturating_add(window - 1) {
                return Visible::Nothing;
            }
            everything &= queries.end <= keys.start.saturating_add(window);
        }
        if let (Some(query_ids), Some(key_ids)) =
            (self.segment_ids(batch, queries), self.segment_ids(batch, keys))
        {
            let (query, key) = (bounds(query_ids), bounds(key_ids));
            if query.1 < key.0 || key.1 < query.0 {
                return Visible::Nothing;
            }
            everything &= query == key && query.0 == query.1;
        }
        if everything { Visible::Everything } else { Visible::Part }
    }

    /// Sets hidden scores of a plain block (query × key) to −∞.
    pub(super) fn hide_by_row(
        &self,
        batch: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
        scores: &mut [f32],
    ) {
        if self.mask.is_causal() {
            for (query, row) in queries.clone().zip(scores.chunks_exact_mut(BLOCK)) {
                let seen = (query + 1).saturating_sub(keys.start).min(keys.len());
                row[seen..keys.len()].fill(f32::NEG_INFINITY);
            }
        }
        if let Some(window) = self.mask.window() {
            for (query, row) in queries.clone().zip(scores.chunks_exact_mut(BLOCK)) {
                let first = (query + 1).saturating_sub(window);
                let gone = first.saturating_sub(keys.start).min(keys.len());
                row[..gone].fill(f32::NEG_INFINITY);
            }
        }
        self.hide_other_segments(batch, queries, keys, scores);
    }

    /// Sets hidden scores of a transposed block (key × query) to −∞.
    pub(super) fn hide_by_column(
        &self,
        batch: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
        scores: &mut [f32],
    ) {
        if self.mask.is_causal() {
            for (key, row) in keys.clone().zip(scores.chunks_exact_mut(BLOCK)) {
                let unseen = key.saturating_sub(queries.start).min(queries.len());
                row[..unseen].fill(f32::NEG_INFINITY);
            }
        }
        if let Some(window) = self.mask.window() {
            for (key, row) in keys.clone().zip(scores.chunks_exact_mut(BLOCK)) {
                let end = key.saturating_add(window);
                let last = end.saturating_sub(queries.start).min(queries.len());
                row[last..queries.len()].fill(f32::NEG_INFINITY);
            }
        }
        self.hide_other_segments(batch, keys, queries, scores);
    }

    /// Hides scores where the tokens of row and column belong to different segments.
    fn hide_other_segments(
        &self,
        batch: usize,
        rows: &Range<usize>,
        columns: &Range<usize>,
        scores: &mut [f32],
    ) {
        if let (Some(row_ids), Some(column_ids)) =
            (self.segment_ids(batch, rows), self.segment_ids(batch, columns))
        {
            hide_unequal(row_ids, column_ids, scores);
        }
    }

    /// Segment numbers of some tokens.
    fn segment_ids(&self, batch: usize, tokens: &Range<usize>) -> Option<&[i32]> {
        let base = batch * self.shape.seq;
        Some(&self.segments?[base + tokens.start..base + tokens.end])
    }
}

/// The smallest and the largest id.
fn bounds(ids: &[i32]) -> (i32, i32) {
    ids.iter().fold((i32::MAX, i32::MIN), |(low, high), id| (low.min(*id), high.max(*id)))
}

simd_dispatch! {
    /// Sets a score to −∞ if the ids of its row and column differ.
    fn hide_unequal(row_ids: &[i32], column_ids: &[i32], scores: &mut [f32]) {
        for (row_id, row) in row_ids.iter().zip(scores.chunks_exact_mut(BLOCK)) {
            for (score, column_id) in row.iter_mut().zip(column_ids) {
                *score = if row_id == column_id { *score } else { f32::NEG_INFINITY };
            }
        }
    }
}
