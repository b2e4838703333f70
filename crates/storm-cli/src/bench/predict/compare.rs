//! What methods gain over plain training, seed by seed, with confidence intervals.
//!
//! Plain training is a curve: the loss of fully decayed runs of several lengths against their cost.
//! A method is one point. At its cost, the curve gives the loss of plain training in the same time.
//! At its loss, the curve gives the time that plain training takes to the same loss.

use super::records::Finished;

/// Quantiles of Student's t for a 95 % interval, by degrees of freedom, starting at 1.
const T_95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

/// A mean over seeds, with a 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub(super) mean: f64,
    /// Not finite if there is one seed.
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Estimate {
    /// The estimate for paired differences.
    pub(super) fn of(values: &[f64]) -> Option<Estimate> {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        let t = match count {
            0 => return None,
            1 => f64::INFINITY,
            _ => T_95[(count - 2).min(T_95.len() - 1)],
        };
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let half = match count {
            1 => t,
            _ => t * (squares / (count - 1) as f64 / count as f64).sqrt(),
        };
        Some(Estimate { mean, low: mean - half, high: mean + half })
    }

    /// The estimate for ratios, from the mean of their logarithms.
    fn of_ratios(ratios: &[f64]) -> Option<Estimate> {
        let logarithms: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
        let Estimate { mean, low, high } = Estimate::of(&logarithms)?;
        Some(Estimate { mean: mean.exp(), low: low.exp(), high: high.exp() })
    }
}

/// Whether the curve covers a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    Within,
    /// The cost is below that of the shortest run, or the loss is worse than that run's.
    Before,
    /// The cost is above that of the longest run, or the loss is better than all.
    Beyond,
}

/// Costs and losses of plain training, by cost.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// `None` without points.
    pub(super) fn new(mut points: Vec<(f64, f64)>) -> Option<Curve> {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        (!points.is_empty()).then_some(Curve(points))
    }

    /// The loss at a cost, interpolated between runs by the logarithm of the cost. Outside, it is
    /// that of the nearest run.
    pub(super) fn loss(&self, cost: f64) -> (f64, Reach) {
        let points = &self.0;
        let after = points.partition_point(|&(at, _)| at < cost);
        match (after.checked_sub(1).map(|before| points[before]), points.get(after)) {
            (None, Some(&(at, loss))) if at == cost => (loss, Reach::Within),
            (None, Some(&(_, loss))) => (loss, Reach::Before),
            (Some((_, loss)), None) => (loss, Reach::Beyond),
            (Some((c0, l0)), Some(&(c1, l1))) => {
                let share = (cost / c0).ln() / (c1 / c0).ln();
                (l0 + share * (l1 - l0), Reach::Within)
            }
            (None, None) => unreachable!("a curve has points"),
        }
    }

    /// The cost at which a loss is first reached. Outside, it is that of the first or last run.
    pub(super) fn cost(&self, loss: f64) -> (f64, Reach) {
        let points = &self.0;
        if loss > points[0].1 {
            return (points[0].0, Reach::Before);
        }
        for pair in points.windows(2) {
            let [(c0, l0), (c1, l1)] = [pair[0], pair[1]];
            if l1 <= loss {
                let share = if l0 > l1 { (l0 - loss) / (l0 - l1) } else { 0.0 };
                return ((c0.ln() + share * (c1 / c0).ln()).exp(), Reach::Within);
            }
        }
        match points[0].1 == loss {
            true => (points[0].0, Reach::Within),
            false => (points[points.len() - 1].0, Reach::Beyond),
        }
    }
}

/// How time is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clock {
    /// In steps of the run itself: if others use the machine too, that slows all of a run alike.
    Steps,
    /// In measured seconds.
    Seconds,
}

impl Clock {
    pub(super) fn of(self, run: &Finished) -> f64 {
        match self {
            Clock::Steps => run.cost_steps(),
            Clock::Seconds => run.seconds,
        }
    }
}

/// A method compared with plain training, by one clock.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Timed {
    /// Mean cost.
    pub(super) cost: f64,
    /// Its loss minus that of plain training in the same time.
    pub(super) equal_time: Estimate,
    /// Its time to its loss, relative to that of plain training to the same loss.
    pub(super) ratio: Estimate,
    /// Seeds in which the curve of plain training does not extend that far, so that the ratio is a
    /// lower or upper bound.
    pub(super) before: usize,
    pub(super) beyond: usize,
}

/// A method compared with plain training.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Comparison {
    pub(super) seeds: usize,
    /// Mean on the test rows.
    pub(super) test_loss: f64,
    /// Its loss minus that of plain training with the same number of steps.
    pub(super) equal_steps: Estimate,
    pub(super) by_steps: Timed,
    pub(super) by_seconds: Timed,
    pub(super) accepted: u64,
    pub(super) refused: u64,
    pub(super) kept: u64,
    pub(super) undone: u64,
    /// The smallest distance by which an accepted jump moved the weights.
    pub(super) distance_min: Option<f64>,
    /// Mean Brier score over seeds, for a controller that learns.
    pub(super) brier: Option<f64>,
    /// Mean cost of a prediction in steps, as that controller measured it.
    pub(super) cost: Option<f64>,
}

/// The runs of one seed: plain ones of all lengths, and one of the method.
pub(super) struct Pair<'a> {
    pub(super) plain: Vec<&'a Finished>,
    pub(super) method: &'a Finished,
}

impl Comparison {
    /// Compares over seeds. `None` without any.
    pub(super) fn new(pairs: &[Pair<'_>]) -> Option<Comparison> {
        let equal_steps: Vec<f64> = pairs
            .iter()
            .filter_map(|Pair { plain, method }| {
                let same = plain.iter().find(|run| run.steps == method.steps)?;
                Some(method.test_loss - same.test_loss)
            })
            .collect();
        let sum = |of: fn(&Finished) -> u64| pairs.iter().map(|pair| of(pair.method)).sum();
        let distances = pairs.iter().filter_map(|pair| pair.method.distance_min);
        Some(Comparison {
            seeds: pairs.len(),
            test_loss: mean(pairs.iter().map(|pair| pair.method.test_loss))?,
            equal_steps: Estimate::of(&equal_steps)?,
            by_steps: timed(pairs, Clock::Steps)?,
            by_seconds: timed(pairs, Clock::Seconds)?,
            accepted: sum(|run| run.accepted),
            refused: sum(|run| run.refused),
            kept: sum(|run| run.kept),
            undone: sum(|run| run.undone),
            distance_min: distances.reduce(f64::min),
            brier: mean(pairs.iter().filter_map(|pair| pair.method.brier)),
            cost: mean(pairs.iter().filter_map(|pair| pair.method.cost)),
        })
    }

    /// Whether a 95 % interval shows a gain, in loss at equal steps or in time.
    pub(super) fn is_gain(&self) -> bool {
        self.equal_steps.high < 0.0 || self.by_steps.ratio.high < 1.0
    }
}

fn timed(pairs: &[Pair<'_>], clock: Clock) -> Option<Timed> {
    let (mut differences, mut ratios) = (Vec::new(), Vec::new());
    let (mut before, mut beyond) = (0, 0);
    for Pair { plain, method } in pairs {
        let points = plain.iter().map(|run| (clock.of(run), run.test_loss)).collect();
        let curve = Curve::new(points)?;
        let cost = clock.of(method);
        let (loss, loss_reach) = curve.loss(cost);
        let (plain_cost, reach) = curve.cost(method.test_loss);
        differences.push(method.test_loss - loss);
        ratios.push(cost / plain_cost);
        before += usize::from(reach == Reach::Before || loss_reach == Reach::Before);
        beyond += usize::from(reach == Reach::Beyond || loss_reach == Reach::Beyond);
    }
    Some(Timed {
        cost: mean(pairs.iter().map(|pair| clock.of(pair.method)))?,
        equal_time: Estimate::of(&differences)?,
        ratio: Estimate::of_ratios(&ratios)?,
        before,
        beyond,
    })
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    Estimate::of(&values).map(|estimate| estimate.mean)
}

#[cfg(test)]
mod tests {
    use super::super::records::tests::finished;
    use super::*;

    #[track_caller]
    fn is_near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
    }

    /// A loss that falls by 0.1 whenever the steps double.
    fn plain(seed: u64, steps: u64) -> Finished {
        finished(seed, steps, 3.0 + seed as f64 - 0.1 * (steps as f64 / 100.0).log2())
    }

    #[test]
    fn intervals_are_students() {
        // Mean 3, standard deviation √2.5, half-width 2.776 standard errors.
        let found = Estimate::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).expect("five");
        is_near(found.mean, 3.0);
        is_near(found.high - 3.0, 2.776 * 0.5_f64.sqrt());
        assert_eq!(Estimate::of(&[]), None);
        assert!(Estimate::of(&[1.0]).expect("one").high.is_infinite());
    }

    #[test]
    fn a_curve_is_read_both_ways() {
        let curve = Curve::new(vec![(200.0, 2.9), (100.0, 3.0), (400.0, 2.8)]).expect("a curve");
        for (cost, loss) in
            [(100.0, 3.0), (200.0, 2.9), (400.0, 2.8), (100.0 * 2.0_f64.sqrt(), 2.95)]
        {
            let found = curve.loss(cost);
            is_near(found.0, loss);
            assert_eq!(found.1, Reach::Within);
            let found = curve.cost(loss);
            is_near(found.0, cost);
            assert_eq!(found.1, Reach::Within);
        }
        assert_eq!(curve.loss(50.0), (3.0, Reach::Before));
        assert_eq!(curve.loss(800.0), (2.8, Reach::Beyond));
        assert_eq!(curve.cost(3.5), (100.0, Reach::Before));
        assert_eq!(curve.cost(2.0), (400.0, Reach::Beyond));
        // A longer run is worse by chance, so the shorter one reaches the loss first.
        let bumpy = Curve::new(vec![(100.0, 3.0), (200.0, 2.8), (400.0, 2.9)]).expect("a curve");
        is_near(bumpy.cost(2.9).0, 100.0 * 2.0_f64.sqrt());
    }

    /// Compares a method that has the loss of `worth` plain steps after 100, with this time
    /// overhead.
    fn method(seeds: u64, worth: u64, overhead: f64) -> Comparison {
        let runs: Vec<(Vec<Finished>, Finished)> = (0..seeds)
            .map(|seed| {
                let lengths = [50, 100, 200, 400];
                let all = lengths.map(|steps| plain(seed, steps)).to_vec();
                let mut run = finished(seed, 100, plain(seed, worth).test_loss);
                run.seconds *= overhead;
                (all, run)
            })
            .collect();
        let pairs: Vec<Pair<'_>> = runs
            .iter()
            .map(|(plain, method)| Pair { plain: plain.iter().collect(), method })
            .collect();
        Comparison::new(&pairs).expect("seeds")
    }

    #[test]
    fn seeds_that_differ_do_not_hide_a_gain() {
        // Losses of seeds differ by 1, and the gain is 0.1 in each.
        let found = method(3, 200, 1.5);
        is_near(found.equal_steps.mean, -0.1);
        is_near(found.equal_steps.high, -0.1);
        is_near(found.by_steps.cost, 150.0);
        is_near(found.by_steps.ratio.mean, 0.75);
        is_near(found.by_seconds.ratio.mean, 0.75);
        is_near(found.by_steps.equal_time.mean, -0.1 + 0.1 * 1.5_f64.log2());
        assert!(found.is_gain());
    }

    #[test]
    fn overheads_count() {
        let found = method(3, 100, 1.25);
        is_near(found.equal_steps.mean, 0.0);
        is_near(found.by_steps.ratio.mean, 1.25);
        assert!(!found.is_gain());
        let found = method(2, 800, 1.0);
        assert_eq!((found.by_steps.before, found.by_steps.beyond), (0, 2));
        assert_eq!(method(2, 20, 1.0).by_steps.before, 2);
    }
}
