//! Tests whether a loss fell by more than its noise, from differences between losses on the same
//! micro-batches.

/// A change of the mean loss, and its uncertainty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    /// Change of the mean over all targets.
    pub(super) mean: f64,
    /// Standard error of that mean, over micro-batches.
    pub(super) error: f64,
}

/// The change between two measurements on the same micro-batches, at least two. A measurement has,
/// per micro-batch, the sum of losses divided by the number of all targets. `shares` are the
/// micro-batches' fractions of all targets.
pub(super) fn change(before: &[f32], after: &[f32], shares: &[f64]) -> Change {
    let differences: Vec<f64> = before
        .iter()
        .zip(after)
        .map(|(&before, &after)| f64::from(after) - f64::from(before))
        .collect();
    let mean: f64 = differences.iter().sum();
    let squares: f64 = differences
        .iter()
        .zip(shares)
        .map(|(difference, share)| (difference - share * mean).powi(2))
        .sum();
    let count = shares.len() as f64;
    Change { mean, error: (count / (count - 1.0) * squares).sqrt() }
}

impl Change {
    /// Whether it fell by more than this many standard errors. False for a non-finite change.
    pub(super) fn falls(&self, errors: f64) -> bool {
        self.mean < -errors * self.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_batches_share_has_no_noise() {
        let shares = [0.25; 4];
        let before = [0.25, 0.5, 0.75, 1.0];
        let after = before.map(|loss| loss - 0.125);
        let found = change(&before, &after, &shares);
        assert_eq!(found, Change { mean: -0.5, error: 0.0 });
        assert!(found.falls(100.0));
        assert!(!change(&before, &before, &shares).falls(0.0), "nothing changed");
        assert!(!change(&after, &before, &shares).falls(0.0), "it rose");
    }

    #[test]
    fn noise_is_the_standard_error_of_the_mean() {
        // The means of the batches change by -1, -2, -3 and -6.
        let (before, after) = ([0.0; 4], [-0.25, -0.5, -0.75, -1.5]);
        let found = change(&before, &after, &[0.25; 4]);
        let values = [-1.0, -2.0, -3.0, -6.0_f64];
        let variance = values.iter().map(|value| (value + 3.0).powi(2)).sum::<f64>() / 3.0;
        assert_eq!(found.mean, -3.0);
        assert!((found.error - (variance / 4.0).sqrt()).abs() < 1e-12, "{found:?}");
        assert!(found.falls(2.7) && !found.falls(2.8), "{found:?}");
    }

    #[test]
    fn batches_weigh_by_their_targets() {
        // Each target changes by -1, in a batch of one and in a batch of three.
        let found = change(&[0.0; 2], &[-0.25, -0.75], &[0.25, 0.75]);
        assert_eq!(found, Change { mean: -1.0, error: 0.0 });
    }

    #[test]
    fn what_is_no_number_does_not_fall() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!change(&[1.0, 1.0], &[0.0, bad], &[0.5; 2]).falls(0.0), "{bad}");
        }
    }
}
