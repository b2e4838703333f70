//! Backward pass, in one sweep or two as without AMX. Scores are not transposed (query × key), so
//! queries and dO are read in place. Gradients of keys and values are transposed (D × key), so P and
//! dS are right operands, for which rows need not be turned.

use super::super::super::gemm::{AmxBlocks, Matrix, pack_block, pack_transposed};
use super::super::super::scratch::{Scratch, as_bf16};
use super::super::D_QUERY_LEN;
use super::super::blocks::scale;
use super::super::mask::Visible;
use super::super::sweeps::Buffers;
use super::weigh::{Weighed, weigh_by_row};
use super::{
    Attention, BLOCK, PANEL_LEN, SCORE_PAIRS_LEN, SCORES_LEN, VECTOR_PAIRS_LEN, VECTORS_LEN,
};
use half::bf16;
use std::ops::Range;

impl Attention<'_> {
    pub(in super::super) fn amx_backward(&self, buffers: &Buffers<bf16>, delta: &mut [f32]) {
        let (shape, padded) = (self.shape, self.shape.padded_dim());
        let head_len = shape.blocks() * BLOCK * padded;
        let d_query_len = shape.group() * head_len;
        if self.takes_one_sweep(d_query_len) {
            self.in_one_sweep(buffers, delta, |(batch, kv_head), delta, scratch| {
                let (d_q, mut work) = Work::new(scratch);
                d_q[..d_query_len].fill(0.0);
                for block in 0..shape.blocks() {
                    let place = (batch, kv_head);
                    self.amx_key_block(buffers, place, block, delta, &mut work, Some(d_q));
                }
                for (i, head) in shape.heads_of(kv_head).enumerate() {
                    let d_q = &d_q[i * head_len..];
                    self.store_vectors(buffers, (batch, head), 0..shape.seq, d_q, self.scale);
                }
            });
        } else {
            self.in_two_sweeps(
                buffers,
                delta,
                |place, block, delta, scratch| {
                    self.amx_query_block(buffers, place, block, delta, scratch);
                },
                |place, block, delta, scratch| {
                    let (_, mut work) = Work::new(scratch);
                    self.amx_key_block(buffers, place, block, delta, &mut work, None);
                },
            );
        }
    }

    /// dQ of one block of queries.
    fn amx_query_block(
        &self,
        buffers: &Buffers<bf16>,
        (batch, head): (usize, usize),
        block: usize,
        delta: &[f32],
        scratch: &mut Scratch,
    ) {
        let (shape, padded) = (self.shape, self.shape.padded_dim());
        let queries = shape.block(block);
        let (d_q, mut work) = Work::new(scratch);
        d_q[..BLOCK * padded].fill(0.0);
        for block in 0..shape.blocks() {
            let keys = shape.block(block);
            let visible = self.visible(batch, &queries, &keys);
            if visible != Visible::Nothing {
                self.pack_keys(buffers, (batch, head / shape.group()), &keys, &mut work);
                let place = (batch, head);
                self.amx_weights(buffers, place, (&queries, &keys), visible, delta, &mut work);
                self.add_d_queries(&queries, &keys, &mut work, d_q);
            }
        }
        self.store_vectors(buffers, (batch, head), queries, d_q, self.scale);
    }

    /// dK and dV of one block of keys. If `d_q` (group, blocks · 64, D) is given, also adds the
    /// block's contribution to dQ. `delta` is that of the group of query heads.
    fn amx_key_block(
        &self,
        buffers: &Buffers<bf16>,
        (batch, kv_head): (usize, usize),
        block: usize,
        delta: &[f32],
        work: &mut Work,
        mut d_q: Option<&mut [f32]>,
    ) {
        let shape = self.shape;
        let (dim, padded) = (shape.head_dim, shape.padded_dim());
        let keys = shape.block(block);
        self.pack_keys(buffers, (batch, kv_head), &keys, work);
        work.d_k[..padded * BLOCK].fill(0.0);
        work.d_v[..padded * BLOCK].fill(0.0);
        for (i, head) in shape.heads_of(kv_head).enumerate() {
            for block in 0..shape.blocks() {
                let queries = shape.block(block);
                let visible = self.visible(batch, &queries, &keys);
                if visible == Visible::Nothing {
                    continue;
                }
                let delta = &delta[i * shape.seq + queries.start..][..queries.len()];
                let place = (batch, head);
                self.amx_weights(buffers, place, (&queries, &keys), visible, delta, work);
                let columns = keys.len().next_multiple_of(32);
                let d_out = shape.out_vectors(buffers.d_out, batch, &queries, head);
                let weights = (&*work.weighed.weights, columns);
                work.tiles.multiply(d_out.transposed(), weights, (work.d_v, BLOCK), true);
                let q = shape.vectors(buffers.qkv, batch, &queries, head);
                let d_scores = (&*work.weighed.d_scores, columns);
                work.tiles.multiply(q.transposed(), d_scores, (work.d_k, BLOCK), true);
                if let Some(d_q) = d_q.as_deref_mut() {
                    let first = (i * shape.blocks() * BLOCK + queries.start) * padded;
                    self.add_d_queries(&queries, &keys, work, &mut d_q[first..]);
                }
            }
        }
        let (k_head, v_head) = shape.kv_places(kv_head);
        for (sums, head, factor) in [(&*work.d_k, k_head, self.scale), (&*work.d_v, v_head, 1.0)] {
            pack_transposed(sums, BLOCK, (dim, keys.len()), work.turned, padded);
            self.store_vectors(buffers, (batch, head), keys.clone(), work.turned, factor);
        }
    }

    /// Packs the keys and values of a block as right operands.
    fn pack_keys(
        &self,
        buffers: &Buffers<bf16>,
        (batch, kv_head): (usize, usize),
        keys: &Range<usize>,
        work: &mut Work,
    ) {
        let (k_head, v_head) = self.shape.kv_places(kv_head);
        let k = self.shape.vectors(buffers.qkv, batch, keys, k_head);
        let v = self.shape.vectors(buffers.qkv, batch, keys, v_head);
        pack_block(k.transposed(), work.k_columns);
        pack_block(v.transposed(), work.v_columns);
        pack_block(k, work.k_rows);
    }

    /// P and dS of a pair of blocks. `delta` is that of the queries.
    fn amx_weights(
        &self,
        buffers: &Buffers<bf16>,
        (batch, head): (usize, usize),
        (queries, keys): (&Range<usize>, &Range<usize>),
        visible: Visible,
        delta: &[f32],
        work: &mut Work,
    ) {
        let shape = self.shape;
        let columns = keys.len().next_multiple_of(32);
        let q = shape.vectors(buffers.qkv, batch, queries, head);
        let d_out = shape.out_vectors(buffers.d_out, batch, queries, head);
        let Work { tiles, scores, d_weights, k_columns, v_columns, weighed, .. } = work;
        tiles.multiply(q, (k_columns, columns), (scores, BLOCK), false);
        tiles.multiply(d_out, (v_columns, columns), (d_weights, BLOCK), false);
        let mut factor = self.scale;
        if visible == Visible::Part {
            scale(&mut scores[..queries.len() * BLOCK], factor);
            factor = 1.0;
            self.hide_by_row(batch, queries, keys, scores);
        }
        let lse = &buffers.lse[shape.row_start(batch, head) + queries.start..][..queries.len()];
        weigh_by_row(scores, d_weights, factor, keys.len(), lse, delta, weighed);
    }

    /// Adds the product of dS and the keys of a block to dQ of a block (queries, D).
    fn add_d_queries(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        work: &mut Work,
        d_q: &mut [f32],
    ) {
        let padded = self.shape.padded_dim();
        // Whole panels can be read in place. The rows after the last query have any values.
        let rows = queries.len().next_multiple_of(32);
        let terms = keys.len().next_multiple_of(32);
        let d_scores = Matrix::new(work.weighed.d_scores_by_query, rows, terms, BLOCK, 1);
        work.tiles.multiply(d_scores, (work.k_rows, padded), (d_q, padded), true);
    }
}

/// Working memory.
struct Work<'a> {
    tiles: AmxBlocks<'a>,
    k_columns: &'a mut [f32], // pairs, (D, keys)
    v_columns: &'a mut [f32], // pairs, (D, keys)
    k_rows: &'a mut [f32],    // pairs, (keys, D)
    d_k: &'a mut [f32],       // (D, keys)
    d_v: &'a mut [f32],       // (D, keys)
    turned: &'a mut [f32],    // (keys, D)
    scores: &'a mut [f32],    // (queries, keys)
    d_weights: &'a mut [f32], // (queries, keys)
    weighed: Weighed<'a>,
}

impl<'a> Work<'a> {
    /// Splits scratch memory into room for dQ and the fields.
    fn new(scratch: &'a mut Scratch) -> (&'a mut [f32], Self) {
        let [
            d_q,
            panel,
            k_columns,
            v_columns,
            k_rows,
            d_k,
            d_v,
            turned,
            scores,
            d_weights,
            weights,
            d_scores,
            d_scores_by_query,
        ] = scratch.split([
            D_QUERY_LEN,
            PANEL_LEN,
            VECTOR_PAIRS_LEN,
            VECTOR_PAIRS_LEN,
            VECTOR_PAIRS_LEN,
            VECTORS_LEN,
            VECTORS_LEN,
            VECTORS_LEN,
            SCORES_LEN,
            SCORES_LEN,
            SCORE_PAIRS_LEN,
            SCORE_PAIRS_LEN,
            SCORE_PAIRS_LEN,
        ]);
        let work = Self {
            tiles: AmxBlocks::new(panel),
            k_columns,
            v_columns,
            k_rows,
            d_k,
            d_v,
            turned,
            scores,
            d_weights,
            weighed: Weighed { weights, d_scores, d_scores_by_query: as_bf16(d_scores_by_query) },
        };
        (d_q, work)
    }
}
