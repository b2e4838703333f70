//! Random numbers that a seed replays (SplitMix64).

/// Extents that are small, and those that fill no tile.
const EXTENTS: [usize; 12] = [1, 2, 3, 5, 7, 13, 17, 33, 65, 129, 257, 600];

pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        let mut rng = Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66_D1CE_4E5B);
        rng.bits();
        rng
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// In [0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.uniform()).cos()
    }

    pub(crate) fn extent(&mut self, max: usize) -> usize {
        let fitting = EXTENTS.iter().filter(|&&extent| extent <= max).count();
        EXTENTS[self.below(fitting)]
    }

    /// Any number of rows up to about `rows`, under none to two axes, of width `width`.
    pub(crate) fn row_shape(&mut self, rows: usize, width: usize) -> Vec<usize> {
        match self.below(5) {
            0 => vec![width],
            1 | 2 => vec![self.extent(rows), width],
            _ => {
                let outer = self.extent(3);
                vec![outer, self.extent((rows / outer).max(1)), width]
            }
        }
    }
}
