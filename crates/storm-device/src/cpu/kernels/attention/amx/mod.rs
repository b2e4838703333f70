//! Attention of bf16 tensors whose products have the sums of AMX (`gemm/amx/`).
//!
//! **Definition.** A product sums 32 terms at a time, as one `TDPBF16PS` does, and adds these sums
//! in order. Its operands are bf16, and denormal numbers count as zeros. The head size is padded
//! with zeros to a multiple of 32. Queries and keys are in blocks of 64, counted from the start of
//! the sequence; the last block is padded with zeros. Blocks without a visible score are left out.
//! Everything between products is f32:
//!
//! - A score is the product of q and k, rounded to f32, times the scale. Hidden scores are −∞.
//! - Forward, keys are visited in ascending blocks. The weights of a block are
//!   exp(score − maximum), with the maximum so far. Their sum is one chain over ascending keys for
//!   each block, added to the rescaled sum so far. For the product with v they are rounded to bf16,
//!   and are added to the rescaled vector so far.
//! - Backward, the weights are P = exp(score − lse), and dS = P (dP − delta), where dP is the
//!   product of dO and v. Both are rounded to bf16 for the products that follow: dV sums P · dO,
//!   and dK sums dS · q, over ascending (query head, query); dQ sums dS · k over ascending keys.
//!   dK and dQ are multiplied by the scale at the end.
//!
//! Neither the order of rows and columns within a block nor the number of threads affects a result.
//! A product of transposed operands has the same sums, so each pass has the orientation that moves
//! the least data.

mod backward;
mod forward;
mod weigh;

use super::super::gemm::Matrix;
use super::{Attention, AttentionShape, BLOCK, HEAD_DIM_MAX, SCORES_LEN, VECTORS_LEN};
use half::bf16;
use std::ops::Range;

/// Elements of scratch memory for a panel of the left operand.
const PANEL_LEN: usize = super::super::gemm::AmxBlocks::panel_len(HEAD_DIM_MAX);

/// Elements of scratch memory for a block of vectors, or of scores, as pairs of bf16.
const VECTOR_PAIRS_LEN: usize = VECTORS_LEN / 2;
const SCORE_PAIRS_LEN: usize = SCORES_LEN / 2;

impl AttentionShape {
    /// Consecutive vectors of a head in the packed buffer, (tokens, D).
    fn vectors<'a>(
        &self,
        qkv: &'a [bf16],
        batch: usize,
        tokens: &Range<usize>,
        head: usize,
    ) -> Matrix<'a, bf16> {
        let first = &qkv[self.packed_start(batch, tokens.start, head)..];
        Matrix::new(first, tokens.len(), self.head_dim, self.token_stride(), 1)
    }

    /// Consecutive vectors of a head in the output or its gradient, (tokens, D).
    fn out_vectors<'a>(
        &self,
        out: &'a [bf16],
        batch: usize,
        tokens: &Range<usize>,
        head: usize,
    ) -> Matrix<'a, bf16> {
        let first = &out[self.out_start(batch, tokens.start, head)..];
        Matrix::new(first, tokens.len(), self.head_dim, self.out_stride(), 1)
    }
}
