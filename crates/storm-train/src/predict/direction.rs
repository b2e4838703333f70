//! The direction of a jump: derived from past steps, or a control.

use super::modes::INTERVALS;
use storm_graph::random::{Purpose, Seed, Stream, words};

/// The direction d of θ + τ·d. The window is the number of steps before the prediction, within its
/// full phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Direction {
    /// The last update: θ(t) − θ(t−1).
    LastUpdate,
    /// Exponential moving average of updates, with decay 1 − 1/window.
    Average {
        /// Averaging window in steps.
        window: u64,
    },
    /// Toward the exponential moving average of the weights, with decay 1 − 1/window.
    WeightAverage {
        /// Averaging window in steps.
        window: u64,
    },
    /// θ(t) − θ(t−window).
    Difference {
        /// Number of steps.
        window: u64,
    },
    /// The predicted change over the next window if the differences of each tensor follow a linear
    /// recurrence (dynamic mode decomposition).
    Dmd {
        /// Steps of a window, a multiple of the number of intervals.
        window: u64,
    },
    /// The step of an outer optimizer with Nesterov momentum beyond θ(t): momentum · m, where each
    /// prediction sets m ← momentum · m + θ(t) − θ(t−window).
    Outer {
        /// Steps per outer step.
        window: u64,
        /// Momentum coefficient.
        momentum: f32,
    },
    /// Control: the cost of a difference, without a jump.
    None {
        /// As for a difference.
        window: u64,
    },
    /// Control: each weight moves up or down at random, each tensor as far as with a difference.
    Random {
        /// Window of that difference.
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

    /// Its name in a config file.
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

    /// Whether it keeps an f32 per weight besides the weights of an earlier step.
    pub(super) fn has_state(&self) -> bool {
        self.averaged().is_some() || matches!(self, Direction::Outer { .. } | Direction::Dmd { .. })
    }

    /// Steps before a prediction at which it copies the weights, besides the start of the window.
    pub(super) fn copies_at(&self) -> Vec<u64> {
        match *self {
            Direction::Dmd { window } => {
                let interval = window / INTERVALS as u64;
                (1..INTERVALS as u64).map(|number| window - number * interval).collect()
            }
            _ => Vec::new(),
        }
    }

    /// What it averages after every step of a full phase, and the window, if it averages.
    pub(super) fn averaged(&self) -> Option<(Averaged, u64)> {
        match *self {
            Direction::Average { window } => Some((Averaged::Updates, window)),
            Direction::WeightAverage { window } => Some((Averaged::Weights, window)),
            _ => None,
        }
    }
}

/// What is averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Averaged {
    Updates,
    Weights,
}

/// The direction of one tensor, resolved per element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Course {
    /// The base minus the reference.
    Difference,
    /// The state times this factor.
    State(f32),
    /// The state times this factor, minus the base.
    ToState(f32),
    Nowhere,
    /// Plus or minus this value.
    Signs(f32),
}

impl Course {
    /// The direction of one element, given its random word.
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

/// The random words of a tensor's elements. The low half of a word is used for rounding, the
/// highest bit for a sign.
#[derive(Clone, Debug)]
pub(super) struct RandomWords {
    seed: Seed,
    stream: Stream,
    /// The last block of four words drawn, with its index.
    drawn: Option<(u64, [u32; 4])>,
}

impl RandomWords {
    pub(super) fn new(seed: Seed, stream: Stream) -> RandomWords {
        RandomWords { seed, stream, drawn: None }
    }

    /// The word of an element, by its index in the whole tensor.
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

/// Decay of the moving average per step.
pub(super) fn decay(window: u64) -> f64 {
    1.0 - 1.0 / window as f64
}

/// The bias correction of the moving average after this many updates.
pub(super) fn mean_factor(window: u64, updates: u64) -> f32 {
    let exponent = i32::try_from(updates).unwrap_or(i32::MAX);
    // The weights (1 − decay) · decay^age sum to 1 − decay^updates.
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
        // Independent of where reading begins.
        let stream = Stream { tensor: 1, layer: 2 };
        let word = RandomWords::new(Seed { seed: 7, step: 3 }, stream).at(1027);
        assert_eq!(Course::Signs(0.5).at(0.0, 0.0, 0.0, word), values[1027]);
    }
}
