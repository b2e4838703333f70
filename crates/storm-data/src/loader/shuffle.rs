//! A shuffle in constant memory: a keyed permutation of the numbers below `count`.

use storm_graph::random::Random;

/// Feistel rounds. With an ideal round function, four rounds are indistinguishable from a random
/// permutation. This one is not ideal, so there are more.
const ROUNDS: u64 = 8;

/// The order of one epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shuffle {
    count: u64,
    /// Bits in each half.
    half_bits: u32,
    key: u64,
}

impl Shuffle {
    pub(crate) fn new(count: u64, seed: u64, epoch: u64) -> Shuffle {
        // Bits of each half, so that both together cover at least `count` numbers, and fewer than
        // four times that.
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(1);
        Shuffle { count, half_bits, key: mix(mix(seed) ^ epoch.wrapping_mul(GOLDEN)) }
    }

    /// The number at a position below `count`.
    pub(crate) fn at(&self, place: u64) -> u64 {
        debug_assert!(place < self.count);
        let mut value = place;
        // The network permutes a larger power-of-two range. Iterating until the result is below
        // `count` (cycle walking) gives a permutation of our range, in at most four steps on
        // average.
        loop {
            value = self.permute(value);
            if value < self.count {
                return value;
            }
        }
    }

    /// A balanced Feistel network.
    fn permute(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            let mixed = mix(self.key ^ mix(right ^ round << 40)) & mask;
            (left, right) = (right, left ^ mixed);
        }
        left << self.half_bits | right
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(value: u64) -> u64 {
    Random(value).bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(count: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let shuffle = Shuffle::new(count, seed, epoch);
        (0..count).map(|place| shuffle.at(place)).collect()
    }

    #[test]
    fn is_one_to_one_for_every_small_count() {
        for count in (1..130).chain([255, 256, 257, 1023, 1025, 4096, 5000]) {
            for seed in 0..3 {
                let mut found = order(count, seed, 1);
                found.sort_unstable();
                assert!(found.into_iter().eq(0..count), "{count} {seed}");
            }
        }
    }

    #[test]
    fn stays_in_range_for_large_counts() {
        for count in [1 << 20, (1 << 40) + 12345, (1 << 62) + 1, u64::MAX] {
            let shuffle = Shuffle::new(count, 7, 3);
            let places = [0, 1, 2, count / 2, count - 2, count - 1];
            let mut found = places.map(|place| shuffle.at(place));
            assert!(found.iter().all(|&value| value < count));
            found.sort_unstable();
            assert!(found.windows(2).all(|pair| pair[0] != pair[1]), "{found:?}");
        }
    }

    #[test]
    fn depends_on_seed_and_epoch_alone() {
        let reference = order(1000, 1, 0);
        assert_eq!(order(1000, 1, 0), reference);
        for (seed, epoch) in [(2, 0), (1, 1), (0, 1), (0, 0)] {
            let other = order(1000, seed, epoch);
            let same = other.iter().zip(&reference).filter(|(a, b)| a == b).count();
            assert!(same < 20, "{same} of 1000 in the same place");
        }
    }

    #[test]
    fn every_value_comes_at_every_place() {
        // 64 values in 64 positions over 6400 orders: about 100 each.
        let mut counts = [[0u32; 64]; 64];
        for seed in 0..6400 {
            for (place, value) in order(64, seed, 0).into_iter().enumerate() {
                counts[place][value as usize] += 1;
            }
        }
        let all = counts.iter().flatten();
        assert!(all.clone().all(|&count| (50..=160).contains(&count)), "{:?}", all.min());
    }
}
