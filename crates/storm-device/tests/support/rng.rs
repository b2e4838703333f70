//! Random numbers that a seed replays.

use std::ops::{Deref, DerefMut};
use storm_graph::random::Random;

/// Extents that are small, and those that fill no tile.
const EXTENTS: [usize; 12] = [1, 2, 3, 5, 7, 13, 17, 33, 65, 129, 257, 600];

/// The generator, with what these tests draw from it.
pub(crate) struct Rng(Random);

impl Deref for Rng {
    type Target = Random;

    fn deref(&self) -> &Random {
        &self.0
    }
}

impl DerefMut for Rng {
    fn deref_mut(&mut self) -> &mut Random {
        &mut self.0
    }
}

impl Rng {
    /// Neighbouring seeds begin far apart.
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(Random(Random(seed).bits()))
    }

    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.unit()).cos()
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
