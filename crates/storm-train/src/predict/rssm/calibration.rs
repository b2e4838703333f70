//! Compares the expected outcomes of jumps with the observed ones.

/// Bins of the predicted probability.
pub(super) const BINS: usize = 5;

/// Numbers in its serialized form.
pub(super) const NUMBERS: usize = 3 * BINS + 4;

/// Sums over all jumps made.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Calibration {
    /// Per bin of the predicted probability: jumps, accepted jumps, and the sum of the
    /// probabilities.
    bins: [[f64; 3]; BINS],
    /// Sum of (probability − outcome)².
    squares: f64,
    jumps: f64,
    /// Sums of the change of the log loss.
    expected: f64,
    observed: f64,
}

impl Calibration {
    pub(crate) fn new() -> Calibration {
        let zero = 0.0;
        Calibration {
            bins: [[0.0; 3]; BINS],
            squares: zero,
            jumps: zero,
            expected: zero,
            observed: zero,
        }
    }

    fn bin(acceptance: f32) -> usize {
        ((acceptance * BINS as f32) as usize).min(BINS - 1)
    }

    pub(crate) fn add(&mut self, acceptance: f32, accepted: bool, expected: f64, observed: f64) {
        let outcome = if accepted { 1.0 } else { 0.0 };
        let bin = &mut self.bins[Calibration::bin(acceptance)];
        bin[0] += 1.0;
        bin[1] += outcome;
        bin[2] += f64::from(acceptance);
        self.squares += (f64::from(acceptance) - outcome).powi(2);
        self.jumps += 1.0;
        self.expected += expected;
        self.observed += observed;
    }

    /// The acceptance rate of jumps with about this probability, with Laplace smoothing.
    pub(super) fn observed_acceptance(&self, acceptance: f32) -> f64 {
        let [jumps, accepted, _] = self.bins[Calibration::bin(acceptance)];
        (accepted + 1.0) / (jumps + 2.0)
    }

    /// Brier score, the mean of (probability − outcome)²: 0 is best, 0.25 is a coin flip. `None`
    /// before the first jump.
    pub(crate) fn brier(&self) -> Option<f64> {
        (self.jumps > 0.0).then(|| self.squares / self.jumps)
    }

    /// Per nonempty bin: jumps, mean probability, and the fraction accepted.
    pub(crate) fn reliability(&self) -> Vec<(u64, f64, f64)> {
        let filled = self.bins.iter().filter(|bin| bin[0] > 0.0);
        filled
            .map(|&[jumps, accepted, sum]| (jumps as u64, sum / jumps, accepted / jumps))
            .collect()
    }

    /// Mean change of the log loss, expected and observed.
    pub(crate) fn changes(&self) -> Option<(f64, f64)> {
        (self.jumps > 0.0).then(|| (self.expected / self.jumps, self.observed / self.jumps))
    }

    pub(super) fn to_numbers(&self) -> Vec<f64> {
        let mut numbers: Vec<f64> = self.bins.iter().flatten().copied().collect();
        numbers.extend([self.squares, self.jumps, self.expected, self.observed]);
        numbers
    }

    pub(super) fn from_numbers(numbers: &[f64]) -> Calibration {
        let mut found = Calibration::new();
        for (bin, of_bin) in found.bins.iter_mut().zip(numbers.chunks_exact(3)) {
            bin.copy_from_slice(of_bin);
        }
        let rest = &numbers[3 * BINS..];
        [found.squares, found.jumps, found.expected, found.observed] =
            [rest[0], rest[1], rest[2], rest[3]];
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_jumps() {
        let mut found = Calibration::new();
        assert_eq!((found.brier(), found.changes()), (None, None));
        assert_eq!(found.observed_acceptance(0.9), 0.5, "nothing is known");
        found.add(0.9, true, -0.02, -0.01);
        found.add(0.9, false, -0.04, 0.03);
        found.add(0.1, false, 0.0, 0.02);
        assert!((found.brier().expect("jumps") - (0.01 + 0.81 + 0.01) / 3.0).abs() < 1e-6);
        assert_eq!(found.observed_acceptance(0.85), 0.5);
        assert_eq!(found.observed_acceptance(0.15), 1.0 / 3.0);
        let reliability = found.reliability();
        assert_eq!(reliability.len(), 2);
        assert_eq!((reliability[0].0, reliability[0].2), (1, 0.0));
        assert_eq!((reliability[1].0, reliability[1].2), (2, 0.5));
        let (expected, observed) = found.changes().expect("jumps");
        assert!((expected + 0.02).abs() < 1e-12 && (observed - 0.04 / 3.0).abs() < 1e-12);
        assert_eq!(Calibration::from_numbers(&found.to_numbers()), found);
        assert_eq!(found.to_numbers().len(), NUMBERS);
    }
}
