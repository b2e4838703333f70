//! Forward pass: one task per (sequence, query head, block of queries).

use std::ops::Range;

use rayon::prelude::*;

use super::super::element::Element;
use super::super::gemm::{Bf16Products, BlockA, block_gemm, pack_transposed};
use super::super::scratch::Scratch;
use super::super::shared::SharedMut;
use super::blocks::{load, scale, store};
use super::mask::Visible;
use super::softmax::{scale_rows, softmax_step};
use super::{Attention, BLOCK, SCORES_LEN, SCRATCH, VECTORS_LEN};

/// The input and the outputs of a checked call.
pub(super) struct Call<'a, T> {
    pub(super) qkv: &'a [T],
    out: SharedMut<'a, T>,
    lse: SharedMut<'a, f32>,
}

impl Attention<'_> {
    /// Attention of packed `qkv` (B, T, (Hq + 2·Hkv)·D) into `out` (B, T, Hq·D), and the logarithm
    /// of each query's sum of exponentials into `lse` (B, Hq, T), which the backward pass needs.
    ///
    /// # Panics
    /// If a buffer's length does not match the shape.
    pub fn forward<T: Element>(&self, qkv: &[T], out: &mut [T], lse: &mut [f32]) {
        self.check(qkv, out, lse);
        let lse = SharedMut::new(lse);
        if self.products == Bf16Products::Amx
            && let (Some(qkv), Some(out)) = (T::as_bf16(qkv), T::as_bf16_mut(out))
        {
            let call = Call { qkv, out: SharedMut::new(out), lse };
            self.for_each_query_block(|head, queries, scratch| {
                self.amx_forward_block(&call, head, queries, scratch);
            });
        } else {
            let call = Call { qkv, out: SharedMut::new(out), lse };
            self.for_each_query_block(|head, queries, scratch| {
                self.forward_block(&call, head, queries, scratch);
            });
        }
    }

    /// Calls `forward` for each (sequence, query head) and block of queries.
    fn for_each_query_block(
        &self,
        forward: impl Fn((usize, usize), Range<usize>, &mut Scratch) + Sync,
    ) {
        let shape = self.shape;
        let tasks = shape.batch * shape.q_heads * shape.blocks();
        (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
            let (head, block) = (task / shape.blocks(), task % shape.blocks());
            let head = (head / shape.q_heads, head % shape.q_heads);
            SCRATCH.with_borrow_mut(|scratch| forward(head, shape.block(block), scratch));
        });
    }

    fn forward_block<T: Element>(
        &self,
        call: &Call<T>,
        (batch, head): (usize, usize),
        queries: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let (shape, qkv) = (self.shape, call.qkv);
        let (dim, padded, stride) = (shape.head_dim, shape.padded_dim(), shape.token_stride());
        let columns = queries.len().next_multiple_of(32);
        let (k_head, v_head) = shape.kv_places(head / shape.group());
        let [q, k, v, sums, scores, maximum, total, rescale] = scratch.split([
            VECTORS_LEN, // (D, queries), scaled
            VECTORS_LEN, // (keys, D)
            VECTORS_LEN, // (keys, D)
            VECTORS_LEN, // (queries, D)
            SCORES_LEN,  // (keys, queries)
            BLOCK,
            BLOCK,
            BLOCK,
        ]);
        let q_source = &qkv[shape.packed_start(batch, queries.start, head)..];
        pack_transposed(q_source, stride, (queries.len(), dim), q, BLOCK);
        scale(&mut q[..dim * BLOCK], self.scale);
        sums[..queries.len() * padded].fill(0.0);
        maximum.fill(f32::NEG_INFINITY);
        total.fill(0.0);

        for block in 0..shape.blocks() {
            let keys = shape.block(block);
            let visible = self.visible(batch, &queries, &keys);
            if visible == Visible::Nothing {
                continue;
            }
            let k_source = &qkv[shape.packed_start(batch, keys.start, k_head)..];
            let v_source = &qkv[shape.packed_start(batch, keys.start, v_head)..];
            load(k_source, stride, keys.len(), dim, 1.0, k, padded);
            load(v_source, stride, keys.len(), dim, 1.0, v, padded);
            let k = BlockA { data: k, row_stride: padded, k_stride: 1 };
            block_gemm((keys.len(), columns, dim), k, q, BLOCK, scores, BLOCK, false);
            if visible == Visible::Part {
                self.hide_by_column(batch, &queries, &keys, scores);
            }
            softmax_step(scores, keys.len(), columns, maximum, total, rescale);
            scale_rows(sums, padded, &rescale[..queries.len()]);
            let weights = BlockA { data: scores, row_stride: 1, k_stride: BLOCK };
            let size = (queries.len(), padded, keys.len());
            block_gemm(size, weights, v, padded, sums, padded, true);
        }

        self.store_queries(call, (batch, head), queries, sums, (maximum, total));
    }

    /// Divides the sums (queries, D) of a block by `total` and writes them, with the logarithms of
    /// the sums of exponentials.
    pub(super) fn store_queries<T: Element>(
        &self,
        call: &Call<T>,
        (batch, head): (usize, usize),
        queries: Range<usize>,
        sums: &[f32],
        (maximum, total): (&[f32], &[f32]),
    ) {
        let (shape, padded) = (self.shape, self.shape.padded_dim());
        let lse_start = shape.row_start(batch, head) + queries.start;
        // SAFETY: only the task of this head and block writes here.
        let lse = unsafe { call.lse.piece(lse_start..lse_start + queries.len()) };
        for (row, query) in queries.enumerate() {
            lse[row] = maximum[row] + total[row].ln();
            let start = shape.out_start(batch, query, head);
            // SAFETY: as above.
            let out = unsafe { call.out.piece(start..start + shape.head_dim) };
            store(&sums[row * padded..][..shape.head_dim], 1.0 / total[row], out);
        }
    }
}
