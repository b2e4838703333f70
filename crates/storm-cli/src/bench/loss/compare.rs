//! How far apart the losses of two variants are. All differences are relative to the first one's
//! loss.

use anyhow::{Result, ensure};

/// Number of points of a smoothed curve. Each is the mean of the steps since the previous point.
const POINTS: usize = 20;

/// Losses of one run, by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Curve {
    pub(super) steps: Vec<(u64, f64)>,
    pub(super) held_out: Vec<(u64, f64)>,
}

impl Curve {
    fn first(&self) -> f64 {
        self.steps[0].1
    }

    fn last_held_out(&self) -> f64 {
        self.held_out[self.held_out.len() - 1].1
    }
}

/// A variant compared with the first one, seed by seed.
pub(super) struct Comparison {
    /// Mean of the last held-out losses of the variant.
    pub(super) held_out: f64,
    /// Difference in the last held-out loss, for each seed.
    pub(super) each: Vec<f64>,
    /// Difference in the loss of the first step.
    pub(super) first: f64,
    /// Largest amount by which the smoothed training loss is above the first variant's.
    pub(super) above: f64,
    /// Largest amount by which it is below.
    pub(super) below: f64,
}

impl Comparison {
    /// Compares runs with the same seeds, in the same order.
    pub(super) fn new(base: &[Curve], other: &[Curve]) -> Result<Comparison> {
        for (base, other) in base.iter().zip(other) {
            let steps = |curve: &Curve| -> Vec<u64> {
                curve.steps.iter().chain(&curve.held_out).map(|&(step, _)| step).collect()
            };
            ensure!(steps(base) == steps(other), "these runs differ in their steps or evaluations");
        }
        let pairs = || base.iter().zip(other);
        let each = pairs().map(|(a, b)| b.last_held_out() / a.last_held_out() - 1.0).collect();
        let (smooth, smooth_other) = (smoothed(base), smoothed(other));
        let apart = || smooth.iter().zip(&smooth_other).map(|(a, b)| b.1 / a.1 - 1.0);
        Ok(Comparison {
            held_out: mean_held_out(other),
            each,
            first: mean_first(other) / mean_first(base) - 1.0,
            above: apart().fold(0.0, f64::max),
            below: apart().map(|apart| -apart).fold(0.0, f64::max),
        })
    }

    /// Difference in the last held-out loss, mean over the seeds.
    pub(super) fn difference(&self) -> f64 {
        mean(self.each.iter().copied())
    }
}

pub(super) fn mean_held_out(curves: &[Curve]) -> f64 {
    mean(curves.iter().map(Curve::last_held_out))
}

pub(super) fn mean_first(curves: &[Curve]) -> f64 {
    mean(curves.iter().map(Curve::first))
}

/// Range of the last held-out losses over the seeds, relative to their mean.
pub(super) fn spread(curves: &[Curve]) -> f64 {
    let losses = || curves.iter().map(Curve::last_held_out);
    let (least, most) = (losses().fold(f64::MAX, f64::min), losses().fold(f64::MIN, f64::max));
    (most - least) / mean_held_out(curves)
}

/// Training loss as a few points, mean over the seeds. Each point has the last step of its range,
/// and the mean over that range.
pub(super) fn smoothed(curves: &[Curve]) -> Vec<(u64, f64)> {
    let count = curves[0].steps.len();
    let points = POINTS.min(count);
    let point = |point: usize| {
        let range = point * count / points..(point + 1) * count / points;
        let step = curves[0].steps[range.end - 1].0;
        let losses = curves.iter().flat_map(|curve| &curve.steps[range.clone()]);
        (step, mean(losses.map(|&(_, loss)| loss)))
    };
    (0..points).map(point).collect()
}

/// The mean over the seeds of each held-out loss.
pub(super) fn held_out(curves: &[Curve]) -> Vec<(u64, f64)> {
    let at = |number: usize| {
        let losses = curves.iter().map(|curve| curve.held_out[number].1);
        (curves[0].held_out[number].0, mean(losses))
    };
    (0..curves[0].held_out.len()).map(at).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(scale: f64) -> Curve {
        let loss = |step: u64| scale * (1.0 + 1.0 / step as f64);
        Curve {
            steps: (1..=40).map(|step| (step, loss(step))).collect(),
            held_out: vec![(20, loss(20)), (40, loss(40))],
        }
    }

    #[track_caller]
    fn is_near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
    }

    #[test]
    fn equal_runs_do_not_differ() {
        let runs = [curve(1.0), curve(2.0)];
        let compared = Comparison::new(&runs, &runs).expect("comparable");
        assert_eq!([compared.difference(), compared.first], [0.0; 2]);
        assert_eq!([compared.above, compared.below], [0.0; 2]);
    }

    #[test]
    fn seeds_are_compared_in_pairs() {
        let base = [curve(1.0), curve(2.0)];
        let other = [curve(1.01), curve(2.06)];
        let compared = Comparison::new(&base, &other).expect("comparable");
        is_near(compared.each[0], 0.01);
        is_near(compared.each[1], 0.03);
        is_near(compared.difference(), 0.02);
        // For the mean curve: 3.07 instead of 3.
        is_near(compared.above, 0.07 / 3.0);
        assert_eq!(compared.below, 0.0);
        is_near(compared.first, 0.07 / 3.0);
        is_near(spread(&base), 1.0 / 1.5);
    }

    #[test]
    fn curves_are_compared_above_and_below() {
        let mut other = curve(1.0);
        // The first two steps make the first point, the last two the last.
        other.steps[..2].iter_mut().for_each(|(_, loss)| *loss *= 1.01);
        other.steps[38..].iter_mut().for_each(|(_, loss)| *loss *= 0.97);
        let compared = Comparison::new(&[curve(1.0)], &[other]).expect("comparable");
        is_near(compared.above, 0.01);
        is_near(compared.below, 0.03);
    }

    #[test]
    fn a_curve_is_smoothed_by_means() {
        let points = smoothed(&[curve(1.0)]);
        assert_eq!(points.len(), POINTS);
        assert_eq!(points[0].0, 2);
        is_near(points[0].1, 1.75);
        assert_eq!(points[POINTS - 1].0, 40);
    }

    #[test]
    fn runs_of_other_lengths_are_refused() {
        let mut short = curve(1.0);
        short.steps.pop();
        assert!(Comparison::new(&[curve(1.0)], &[short]).is_err());
    }
}
