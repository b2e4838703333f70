//! Backward pass, deterministic without atomics, in one of two ways that give the same bits:
//!
//! - *One sweep*: a task owns a key head and loops over (block of keys, query head, block of
//!   queries). It keeps dQ of the whole sequence in the thread's scratch memory. Five products per
//!   pair of blocks.
//! - *Two sweeps*: dQ per block of queries, then dK and dV per block of keys. Seven products, since
//!   scores and gradients of weights are recomputed, but any length and many more tasks.
//!
//! In both, each element of dQ is one chain over ascending keys, and each element of dK and dV is
//! one chain over ascending (query head, query).

use super::super::element::Element;
use super::super::gemm::{Bf16Products, BlockA, block_gemm, pack_transposed};
use super::super::scratch::Scratch;
use super::super::shared::SharedMut;
use super::blocks::{load, scale};
use super::mask::Visible;
use super::softmax::{d_scores_by_column, d_scores_by_row};
use super::sweeps::Buffers;
use super::{Attention, BLOCK, D_QUERY_LEN, SCORES_LEN, VECTORS_LEN};

impl Attention<'_> {
    /// Gradient of [`Attention::forward`]: `d_qkv` is overwritten entirely. `out` and `lse` are the
    /// outputs of the forward pass. `delta` (B, Hq, T) is scratch.
    ///
    /// Gradients of a key and value head are summed over the query heads that use it in ascending
    /// order, and within a head over ascending queries.
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
        if self.products == Bf16Products::Amx
            && let (Some(d_out), Some(qkv), Some(out)) =
                (T::as_bf16(d_out), T::as_bf16(qkv), T::as_bf16(out))
            && let Some(d_qkv) = T::as_bf16_mut(d_qkv)
        {
            let d_qkv = SharedMut::new(d_qkv);
            self.amx_backward(&Buffers { d_out, qkv, out, lse, d_qkv }, delta);
        } else {
            let d_qkv = SharedMut::new(d_qkv);
            self.chain_backward(&Buffers { d_out, qkv, out, lse, d_qkv }, delta);
        }
    }

    /// The backward pass with chains of fused multiply-adds.
    fn chain_backward<T: Element>(&self, buffers: &Buffers<T>, delta: &mut [f32]) {
        let (shape, padded) = (self.shape, self.shape.padded_dim());
        let d_query_len = shape.group() * shape.seq * padded;
        if self.takes_one_sweep(d_query_len) {
            self.in_one_sweep(buffers, delta, |(batch, kv_head), delta, scratch| {
                let [d_q, rest @ ..] = KeySweep::split(scratch);
                d_q[..d_query_len].fill(0.0);
                let mut sweep = KeySweep::new(rest);
                for block in 0..shape.blocks() {
                    self.key_block(buffers, (batch, kv_head), block, delta, &mut sweep, Some(d_q));
                }
                for (i, head) in shape.heads_of(kv_head).enumerate() {
                    let d_q = &d_q[i * shape.seq * padded..];
                    self.store_vectors(buffers, (batch, head), 0..shape.seq, d_q, self.scale);
                }
            });
        } else {
            self.in_two_sweeps(
                buffers,
                delta,
                |place, block, delta, scratch| {
                    self.query_block(buffers, place, block, delta, scratch);
                },
                |place, block, delta, scratch| {
                    let [_, rest @ ..] = KeySweep::split(scratch);
                    let mut sweep = KeySweep::new(rest);
                    self.key_block(buffers, place, block, delta, &mut sweep, None);
                },
            );
        }
    }

    /// dQ of one block of queries. Scores are transposed here (key × query), so only q and dO must
    /// be transposed, once per block of queries.
    fn query_block<T: Element>(
        &self,
        buffers: &Buffers<T>,
        (batch, head): (usize, usize),
        block: usize,
        delta: &[f32],
        scratch: &mut Scratch,
    ) {
        let shape = self.shape;
        let (dim, padded, stride) = (shape.head_dim, shape.padded_dim(), shape.token_stride());
        let queries = shape.block(block);
        let columns = queries.len().next_multiple_of(32);
        let (k_head, v_head) = shape.kv_places(head / shape.group());
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
        let q_source = &buffers.qkv[shape.packed_start(batch, queries.start, head)..];
        pack_transposed(q_source, stride, (queries.len(), dim), q, BLOCK);
        scale(&mut q[..dim * BLOCK], self.scale);
        let d_out_source = &buffers.d_out[shape.out_start(batch, queries.start, head)..];
        pack_transposed(d_out_source, shape.out_stride(), (queries.len(), dim), d_out, BLOCK);
        d_q[..queries.len() * padded].fill(0.0);
        let row_start = shape.row_start(batch, head) + queries.start;
        lse_row[..queries.len()].copy_from_slice(&buffers.lse[row_start..][..queries.len()]);
        delta_row[..queries.len()].copy_from_slice(delta);

        for block in 0..shape.blocks() {
            let keys = shape.block(block);
            let visible = self.visible(batch, &queries, &keys);
            if visible == Visible::Nothing {
                continue;
            }
            let k_source = &buffers.qkv[shape.packed_start(batch, keys.start, k_head)..];
            let v_source = &buffers.qkv[shape.packed_start(batch, keys.start, v_head)..];
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
        self.store_vectors(buffers, (batch, head), queries, d_q, self.scale);
    }

    /// dK and dV of one block of keys. If `d_q` (group, T, D) is given, also adds the block's
    /// contribution to dQ. Scores are not transposed here (query × key), so only keys and values
    /// must be transposed, once per block of keys. `delta` is that of the group of query heads.
    fn key_block<T: Element>(
        &self,
        buffers: &Buffers<T>,
        (batch, kv_head): (usize, usize),
        block: usize,
        delta: &[f32],
        sweep: &mut KeySweep,
        mut d_q: Option<&mut [f32]>,
    ) {
        let KeySweep { k_transposed, v_transposed, k, q, d_out, d_k, d_v, scores, d_weights } =
            sweep;
        let shape = self.shape;
        let (dim, padded, stride) = (shape.head_dim, shape.padded_dim(), shape.token_stride());
        let keys = shape.block(block);
        let columns = keys.len().next_multiple_of(32);
        let (k_head, v_head) = shape.kv_places(kv_head);
        let k_source = &buffers.qkv[shape.packed_start(batch, keys.start, k_head)..];
        let v_source = &buffers.qkv[shape.packed_start(batch, keys.start, v_head)..];
        pack_transposed(k_source, stride, (keys.len(), dim), k_transposed, BLOCK);
        pack_transposed(v_source, stride, (keys.len(), dim), v_transposed, BLOCK);
        if d_q.is_some() {
            load(k_source, stride, keys.len(), dim, 1.0, k, padded);
        }
        d_k[..keys.len() * padded].fill(0.0);
        d_v[..keys.len() * padded].fill(0.0);

        for (i, head) in shape.heads_of(kv_head).enumerate() {
            for block in 0..shape.blocks() {
                let queries = shape.block(block);
                let visible = self.visible(batch, &queries, &keys);
                if visible == Visible::Nothing {
                    continue;
                }
                let rows = queries.len();
                let q_source = &buffers.qkv[shape.packed_start(batch, queries.start, head)..];
                load(q_source, stride, rows, dim, self.scale, q, padded);
                let d_out_source = &buffers.d_out[shape.out_start(batch, queries.start, head)..];
                load(d_out_source, shape.out_stride(), rows, dim, 1.0, d_out, padded);
                let by_row = |data, row_stride| BlockA { data, row_stride, k_stride: 1 };
                let size = (rows, columns, dim);
                block_gemm(size, by_row(q, padded), k_transposed, BLOCK, scores, BLOCK, false);
                let d_out_rows = by_row(d_out, padded);
                block_gemm(size, d_out_rows, v_transposed, BLOCK, d_weights, BLOCK, false);
                if visible == Visible::Part {
                    self.hide_by_row(batch, &queries, &keys, scores);
                }
                let lse = &buffers.lse[shape.row_start(batch, head) + queries.start..][..rows];
                let delta = &delta[i * shape.seq + queries.start..][..rows];
                d_scores_by_row(scores, d_weights, columns, lse, delta);
                let by_column = |data| BlockA { data, row_stride: 1, k_stride: BLOCK };
                let size = (keys.len(), padded, rows);
                block_gemm(size, by_column(scores), d_out, padded, d_v, padded, true);
                block_gemm(size, by_column(d_weights), q, padded, d_k, padded, true);
                if let Some(d_q) = d_q.as_deref_mut() {
                    let d_q = &mut d_q[(i * shape.seq + queries.start) * padded..];
                    let d_scores = by_row(d_weights, BLOCK);
                    block_gemm((rows, padded, keys.len()), d_scores, k, padded, d_q, padded, true);
                }
            }
        }
        self.store_vectors(buffers, (batch, k_head), keys.clone(), d_k, 1.0);
        self.store_vectors(buffers, (batch, v_head), keys, d_v, 1.0);
    }
}

/// Working memory of the sweep over blocks of keys.
struct KeySweep<'a> {
    k_transposed: &'a mut [f32], // (D, keys)
    v_transposed: &'a mut [f32], // (D, keys)
    k: &'a mut [f32],            // (keys, D)
    q: &'a mut [f32],            // (queries, D), scaled
    d_out: &'a mut [f32],        // (queries, D)
    d_k: &'a mut [f32],          // (keys, D)
    d_v: &'a mut [f32],          // (keys, D)
    scores: &'a mut [f32],       // (queries, keys)
    d_weights: &'a mut [f32],    // (queries, keys)
}

impl<'a> KeySweep<'a> {
    /// Splits scratch memory into room for dQ of a sequence, then for the fields.
    fn split(scratch: &mut Scratch) -> [&mut [f32]; 10] {
        let mut lens = [VECTORS_LEN; 10];
        lens[0] = D_QUERY_LEN;
        lens[8] = SCORES_LEN;
        lens[9] = SCORES_LEN;
        scratch.split(lens)
    }

    fn new(pieces: [&'a mut [f32]; 9]) -> Self {
        let [k_transposed, v_transposed, k, q, d_out, d_k, d_v, scores, d_weights] = pieces;
        Self { k_transposed, v_transposed, k, q, d_out, d_k, d_v, scores, d_weights }
    }
}
