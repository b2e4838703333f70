//! Forward pass over cached keys and values: one task per (sequence, key head, block of queries).
//!
//! Every query of every head is a separate column, and keys are visited in the same blocks as in
//! the full forward pass, so results have the same bits. The query heads that share a key head are
//! columns of one block, so the keys for a single token are read once.

use std::ops::Range;

use rayon::prelude::*;

use super::super::element::Element;
use super::super::gemm::{BlockA, block_gemm};
use super::super::scratch::Scratch;
use super::super::shared::SharedMut;
use super::blocks::{load, store};
use super::softmax::{scale_rows, softmax_step};
use super::{Attention, BLOCK, SCORES_LEN, SCRATCH, VECTORS_LEN};

/// A checked call.
struct Call<'a, T> {
    qkv: &'a [T],
    positions: &'a [i32],
    /// (B, W, 2·Hkv·D): keys, then values.
    cache: &'a [T],
    window: usize,
    out: SharedMut<'a, T>,
}

impl Attention<'_> {
    /// Copies the keys and values of packed `qkv` (B, T, (Hq + 2·Hkv)·D) to their `positions`
    /// (B, T) in `cache` (B, W, 2·Hkv·D). Writes to `out` (B, T, Hq·D) the attention of each token
    /// to the positions up to its own, as far back as the mask allows.
    ///
    /// # Panics
    /// If a buffer's length does not match the shape, or a position is not below W.
    pub fn cached<T: Element>(&self, qkv: &[T], positions: &[i32], cache: &mut [T], out: &mut [T]) {
        self.check_sizes(qkv, out);
        let shape = self.shape;
        let (keys_first, width) = (shape.out_stride(), 2 * shape.kv_heads * shape.head_dim);
        assert_eq!(positions.len(), shape.batch * shape.seq, "length of positions");
        if qkv.is_empty() {
            return;
        }
        assert!(cache.len().is_multiple_of(shape.batch * width), "length of the cache");
        let window = cache.len() / (shape.batch * width);
        let tokens = qkv.chunks_exact(shape.token_stride()).zip(positions).enumerate();
        for (index, (token, &position)) in tokens {
            let row = usize::try_from(position).ok().filter(|&row| row < window);
            let row = row.unwrap_or_else(|| panic!("{position} is no position of {window}"));
            let start = (index / shape.seq * window + row) * width;
            cache[start..start + width].copy_from_slice(&token[keys_first..]);
        }

        let call = Call { qkv, positions, cache, window, out: SharedMut::new(out) };
        let columns = shape.seq * shape.group();
        let blocks = columns.div_ceil(BLOCK);
        let tasks = shape.batch * shape.kv_heads * blocks;
        (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
            let (head, block) = (task / blocks, task % blocks);
            let (batch, kv_head) = (head / shape.kv_heads, head % shape.kv_heads);
            let columns = block * BLOCK..columns.min((block + 1) * BLOCK);
            SCRATCH.with_borrow_mut(|scratch| {
                self.cached_block(&call, batch, kv_head, columns, scratch);
            });
        });
    }

    fn cached_block<T: Element>(
        &self,
        call: &Call<'_, T>,
        batch: usize,
        kv_head: usize,
        columns: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let shape = self.shape;
        let (dim, padded) = (shape.head_dim, shape.padded_dim());
        let (width, count) = (2 * shape.kv_heads * dim, columns.len());
        let padded_count = count.next_multiple_of(32);
        // A column is a token and one of the query heads that share the key head.
        let token_of = |column: usize| column / shape.group();
        let head_of = |column: usize| kv_head * shape.group() + column % shape.group();
        let seen_of =
            |column: usize| call.positions[batch * shape.seq + token_of(column)] as usize + 1;
        let [q, k, v, sums, scores, maximum, total, rescale] = scratch.split([
            VECTORS_LEN, // (D, columns), scaled
            VECTORS_LEN, // (keys, D)
            VECTORS_LEN, // (keys, D)
            VECTORS_LEN, // (columns, D)
            SCORES_LEN,  // (keys, columns)
            BLOCK,
            BLOCK,
            BLOCK,
        ]);
        for (place, column) in columns.clone().enumerate() {
            let start = shape.packed_start(batch, token_of(column), head_of(column));
            for (row, value) in q.chunks_exact_mut(BLOCK).zip(&call.qkv[start..start + dim]) {
                row[place] = value.to_f32() * self.scale;
            }
        }
        sums[..count * padded].fill(0.0);
        maximum.fill(f32::NEG_INFINITY);
        total.fill(0.0);

        let seen_by_any = columns.clone().map(seen_of).max().unwrap_or(0);
        let first_of = |column: usize| match self.mask.window() {
            Some(window) => seen_of(column).saturating_sub(window),
            None => 0,
        };
        // Only whole blocks before the windows are skipped, so blocks are those of the full forward
        // pass.
        let first_of_any = columns.clone().map(first_of).min().unwrap_or(0) / BLOCK * BLOCK;
        for first in (first_of_any..seen_by_any).step_by(BLOCK) {
            let keys = first..seen_by_any.min(first + BLOCK);
            let row = (batch * call.window + keys.start) * width + kv_head * dim;
            load(&call.cache[row..], width, keys.len(), dim, 1.0, k, padded);
            let row = row + width / 2;
            load(&call.cache[row..], width, keys.len(), dim, 1.0, v, padded);
            let k = BlockA { data: k, row_stride: padded, k_stride: 1 };
            block_gemm((keys.len(), padded_count, dim), k, q, BLOCK, scores, BLOCK, false);
            for (place, column) in columns.clone().enumerate() {
                let before = keys.start..first_of(column).min(keys.end);
                let after = seen_of(column).max(keys.start)..keys.end;
                for hidden in before.chain(after) {
                    scores[(hidden - keys.start) * BLOCK + place] = f32::NEG_INFINITY;
                }
            }
            softmax_step(scores, keys.len(), padded_count, maximum, total, rescale);
            scale_rows(sums, padded, &rescale[..count]);
            let weights = BlockA { data: scores, row_stride: 1, k_stride: BLOCK };
            block_gemm((count, padded, keys.len()), weights, v, padded, sums, padded, true);
        }

        for (place, column) in columns.enumerate() {
            let start = shape.out_start(batch, token_of(column), head_of(column));
            // SAFETY: only this task writes the outputs of its columns.
            let out = unsafe { call.out.piece(start..start + dim) };
            store(&sums[place * padded..][..dim], 1.0 / total[place], out);
        }
    }
}
