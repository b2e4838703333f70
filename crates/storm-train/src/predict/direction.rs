//! Where weights go: a direction from the steps that were made, or a control.

use super::modes::INTERVALS;
use storm_graph::random::{Purpose, Seed, Stream, words};

/// A direction d of θ + τ·d. A window is a number of steps before the prediction, within its full phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Direction {
    /// The last update: θ(t) − θ(t−1).
    LastUpdate,
    /// The mean of updates, in which one that is a step older weighs 1 − 1/window as much.
    Average {
        /// Updates that it remembers.
        window: u64,
    },
    /// To the mean of the weights after each step, in which those of a step earlier weigh 1 − 1/window as much.
    WeightAverage {
        /// Steps that it remembers.
        window: u64,
    },
    /// θ(t) − θ(t−window).
    Difference {
        /// Steps between both.
        window: u64,
    },
    /// What the next window would add if the differences of each tensor followed a linear recurrence: dynamic mode
    /// decomposition.
    Dmd {
        /// Steps of a window, a multiple of its intervals.
        window: u64,
    },
    /// What an outer optimizer with Nesterov's momentum adds to these steps: momentum · m, where
    /// m ← momentum · m + θ(t) − θ(t−window) in each prediction.
    Outer {
        /// Steps of an outer step.
        window: u64,
        /// Share of m that stays.
        momentum: f32,
    },
    /// Nowhere: all work of a difference, and no jump.
    None {
        /// As for a difference.
        window: u64,
    },
    /// Each weight up or down at random, each tensor as far as by a difference.
    Random {
        /// Of that difference.
        window: u64,
    },
}

impl Direction {
    /// Steps before a prediction that its direction depends on.
    pub fn window(&self) -> u64 {
        match *self {
            Direction::LastUpdate => 1,
            Direction::Average { window }
            | Direction::WeightAverage { window }
            | Direction::Difference { window }
            | Direction::Dmd { window }
            | Direction::Outer { window, .. }
            | Direction::None { window }
            | Direction::Random { window } => window,
        }
    }

    /// As in a config file.
    pub fn name(&self) -> &'static str {
        match self {
            Direction::LastUpdate => "last-update",
            Direction::Average { .. } => "average",
            Direction::WeightAverage { .. } => "weight-average",
            Direction::Difference { .. } => "difference",
            Direction::Dmd { .. } => "dmd",
            Direction::Outer { .. } => "outer",
            Direction::None { .. } => "none",
            Direction::Random { .. } => "random",
        }
    }

    /// Whether it keeps an f32 number for each weight beside the weights of an earlier step.
    pub(super) fn has_state(&self) -> bool {
        self.averaged().is_some() || matches!(self, Direction::Outer { .. } | Direction::Dmd { .. })
    }

    /// Steps before a prediction after which it copies weights, besides those at the start of the window.
    pub(super) fn copies_at(&self) -> Vec<u64> {
        match *self {
            Direction::Dmd { window } => {
                let interval = window / INTERVALS as u64;
                (1..INTERVALS as u64).map(|number| window - number * interval).collect()
            }
            _ => Vec::new(),
        }
    }

    /// What it takes the mean of after every step of a full phase, if it does.
    pub(super) fn averaged(&self) -> Option<(Averaged, u64)> {
        match *self {
            Direction::Average { window } => Some((Averaged::Updates, window)),
            Direction::WeightAverage { window } => Some((Averaged::Weights, window)),
            _ => None,
        }
    }
}

/// What an average is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Averaged {
    Updates,
    Weights,
}

/// The direction of one tensor, ready for its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Course {
    /// The base less the reference.
    Difference,
    /// The state times this.
    State(f32),
    /// The state times this, less the base.
    ToState(f32),
    Nowhere,
    /// Up or down by this much.
    Signs(f32),
}

impl Course {
    /// Of one element, whose random word is given.
    pub(super) fn at(&self, base: f32, reference: f32, state: f32, word: u32) -> f32 {
        match *self {
            Course::Difference => base - reference,
            Course::State(factor) => factor * state,
            Course::ToState(factor) => factor * state - base,
            Course::Nowhere => 0.0,
            Course::Signs(size) if word >> 31 == 0 => size,
            Course::Signs(size) => -size,
        }
    }
}

/// The random words of a tensor's elements, one after another: the low half of one rounds, its highest bit is a sign.
#[derive(Clone, Debug)]
pub(super) struct RandomWords {
    seed: Seed,
    stream: Stream,
    /// The last block of four, and its words.
    drawn: Option<(u64, [u32; 4])>,
}

impl RandomWords {
    pub(super) fn new(seed: Seed, stream: Stream) -> RandomWords {
        RandomWords { seed, stream, drawn: None }
    }

    /// Of the element at that place of the whole tensor.
    pub(super) fn at(&mut self, element: usize) -> u32 {
        let block = element as u64 / 4;
        let drawn = match self.drawn {
            Some((at, drawn)) if at == block => drawn,
            _ => words(self.seed, Purpose::Prediction, self.stream, block),
        };
        self.drawn = Some((block, drawn));
        drawn[element % 4]
    }
}

/// The share of an average that an update has kept one step later.
pub(super) fn decay(window: u64) -> f64 {
    1.0 - 1.0 / window as f64
}

/// The factor that makes a decayed sum of so many updates their weighted mean.
pub(super) fn mean_factor(window: u64, updates: u64) -> f32 {
    let exponent = i32::try_from(updates).unwrap_or(i32::MAX);
    // The sum is of (1 − decay) · decay^age.
    (1.0 / (1.0 - decay(window).powi(exponent))) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_of_equal_updates_is_that_update() {
        for (window, updates) in [(1, 1), (1, 5), (4, 1), (4, 3), (16, 100)] {
            let (keep, mut sum) = (decay(window), 0.0);
            for _ in 0..updates {
                sum = keep * sum + (1.0 - keep) * 3.0;
            }
            let mean = sum * f64::from(mean_factor(window, updates));
            assert!((mean - 3.0).abs() < 1e-5, "{window} {updates} {mean}");
        }
    }

    #[test]
    fn signs_are_fair_and_differ_between_steps() {
        let signs = |step: u32| -> Vec<f32> {
            let stream = Stream { tensor: 1, layer: 2 };
            let mut words = RandomWords::new(Seed { seed: 7, step }, stream);
            (0..4096)
                .map(|element| Course::Signs(0.5).at(9.0, 1.0, 5.0, words.at(element)))
                .collect()
        };
        let values = signs(3);
        assert!(values.iter().all(|value| value.abs() == 0.5));
        let up = values.iter().filter(|value| **value > 0.0).count();
        assert!((1900..2200).contains(&up), "{up}");
        let same = values.iter().zip(signs(4)).filter(|(a, b)| **a == *b).count();
        assert!((1900..2200).contains(&same), "{same}");
        // Wherever one begins.
        let stream = Stream { tensor: 1, layer: 2 };
        let word = RandomWords::new(Seed { seed: 7, step: 3 }, stream).at(1027);
        assert_eq!(Course::Signs(0.5).at(0.0, 0.0, 0.0, word), values[1027]);
    }
}
