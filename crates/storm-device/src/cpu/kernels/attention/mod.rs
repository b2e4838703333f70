//! Attention in blocks, forward and backward. No tensor of T × T exists at any time.
//!
//! Queries, keys and values are packed per token, `(B, T, (Hq + 2·Hkv)·D)`: first Hq query heads,
//! then Hkv key heads, then Hkv value heads. Query head h uses key and value head `h / (Hq / Hkv)`.
//!
//! The scale is applied to the queries. Keys are visited in ascending blocks of 64. Within a block
//! every product is one chain of fused multiply-adds. The block sizes are part of the semantics:
//! they fix the order of all additions, for any number of threads.
//!
//! Products of bf16 tensors may have the sums of AMX instead (`amx/`).

mod amx;
mod backward;
mod blocks;
mod cached;
mod forward;
mod mask;
mod softmax;
mod sweeps;

use std::cell::RefCell;
use std::ops::Range;

use super::element::Element;
use super::gemm::Bf16Products;
use super::scratch::Scratch;
use storm_graph::Mask;

/// Maximum size of a head. It bounds the working memory of a thread.
pub const HEAD_DIM_MAX: usize = 256;

/// Number of queries, or of keys, in a block. Also the stride of the rows of a block of scores.
const BLOCK: usize = 64;

/// Elements of the largest block of vectors (64 × 256), or its transpose.
const VECTORS_LEN: usize = BLOCK * HEAD_DIM_MAX;
/// Elements of a block of scores.
const SCORES_LEN: usize = BLOCK * BLOCK;

/// Elements of dQ that a thread has room for (1 MiB). A larger dQ takes two sweeps.
const D_QUERY_LEN: usize = 1 << 18;

/// Elements of a thread's blocks. The backward pass needs the most: dQ, seven blocks of vectors and
/// two of scores.
pub(in crate::cpu) const SCRATCH_LEN: usize = D_QUERY_LEN + 7 * VECTORS_LEN + 2 * SCORES_LEN;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new(SCRATCH_LEN));
}

/// Creates the calling thread's blocks.
pub(super) fn touch_scratch() {
    SCRATCH.with_borrow_mut(Scratch::touch);
}

/// Sizes of an attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// B: independent sequences.
    pub batch: usize,
    /// T: tokens per sequence.
    pub seq: usize,
    /// Hq: query heads.
    pub q_heads: usize,
    /// Hkv: key and value heads; divides Hq.
    pub kv_heads: usize,
    /// D: size of a head, up to [`HEAD_DIM_MAX`].
    pub head_dim: usize,
}

/// An attention op, ready to run on buffers.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Sizes.
    pub shape: AttentionShape,
    /// The keys that a query sees, by position.
    pub mask: Mask,
    /// Factor of the scores, usually 1/√D.
    pub scale: f32,
    /// (B, T): a query sees only keys with its own segment number.
    pub segments: Option<&'a [i32]>,
    /// How products of bf16 tensors are summed. [`Attention::cached`] always sums as with `Fma`.
    pub products: Bf16Products,
}

impl AttentionShape {
    /// Query heads per key head.
    fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// The query heads that use a key head.
    fn heads_of(&self, kv_head: usize) -> Range<usize> {
        kv_head * self.group()..(kv_head + 1) * self.group()
    }

    /// Positions of a key head and its value head among the packed heads.
    fn kv_places(&self, kv_head: usize) -> (usize, usize) {
        (self.q_heads + kv_head, self.q_heads + self.kv_heads + kv_head)
    }

    /// Elements of a token in the packed buffer.
    fn token_stride(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Elements of a token in the output.
    fn out_stride(&self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Columns of a block of vectors: D, rounded up to a multiple of the kernel width.
    fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(32)
    }

    /// Blocks per sequence.
    fn blocks(&self) -> usize {
        self.seq.div_ceil(BLOCK)
    }

    /// Tokens of a block.
    fn block(&self, index: usize) -> Range<usize> {
        index * BLOCK..self.seq.min((index + 1) * BLOCK)
    }

    /// Where a head of a token starts in the packed buffer. Query heads are first, then key heads,
    /// then value heads.
    fn packed_start(&self, batch: usize, token: usize, head: usize) -> usize {
        (batch * self.seq + token) * self.token_stride() + head * self.head_dim
    }

    /// Where a query head of a token starts in the output.
    fn out_start(&self, batch: usize, token: usize, head: usize) -> usize {
        (batch * self.seq + token) * self.out_stride() + head * self.head_dim
    }

    /// Where a query head's values per token (B, Hq, T) start.
    fn row_start(&self, batch: usize, head: usize) -> usize {
        (batch * self.q_heads + head) * self.seq
    }
}

impl Attention<'_> {
    /// Panics unless the sizes are valid and the buffers have matching lengths.
    fn check<T: Element>(&self, qkv: &[T], out: &[T], lse: &[f32]) {
        self.check_sizes(qkv, out);
        let AttentionShape { batch, seq, q_heads, .. } = self.shape;
        assert_eq!(lse.len(), batch * q_heads * seq, "length of lse");
        if let Some(segments) = self.segments {
            assert_eq!(segments.len(), batch * seq, "length of segments");
        }
    }

    /// The part of [`Attention::check`] that also applies to cached attention.
    fn check_sizes<T: Element>(&self, qkv: &[T], out: &[T]) {
        let AttentionShape { batch, seq, q_heads, kv_heads, head_dim } = self.shape;
        assert!(kv_heads > 0 && q_heads.is_multiple_of(kv_heads), "heads do not group");
        assert!((1..=HEAD_DIM_MAX).contains(&head_dim), "head size {head_dim} is not supported");
        // Checked: a product that wrapped around could pass, and the kernels rely on these lengths.
        let product = |sizes: &[usize]| {
            sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size))
        };
        let heads = q_heads.saturating_add(kv_heads.saturating_mul(2));
        assert_eq!(Some(qkv.len()), product(&[batch, seq, heads, head_dim]), "length of qkv");
        assert_eq!(out.len(), batch * seq * self.shape.out_stride(), "length of out");
    }
}
