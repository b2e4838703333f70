//! Memory in which the gradient of attention adds up the gradient of queries.

use crate::{DType, HeadLayout, Mask};

/// f32 sums for the gradient of queries, as a GPU kernel uses them in which several blocks of keys
/// add to the same queries, one after another.
///
/// A key head with the query heads that share it has one *item* for every two blocks of keys. A GPU
/// works on a limited number of items at a time, so the sums of few key heads are needed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSums {
    /// Items of a key head. All of them must run at the same time.
    pub items: usize,
    /// Key heads that have sums at the same time.
    pub ring: usize,
    /// Counters: one for items, and one for each tile of queries of the ring.
    pub counters: usize,
    /// Elements of the sums.
    pub sums: usize,
}

impl AttentionSums {
    /// Keys in a block.
    const KEYS: usize = 128;
    /// Elements of the sums of a tile of queries: 64 queries of heads of 128, or 128 of heads of 64.
    const TILE: usize = 8192;
    /// Items that are processed at the same time. An H100 or H200 has as many multiprocessors.
    const AT_ONCE: usize = 132;

    /// The sums for `batch` sequences of `seq` tokens. `None` if nothing is gained by them, or if
    /// there is no such kernel.
    pub fn of(
        dtype: DType,
        batch: usize,
        seq: usize,
        heads: &HeadLayout,
        mask: Mask,
        segments: bool,
    ) -> Option<AttentionSums> {
        // A window that covers the sequence hides nothing.
        let causal = mask.is_causal() && mask.window().is_none_or(|window| window >= seq);
        let supported = dtype == DType::BF16 && matches!(heads.head_dim, 64 | 128);
        if !supported || !causal || segments || seq == 0 {
            return None;
        }
        let blocks = seq.div_ceil(Self::KEYS);
        let items = blocks - blocks / 2;
        let key_heads = batch * heads.key_value_heads;
        let shared_by = heads.query_heads / heads.key_value_heads;
        if items > Self::AT_ONCE || !Self::gain(key_heads, shared_by, blocks) {
            return None;
        }
        let ring = key_heads.min(Self::AT_ONCE.div_ceil(items) + 1);
        let tiles = ring * shared_by * seq.div_ceil(Self::TILE / heads.head_dim);
        Some(AttentionSums { items, ring, counters: 1 + tiles, sums: tiles * Self::TILE })
    }

    /// Whether five products of blocks, in equal items, are faster than seven in two kernels. There,
    /// all work is divided evenly, but no block of keys is divided.
    fn gain(key_heads: usize, shared_by: usize, blocks: usize) -> bool {
        // Of an item: loading keys, storing results, and waiting for the first turns.
        const OVERHEAD: usize = 4;
        let items = blocks - blocks / 2;
        // Items of a key head wait for each other, so a key head advances only if all of its items run.
        let rounds = key_heads.div_ceil(Self::AT_ONCE / items);
        let one = 5 * rounds * (shared_by * (blocks + 1) + OVERHEAD);
        let all = key_heads * shared_by * blocks * (blocks + 1) / 2;
        let two = 7 * all.div_ceil(Self::AT_ONCE).max(shared_by * blocks);
        one < two
    }

    /// Elements of the memory: counters, 64 at a time, and sums behind them.
    pub fn elements(&self) -> usize {
        self.sums_at() + self.sums
    }

    /// The first element of the sums.
    pub fn sums_at(&self) -> usize {
        self.counters.next_multiple_of(64)
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionSums;
    use crate::{DType, HeadLayout, Mask};

    fn heads(query_heads: usize, key_value_heads: usize, head_dim: usize) -> HeadLayout {
        HeadLayout { query_heads, key_value_heads, head_dim }
    }

    #[test]
    fn sums_are_as_large_as_what_runs_at_once() {
        let of = |batch, seq, heads: HeadLayout| {
            AttentionSums::of(DType::BF16, batch, seq, &heads, Mask::Causal, false)
        };
        // Qwen2.5 1.5B, 16 × 1024: 4 items of a key head, so 33 key heads at once, but there are 32.
        let sums = of(16, 1024, heads(12, 2, 128)).unwrap();
        assert_eq!((sums.items, sums.ring), (4, 32));
        assert_eq!(sums.sums, 16 * 12 * 1024 * 128);
        assert_eq!(sums.counters, 1 + 16 * 12 * 16);
        // 64 key heads of 4096 tokens: 16 items each, so 9 at once and one that begins.
        let sums = of(4, 4096, heads(16, 16, 128)).unwrap();
        assert_eq!((sums.items, sums.ring, sums.sums), (16, 10, 10 * 4096 * 128));
        assert_eq!((sums.sums_at(), sums.elements()), (704, 704 + sums.sums));
        // A tile of heads of 64 has 128 queries; the last one counts whole.
        let sums = of(1, 2000, heads(8, 1, 64)).unwrap();
        assert_eq!((sums.ring, sums.counters, sums.sums), (1, 1 + 8 * 16, 8 * 2048 * 64));
    }

    #[test]
    fn nothing_is_reserved_where_two_kernels_are_used() {
        let whole = heads(16, 16, 128);
        let of = |dtype, seq, heads: &HeadLayout, mask, segments| {
            AttentionSums::of(dtype, 4, seq, heads, mask, segments)
        };
        assert!(of(DType::BF16, 4096, &whole, Mask::Causal, false).is_some());
        assert!(of(DType::BF16, 4096, &whole, Mask::Sliding { window: 4096 }, false).is_some());
        assert_eq!(of(DType::BF16, 4096, &whole, Mask::Sliding { window: 4095 }, false), None);
        assert_eq!(of(DType::BF16, 4096, &whole, Mask::Full, false), None);
        assert_eq!(of(DType::BF16, 4096, &whole, Mask::Causal, true), None);
        assert_eq!(of(DType::F32, 4096, &whole, Mask::Causal, false), None);
        assert_eq!(of(DType::BF16, 4096, &heads(16, 16, 96), Mask::Causal, false), None);
        // More items than run at once.
        assert_eq!(of(DType::BF16, 133 * 256, &whole, Mask::Causal, false), None);
        // Few blocks, and a last round with few items: GPT-2 XL, 8 × 1024.
        assert_eq!(of(DType::BF16, 128, &whole, Mask::Causal, false), None);
        let xl = heads(25, 25, 64);
        assert_eq!(AttentionSums::of(DType::BF16, 8, 1024, &xl, Mask::Causal, false), None);
        // 72 items of a key head: a second key head would not run at once. With 128 items, hardly
        // any place is idle.
        let long =
            |seq| AttentionSums::of(DType::BF16, 1, seq, &heads(32, 8, 128), Mask::Causal, false);
        assert_eq!(long(72 * 256), None);
        assert!(long(64 * 256).is_some() && long(128 * 256).is_some());
    }
}
