//! BLAKE3 hash of a file whose parts several processes have: each hashes its blocks, and one combines the results.

use blake3::Hash;
use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};

/// Bytes of a block. A power of two of BLAKE3 chunks, so that a block is a subtree, and a multiple of every page size,
/// so that no two processes write to the same page.
pub(crate) const BLOCK_BYTES: u64 = 64 << 10;

/// The number of blocks in a file of this size. The last one may be shorter.
pub(crate) fn block_count(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_BYTES)
}

/// The chaining value of the block at offset `first`.
pub(crate) fn hash_block(first: u64, block: &[u8]) -> ChainingValue {
    blake3::Hasher::new().set_input_offset(first).update(block).finalize_non_root()
}

/// The hash of a file with several blocks.
///
/// # Panics
/// There is only one block, or the number of blocks does not match the size.
pub(crate) fn combine(blocks: &[ChainingValue], bytes: u64) -> Hash {
    assert_eq!(blocks.len() as u64, block_count(bytes));
    let (left, right) = halves(blocks, bytes);
    merge_subtrees_root(&left, &right, Mode::Hash)
}

fn subtree(blocks: &[ChainingValue], bytes: u64) -> ChainingValue {
    match blocks {
        [only] => *only,
        _ => {
            let (left, right) = halves(blocks, bytes);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    }
}

fn halves(blocks: &[ChainingValue], bytes: u64) -> (ChainingValue, ChainingValue) {
    let left_bytes = left_subtree_len(bytes);
    let (left, right) = blocks.split_at((left_bytes / BLOCK_BYTES) as usize);
    (subtree(left, left_bytes), subtree(right, bytes - left_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::random::Random;

    #[test]
    fn blocks_combine_to_the_hash_of_the_whole() {
        let mut random = Random(7);
        let block = BLOCK_BYTES as usize;
        let more = (0..12).map(|_| block + 1 + random.below(40 * block));
        let edges = [block + 1, 2 * block - 1, 2 * block, 3 * block, 8 * block, 9 * block + 1023];
        for length in edges.into_iter().chain(more.collect::<Vec<_>>()) {
            let bytes: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
            let blocks: Vec<ChainingValue> = (0..)
                .step_by(block)
                .zip(bytes.chunks(block))
                .map(|(first, bytes)| hash_block(first, bytes))
                .collect();
            assert_eq!(combine(&blocks, length as u64), blake3::hash(&bytes), "{length}");
        }
    }
}
