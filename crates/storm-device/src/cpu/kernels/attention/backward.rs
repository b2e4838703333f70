//! Backward pass, in two sweeps without shared sums: dQ per block of queries, then dK and dV per
//! block of keys. Scores are computed again in each.

use std::ops::Range;

use rayon::prelude::*;

use super::super::element::Element;
use super::super::gemm::{BlockA, block_gemm, pack_transposed};
use super::super::scratch::Scratch;
use super::super::shared::SharedMut;
use super::super::simd::lane_sum;
use super::blocks::{load, scale, store};
use super::mask::Visible;
use super::softmax::{d_scores_by_column, d_scores_by_row};
use super::{Attention, BLOCK, SCORES_LEN, SCRATCH, VECTORS_LEN};
use crate::simd_dispatch;

simd_dispatch! {
    /// Σ a·b in the fixed order of [`lane_sum`].
    fn dot[T: Element](a: &[T], b: &[T]) -> f32 {
        let b = &b[..a.len()];
        lane_sum(a.len(), |i| a[i].to_f32() * b[i].to_f32())
    }
}

/// What the forward pass left, and the incoming gradient.
#[derive(Clone, Copy)]
struct Saved<'a, T> {
    d_out: &'a [T],
    qkv: &'a [T],
    out: &'a [T],
    lse: &'a [f32],
}

impl Attention<'_> {
    /// Gradient of [`Attention::forward`]: `d_qkv` is overwritten entirely. `out` and `lse` are what
    /// the forward pass made; `delta` (B, Hq, T) is scratch.
    ///
    /// Gradients of a key and value head are summed over the query heads that use it in ascending
    /// order, and within a head over ascending blocks of queries.
    ///
    /// # Panics
    /// If a buffer's length does not match the shape.
    pub fn backward<T: Element>(
        &self,
        d_out: &[T],
        qkv: &[T],
        out: &[T],
        lse: &[f32],
        delta: &mut [f32],
        d_qkv: &mut [T],
    ) {
        self.check(qkv, out, lse);
        assert_eq!(d_out.len(), out.len(), "length of d_out");
        assert_eq!(delta.len(), lse.len(), "length of delta");
        assert_eq!(d_qkv.len(), qkv.len(), "length of d_qkv");
        let shape = self.shape;
        let saved = Saved { d_out, qkv, out, lse };
        let d_qkv = SharedMut::new(d_qkv);

        let shared_delta = SharedMut::new(delta);
        let tasks = shape.batch * shape.q_heads * shape.blocks();
        (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
            let (head, block) = (task / shape.blocks(), task % shape.blocks());
            let place = (head / shape.q_heads, head % shape.q_heads);
            SCRATCH.with_borrow_mut(|scratch| {
                self.d_query_block(saved, place, shape.block(block), shared_delta, d_qkv, scratch);
            });
        });

        let tasks = shape.batch * shape.kv_heads * shape.blocks();
        (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
            let (head, block) = (task / shape.blocks(), task % shape.blocks());
            let place = (head / shape.kv_heads, head % shape.kv_heads);
            SCRATCH.with_borrow_mut(|scratch| {
                self.d_key_value_block(saved, place, shape.block(block), delta, d_qkv, scratch);
            });
        });
    }

    /// dQ of one block of queries, and its delta = Σ dO·O. Scores are transposed here (key ×
    /// query), so that only the queries, once per block, need transposing.
    fn d_query_block<T: Element>(
        &self,
        saved: Saved<T>,
        (batch, head): (usize, usize),
        queries: Range<usize>,
        delta: SharedMut<f32>,
        d_qkv: SharedMut<T>,
        scratch: &mut Scratch,
    ) {
        let shape = self.shape;
        let (dim, padded, stride) = (shape.head_dim, shape.padded_dim(), shape.token_stride());
        let columns = queries.len().next_multiple_of(32);
        let kv_head = head / shape.group();
        let [q, d_out, k, v, d_q, scores, d_weights, lse_row, delta_row] = scratch.split([
            VECTORS_LEN, // (D, queries), scaled
            VECTORS_LEN, // (D, queries)
            VECTORS_LEN, // (keys, D)
            VECTORS_LEN, // (keys, D)
            VECTORS_LEN, // (queries, D)
            SCORES_LEN,  // (keys, queries)
            SCORES_LEN,  // (keys, queries)
            BLOCK,
            BLOCK,
        ]);
        let q_source = &saved.qkv[shape.packed_start(batch, queries.start, head)..];
        pack_transposed(q_source, stride, (queries.len(), dim), q, BLOCK);
        scale(&mut q[..dim * BLOCK], self.scale);
        let d_out_source = &saved.d_out[shape.out_start(batch, queries.start, head)..];
        pack_transposed(d_out_source, shape.out_stride(), (queries.len(), dim), d_out, BLOCK);
        d_q[..queries.len() * padded].fill(0.0);

        let row_start = shape.row_start(batch, head) + queries.start;
        let rows = row_start..row_start + queries.len();
        // SAFETY: the task alone writes this head's queries of the block.
        let delta = unsafe { delta.piece(rows.clone()) };
        for (row, query) in queries.clone().enumerate() {
            let start = shape.out_start(batch, query, head);
            delta[row] = dot(&saved.d_out[start..start + dim], &saved.out[start..start + dim]);
        }
        delta_row[..queries.len()].copy_from_slice(delta);
        lse_row[..queries.len()].copy_from_slice(&saved.lse[rows]);

        for block in 0..shape.blocks() {
            let keys = shape.block(block);
            let visible = self.visible(batch, &queries, &keys);
            if visible == Visible::Nothing {
                continue;
            }
            let k_head = shape.q_heads + kv_head;
            let v_head = k_head + shape.kv_heads;
            let k_source = &saved.qkv[shape.packed_start(batch, keys.start, k_head)..];
            let v_source = &saved.qkv[shape.packed_start(batch, keys.start, v_head)..];
            load(k_source, stride, keys.len(), dim, 1.0, k, padded);
            load(v_source, stride, keys.len(), dim, 1.0, v, padded);
            let size = (keys.len(), columns, dim);
            let by_row = |data| BlockA { data, row_stride: padded, k_stride: 1 };
            block_gemm(size, by_row(k), q, BLOCK, scores, BLOCK, false);
            block_gemm(size, by_row(v), d_out, BLOCK, d_weights, BLOCK, false);
            if visible == Visible::Part {
                self.hide_by_column(batch, &queries, &keys, scores);
            }
            d_scores_by_column(scores, d_weights, keys.len(), columns, lse_row, delta_row);
            let d_scores = BlockA { data: d_weights, row_stride: 1, k_stride: BLOCK };
            let size = (queries.len(), padded, keys.len());
            block_gemm(size, d_scores, k, padded, d_q, padded, true);
        }

        for (row, query) in queries.enumerate() {
            let start = shape.packed_start(batch, query, head);
            // SAFETY: the task alone writes this query head of these tokens.
            let d_q_out = unsafe { d_qkv.piece(start..start + dim) };
            store(&d_q[row * padded..][..dim], self.scale, d_q_out);
        }
    }

    /// dK and dV of one block of keys. Scores are not transposed here (query × key), so that only
    /// the keys and values, once per block, need transposing.
    fn d_key_value_block<T: Element>(
        &self,
        saved: Saved<T>,
        (batch, kv_head): (usize, usize),
        keys: Range<usize>,
        delta: &[f32],
        d_qkv: SharedMut<T>,
        scratch: &mut Scratch,
    ) {
        let shape = self.shape;
        let (dim, padded, stride) = (shape.head_dim, shape.padded_dim(), shape.token_stride());
        let columns = keys.len().next_multiple_of(32);
        let k_head = shape.q_heads + kv_head;
        let v_head = k_head + shape.kv_heads;
        let [k, v, q, d_out, d_k, d_v, scores, d_weights] = scratch.split([
            VECTORS_LEN, // (D, keys)
            VECTORS_LEN, // (D, keys)
            VECTORS_LEN, // (queries, D), scaled
            VECTORS_LEN, // (queries, D)
            VECTORS_LEN, // (keys, D)
            VECTORS_LEN, // (keys, D)
            SCORES_LEN,  // (queries, keys)
            SCORES_LEN,  // (queries, keys)
        ]);
        let k_source = &saved.qkv[shape.packed_start(batch, keys.start, k_head)..];
        let v_source = &saved.qkv[shape.packed_start(batch, keys.start, v_head)..];
        pack_transposed(k_source, stride, (keys.len(), dim), k, BLOCK);
        pack_transposed(v_source, stride, (keys.len(), dim), v, BLOCK);
        d_k[..keys.len() * padded].fill(0.0);
        d_v[..keys.len() * padded].fill(0.0);

        for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
            for block in 0..shape.blocks() {
                let queries = shape.block(block);
                let visible = self.visible(batch, &queries, &keys);
                if visible == Visible::Nothing {
                    continue;
                }
                let rows = queries.len();
                let q_source = &saved.qkv[shape.packed_start(batch, queries.start, head)..];
                load(q_source, stride, rows, dim, self.scale, q, padded);
                let d_out_source = &saved.d_out[shape.out_start(batch, queries.start, head)..];
                load(d_out_source, shape.out_stride(), rows, dim, 1.0, d_out, padded);
                let by_row = |data| BlockA { data, row_stride: padded, k_stride: 1 };
                block_gemm((rows, columns, dim), by_row(q), k, BLOCK, scores, BLOCK, false);
                block_gemm((rows, columns, dim), by_row(d_out), v, BLOCK, d_weights, BLOCK, false);
                if visible == Visible::Part {
                    self.hide_by_row(batch, &queries, &keys, scores);
                }
                let row_start = shape.row_start(batch, head) + queries.start;
                let (lse, delta) = (&saved.lse[row_start..][..rows], &delta[row_start..][..rows]);
                d_scores_by_row(scores, d_weights, columns, lse, delta);
                let by_column = |data| BlockA { data, row_stride: 1, k_stride: BLOCK };
                let size = (keys.len(), padded, rows);
                block_gemm(size, by_column(scores), d_out, padded, d_v, padded, true);
                block_gemm(size, by_column(d_weights), q, padded, d_k, padded, true);
            }
        }

        for (row, key) in keys.enumerate() {
            for (head, gradient) in [(k_head, &*d_k), (v_head, &*d_v)] {
                let start = shape.packed_start(batch, key, head);
                // SAFETY: the task alone writes this key and value head of these tokens.
                let target = unsafe { d_qkv.piece(start..start + dim) };
                store(&gradient[row * padded..][..dim], 1.0, target);
            }
        }
    }
}
