//! The order of the backward pass, in one sweep or two (see [`super::backward`]), and the buffers
//! that its tasks share.

use rayon::prelude::*;
use std::ops::Range;

use super::super::element::Element;
use super::super::scratch::Scratch;
use super::super::shared::SharedMut;
use super::super::simd::lane_sum;
use super::blocks::store;
use super::{Attention, D_QUERY_LEN, SCRATCH};
use crate::simd_dispatch;

simd_dispatch! {
    /// Σ a·b in the fixed order of [`lane_sum`].
    fn dot[T: Element](a: &[T], b: &[T]) -> f32 {
        lane_sum([a, b], |[a, b]| a * b)
    }
}

/// The incoming gradient, input and outputs of the forward pass, and the result.
pub(super) struct Buffers<'a, T> {
    pub(super) d_out: &'a [T],
    pub(super) qkv: &'a [T],
    pub(super) out: &'a [T],
    pub(super) lse: &'a [f32],
    pub(super) d_qkv: SharedMut<'a, T>,
}

impl Attention<'_> {
    /// Whether to take one sweep, with `d_query_len` elements for dQ of a key head.
    pub(super) fn takes_one_sweep(&self, d_query_len: usize) -> bool {
        // One sweep has only one task per key head. With too few of them, threads would be idle.
        let heads = self.shape.batch * self.shape.kv_heads;
        d_query_len <= D_QUERY_LEN && heads >= 2 * rayon::current_num_threads()
    }

    /// Calls `group` for each (sequence, key head), with the deltas of its query heads.
    pub(super) fn in_one_sweep<T: Element>(
        &self,
        buffers: &Buffers<T>,
        delta: &mut [f32],
        group: impl Fn((usize, usize), &[f32], &mut Scratch) + Sync,
    ) {
        let shape = self.shape;
        let delta = SharedMut::new(delta);
        let tasks = shape.batch * shape.kv_heads;
        (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
            let (batch, kv_head) = (task / shape.kv_heads, task % shape.kv_heads);
            let first = shape.row_start(batch, kv_head * shape.group());
            // SAFETY: only this task handles this group of query heads.
            let delta = unsafe { delta.piece(first..first + shape.group() * shape.seq) };
            for (i, head) in shape.heads_of(kv_head).enumerate() {
                let delta = &mut delta[i * shape.seq..][..shape.seq];
                self.fill_delta(buffers, (batch, head), 0, delta);
            }
            SCRATCH.with_borrow_mut(|scratch| group((batch, kv_head), delta, scratch));
        });
    }

    /// Calls `query_block` for each (sequence, query head) and block, with the deltas of its
    /// queries. Then calls `key_block` for each (sequence, key head) and block, with the deltas of
    /// the group of query heads.
    pub(super) fn in_two_sweeps<T: Element>(
        &self,
        buffers: &Buffers<T>,
        delta: &mut [f32],
        query_block: impl Fn((usize, usize), usize, &[f32], &mut Scratch) + Sync,
        key_block: impl Fn((usize, usize), usize, &[f32], &mut Scratch) + Sync,
    ) {
        let shape = self.shape;
        let shared_delta = SharedMut::new(delta);
        let tasks = shape.batch * shape.q_heads * shape.blocks();
        (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
            let (head, block) = (task / shape.blocks(), task % shape.blocks());
            let place = (head / shape.q_heads, head % shape.q_heads);
            let queries = shape.block(block);
            let first = shape.row_start(place.0, place.1) + queries.start;
            // SAFETY: only this task handles this head's queries of the block.
            let delta = unsafe { shared_delta.piece(first..first + queries.len()) };
            self.fill_delta(buffers, place, queries.start, delta);
            SCRATCH.with_borrow_mut(|scratch| query_block(place, block, delta, scratch));
        });

        let tasks = shape.batch * shape.kv_heads * shape.blocks();
        (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
            let (head, block) = (task / shape.blocks(), task % shape.blocks());
            let (batch, kv_head) = (head / shape.kv_heads, head % shape.kv_heads);
            let first = shape.row_start(batch, kv_head * shape.group());
            let delta = &delta[first..first + shape.group() * shape.seq];
            SCRATCH.with_borrow_mut(|scratch| key_block((batch, kv_head), block, delta, scratch));
        });
    }

    /// Computes delta = Σ dO·O for consecutive queries of a head, starting at `first`.
    fn fill_delta<T: Element>(
        &self,
        buffers: &Buffers<T>,
        (batch, head): (usize, usize),
        first: usize,
        delta: &mut [f32],
    ) {
        for (row, delta) in delta.iter_mut().enumerate() {
            let start = self.shape.out_start(batch, first + row, head);
            let vector = start..start + self.shape.head_dim;
            *delta = dot(&buffers.d_out[vector.clone()], &buffers.out[vector]);
        }
    }

    /// Writes a head's gradient (tokens, D), multiplied by `factor`, to its place in `d_qkv`.
    pub(super) fn store_vectors<T: Element>(
        &self,
        buffers: &Buffers<T>,
        (batch, head): (usize, usize),
        tokens: Range<usize>,
        vectors: &[f32],
        factor: f32,
    ) {
        let (dim, padded) = (self.shape.head_dim, self.shape.padded_dim());
        for (row, token) in tokens.enumerate() {
            let start = self.shape.packed_start(batch, token, head);
            // SAFETY: no other task stores these heads and tokens.
            let target = unsafe { buffers.d_qkv.piece(start..start + dim) };
            store(&vectors[row * padded..][..dim], factor, target);
        }
    }
}
