//! Random bits for weights and rounding, and random sequences.
//!
//! The bits for weights and rounding are a pure, stateless function of (seed, step, tensor,
//! element). They do not depend on launch geometry, thread count, call order or plan. The function
//! is Philox 4x32 with ten rounds (Salmon et al., 2011). [`Random`] is for everything that is drawn
//! sequentially.

mod sequence;

pub use sequence::Random;

use half::bf16;

/// Words of the device tensor with seed and step: low seed, high seed, step.
pub const SEED_WORDS: usize = 3;

/// The purpose of the bits. It separates initialization from the updates of step 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Initial weights.
    Initialization,
    /// Stochastic rounding of an update.
    Rounding,
    /// Dropout masks.
    Dropout,
    /// Image augmentation.
    Augmentation,
    /// Predicted weights: their rounding, and random directions.
    Prediction,
    /// Samples of categorical distributions.
    Sampling,
}

/// The tensor that the bits are for: a parameter's number in its program, and its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    /// The parameter's number in its program.
    pub tensor: u16,
    /// Layer, for a parameter of a repeated layer. 0 otherwise.
    pub layer: u16,
}

/// Seed and step, as set by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seed {
    /// Seed of the run.
    pub seed: u64,
    /// Step of the update.
    pub step: u32,
}

impl Seed {
    /// Encodes it as the device tensor.
    pub fn to_words(self) -> [i32; SEED_WORDS] {
        [self.seed as u32 as i32, (self.seed >> 32) as u32 as i32, self.step as i32]
    }

    /// Decodes the device tensor.
    pub fn from_words(words: [i32; SEED_WORDS]) -> Seed {
        let seed = u64::from(words[0] as u32) | u64::from(words[1] as u32) << 32;
        Seed { seed, step: words[2] as u32 }
    }
}

/// Words of the device tensor that controls dropout: those of the seed, the micro-batch, and
/// whether dropout is enabled.
pub const DROPOUT_WORDS: usize = SEED_WORDS + 2;

/// What determines the dropout of a micro-batch, as set by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DropoutWords {
    /// The seed. Its step is that of the update for which gradients are computed.
    pub seed: Seed,
    /// Position in the step. Elements are numbered across all micro-batches of a step, so no two
    /// micro-batches share a mask, and splitting a step differently does not change it.
    pub micro_batch: u32,
    /// Whether dropout is enabled. An evaluation runs the same program without dropout.
    pub drops: bool,
}

impl DropoutWords {
    /// Encodes it as the device tensor.
    pub fn to_words(self) -> [i32; DROPOUT_WORDS] {
        let [low, high, step] = self.seed.to_words();
        [low, high, step, self.micro_batch as i32, i32::from(self.drops)]
    }

    /// Decodes the device tensor.
    pub fn from_words(words: [i32; DROPOUT_WORDS]) -> DropoutWords {
        let [low, high, step, micro_batch, drops] = words;
        let seed = Seed::from_words([low, high, step]);
        DropoutWords { seed, micro_batch: micro_batch as u32, drops: drops != 0 }
    }
}

/// Words of the device tensor with the phase: whether it is a training step, low seed, high seed.
pub const PHASE_WORDS: usize = 3;

/// The phase, as set by the host, for ops that differ between training and evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PhaseWords {
    /// Whether it is the forward pass of a training step, or its recomputation.
    pub training: bool,
    /// Seed of the run.
    pub seed: u64,
}

impl PhaseWords {
    /// Encodes it as the device tensor.
    pub fn to_words(self) -> [i32; PHASE_WORDS] {
        [i32::from(self.training), self.seed as u32 as i32, (self.seed >> 32) as u32 as i32]
    }

    /// Decodes the device tensor.
    pub fn from_words([training, low, high]: [i32; PHASE_WORDS]) -> PhaseWords {
        let seed = u64::from(low as u32) | u64::from(high as u32) << 32;
        PhaseWords { training: training != 0, seed }
    }
}

/// An element is dropped if its random word is below this threshold.
pub fn drop_threshold(rate: f32) -> u32 {
    (f64::from(rate) * 4_294_967_296.0) as u32
}

/// A uniform number in [0, 1) from a word, with 24 bits.
#[inline]
pub fn unit_interval(word: u32) -> f32 {
    (word >> 8) as f32 / (1 << 24) as f32
}

/// Four independent words for the elements `4·block .. 4·block + 4` of a tensor.
#[inline]
pub fn words(seed: Seed, purpose: Purpose, stream: Stream, block: u64) -> [u32; 4] {
    philox(counter(seed, stream, block), key(seed, purpose))
}

/// [`words`] of `N` consecutive blocks, as `[word][block]`: the same words in a form that compilers
/// can vectorize.
// The index is that of a block in each of four arrays.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
pub fn words_of_blocks<const N: usize>(
    seed: Seed,
    purpose: Purpose,
    stream: Stream,
    first_block: u64,
) -> [[u32; N]; 4] {
    let mut counters = [[0; N]; 4];
    for at in 0..N {
        let counter = counter(seed, stream, first_block.wrapping_add(at as u64));
        (0..4).for_each(|word| counters[word][at] = counter[word]);
    }
    let mut key = key(seed, purpose);
    for _ in 0..ROUNDS {
        for at in 0..N {
            let before = [0, 1, 2, 3].map(|word| counters[word][at]);
            let after = philox_round(before, key);
            (0..4).for_each(|word| counters[word][at] = after[word]);
        }
        key = next_key(key);
    }
    counters
}

#[inline(always)]
fn key(seed: Seed, purpose: Purpose) -> [u32; 2] {
    let tag = match purpose {
        Purpose::Initialization => 0,
        Purpose::Rounding => 0x5bd1_e995,
        Purpose::Dropout => 0x27d4_eb2f,
        Purpose::Augmentation => 0x1656_67b1,
        Purpose::Prediction => 0x3c6e_f372,
        Purpose::Sampling => 0x2545_f491,
    };
    [seed.seed as u32, (seed.seed >> 32) as u32 ^ tag]
}

#[inline(always)]
fn counter(seed: Seed, stream: Stream, block: u64) -> [u32; 4] {
    let tensor = u32::from(stream.tensor) << 16 | u32::from(stream.layer);
    [block as u32, (block >> 32) as u32, tensor, seed.step]
}

/// Stochastic rounding to one of the two neighbors, so that the mean over all `bits` is the value:
/// adds the bits below the last place that is kept, and truncates. Values that bf16 can represent
/// and values that are not finite stay unchanged.
#[inline(always)]
pub fn round_to_bf16(value: f32, bits: u16) -> bf16 {
    // Branch-free, so that loops can be vectorized. A NaN becomes quiet, as in every conversion.
    const QUIET: u32 = 0x0040_0000;
    let word = value.to_bits();
    let kept = if value.is_nan() { word | QUIET } else { word };
    let rounded = if value.is_finite() { word.wrapping_add(u32::from(bits)) } else { kept };
    bf16::from_bits((rounded >> 16) as u16)
}

const ROUNDS: usize = 10;

#[inline]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        counter = philox_round(counter, key);
        key = next_key(key);
    }
    counter
}

#[inline(always)]
fn philox_round(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let a = u64::from(counter[0]) * 0xD251_1F53;
    let b = u64::from(counter[2]) * 0xCD9E_8D57;
    [
        (b >> 32) as u32 ^ counter[1] ^ key[0],
        b as u32,
        (a >> 32) as u32 ^ counter[3] ^ key[1],
        a as u32,
    ]
}

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_together_have_the_words_of_each() {
        let stream = Stream { tensor: 7, layer: 3 };
        // Across the wraparound of the low word, and of the block number.
        for first in [0, 41, u64::from(u32::MAX) - 2, u64::MAX - 3] {
            let seed = Seed { seed: 0x1234_5678_9abc_def0, step: 5 };
            let together = words_of_blocks::<8>(seed, Purpose::Rounding, stream, first);
            for (at, block) in (0..8).map(|at| (at, first.wrapping_add(at as u64))) {
                let alone = words(seed, Purpose::Rounding, stream, block);
                assert_eq!(together.map(|of_blocks| of_blocks[at]), alone, "{block}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_converted_and_not_rounded() {
        for word in [0x7f80_0000, 0xff80_0000, 0x7f80_0001, 0xffc0_1234, 0x7fff_ffff] {
            let value = f32::from_bits(word);
            for bits in [0, 1, u16::MAX] {
                let expected = bf16::from_f32(value).to_bits();
                assert_eq!(round_to_bf16(value, bits).to_bits(), expected, "{word:x}");
            }
        }
    }

    /// Known answers of the reference implementation (Random123, `kat_vectors`).
    #[test]
    fn philox_matches_the_published_vectors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_argument_changes_the_bits() {
        let seed = Seed { seed: 7, step: 3 };
        let stream = Stream { tensor: 2, layer: 5 };
        let base = words(seed, Purpose::Rounding, stream, 11);
        for other in [
            words(Seed { seed: 8, ..seed }, Purpose::Rounding, stream, 11),
            words(Seed { seed: 7 << 32, ..seed }, Purpose::Rounding, stream, 11),
            words(Seed { step: 4, ..seed }, Purpose::Rounding, stream, 11),
            words(seed, Purpose::Initialization, stream, 11),
            words(seed, Purpose::Dropout, stream, 11),
            words(seed, Purpose::Augmentation, stream, 11),
            words(seed, Purpose::Prediction, stream, 11),
            words(seed, Purpose::Sampling, stream, 11),
            words(seed, Purpose::Rounding, Stream { tensor: 3, ..stream }, 11),
            words(seed, Purpose::Rounding, Stream { layer: 6, ..stream }, 11),
            words(seed, Purpose::Rounding, stream, 12),
            words(seed, Purpose::Rounding, stream, 11 | 1 << 32),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn words_round_trip() {
        let seed = Seed { seed: 0xfedc_ba98_7654_3210, step: u32::MAX };
        assert_eq!(Seed::from_words(seed.to_words()), seed);
        for (micro_batch, drops) in [(0, true), (u32::MAX, false)] {
            let words = DropoutWords { seed, micro_batch, drops };
            assert_eq!(DropoutWords::from_words(words.to_words()), words);
            let words = PhaseWords { training: drops, seed: seed.seed };
            assert_eq!(PhaseWords::from_words(words.to_words()), words);
        }
    }
}
