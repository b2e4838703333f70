/// A reproducible random sequence: SplitMix64 (Steele et al., 2014).
///
/// The generator for tests, for sampling text and for random decisions. Weights and rounding use
/// [`words`](super::words) instead, which do not depend on any order.
///
/// ```
/// use storm_graph::random::Random;
///
/// let mut random = Random(7);
/// let die = 1 + random.below(6);
/// let color = random.pick(&["red", "green"]);
/// assert_eq!((die, color), {
///     let mut same = Random(7);
///     (1 + same.below(6), same.pick(&["red", "green"]))
/// });
/// ```
#[derive(Clone, Debug)]
pub struct Random(
    /// The seed, which may be any number.
    pub u64,
);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to less than `limit`, which must not be 0. Slightly biased toward low
    /// numbers if `limit` is huge.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// A number from 0 to less than 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with probability 1/2.
    pub fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    /// True with a probability of `percent` percent.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of the choices, of which there must be at least one.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the reference implementation (`splitmix64.c`).
    #[test]
    fn matches_the_published_sequence() {
        let mut random = Random(1_234_567);
        let bits: Vec<u64> = (0..5).map(|_| random.bits()).collect();
        assert_eq!(
            bits,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821
            ]
        );
    }

    #[test]
    fn draws_stay_within_their_limits() {
        let mut random = Random(3);
        for _ in 0..1000 {
            assert!(random.below(7) < 7);
            assert!((0.0..1.0).contains(&random.unit()));
            assert!([2, 4].contains(&random.pick(&[2, 4])));
            assert!(random.chance(100) && !random.chance(0));
        }
        let heads = (0..1000).filter(|_| random.coin()).count();
        assert!((400..600).contains(&heads), "{heads}");
    }
}
