//! Forward pass of a block of queries. Scores are transposed (key × query), so keys are read in
//! place, and maxima and sums over keys are plain vector operations over rows.

use super::super::super::gemm::{AmxBlocks, pack_block, pack_transposed};
use super::super::super::scratch::Scratch;
use super::super::blocks::scale;
use super::super::forward::Call;
use super::super::mask::Visible;
use super::super::softmax::scale_columns;
use super::weigh::{Running, weigh_by_column};
use super::{
    Attention, BLOCK, PANEL_LEN, SCORE_PAIRS_LEN, SCORES_LEN, VECTOR_PAIRS_LEN, VECTORS_LEN,
};
use half::bf16;
use std::ops::Range;

impl Attention<'_> {
    pub(in super::super) fn amx_forward_block(
        &self,
        call: &Call<bf16>,
        (batch, head): (usize, usize),
        queries: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let shape = self.shape;
        let (dim, padded) = (shape.head_dim, shape.padded_dim());
        let columns = queries.len().next_multiple_of(32);
        let (k_head, v_head) = shape.kv_places(head / shape.group());
        let [panel, q, scores, weights, sums, turned, maximum, total, rescale] = scratch.split([
            PANEL_LEN,
            VECTOR_PAIRS_LEN, // (D, queries)
            SCORES_LEN,       // (keys, queries)
            SCORE_PAIRS_LEN,  // (keys, queries)
            VECTORS_LEN,      // (D, queries)
            VECTORS_LEN,      // (queries, D)
            BLOCK,
            BLOCK,
            BLOCK,
        ]);
        let mut tiles = AmxBlocks::new(panel);
        pack_block(shape.vectors(call.qkv, batch, &queries, head).transposed(), q);
        sums[..padded * BLOCK].fill(0.0);
        maximum.fill(f32::NEG_INFINITY);
        total.fill(0.0);

        for block in 0..shape.blocks() {
            let keys = shape.block(block);
            let visible = self.visible(batch, &queries, &keys);
            if visible == Visible::Nothing {
                continue;
            }
            let k = shape.vectors(call.qkv, batch, &keys, k_head);
            let v = shape.vectors(call.qkv, batch, &keys, v_head);
            tiles.multiply(k, (q, columns), (scores, BLOCK), false);
            let mut factor = self.scale;
            if visible == Visible::Part {
                scale(&mut scores[..keys.len() * BLOCK], factor);
                factor = 1.0;
                self.hide_by_column(batch, &queries, &keys, scores);
            }
            let state = Running { maximum, total, rescale };
            weigh_by_column(scores, factor, keys.len(), columns, state, weights);
            scale_columns(&mut sums[..dim * BLOCK], rescale);
            tiles.multiply(v.transposed(), (weights, columns), (sums, BLOCK), true);
        }

        pack_transposed(sums, BLOCK, (dim, queries.len()), turned, padded);
        self.store_queries(call, (batch, head), queries, turned, (maximum, total));
    }
}
