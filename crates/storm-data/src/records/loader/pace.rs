//! How many batches are prepared ahead: as many as are used while the slowest of them is made.

use std::time::Duration;

/// Batches of the first round, before the caller's steps are as long as they stay: kernels are compiled, memory is faulted in
/// and the first window is read. Each later round has twice as many.
const FIRST_BATCHES: u32 = 8;
/// Batches of a round, at most.
const ROUND_BATCHES_MAX: u32 = 1024;

/// Measures round after round of batches, and says after each how many to prepare ahead.
#[derive(Debug)]
pub(super) struct Pace {
    depth: usize,
    depth_max: usize,
    /// Batches of this round.
    round: u32,
    batches: u32,
    /// Time that the caller spent with them, without waiting for the next.
    using: Duration,
    measured: Option<Measured>,
}

/// What the last round has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Measured {
    /// How long the caller takes for a batch.
    pub(super) interval: Duration,
    /// The longest that a batch took to make.
    pub(super) longest: Duration,
}

/// The batches to prepare ahead, if a batch takes so long to make and the caller takes one so often: those that are used while
/// it is made, and one that is ready.
pub(in crate::records) fn batches_ahead(
    making: Duration,
    interval: Duration,
    depth_max: usize,
) -> usize {
    let used = making.as_secs_f64() / interval.as_secs_f64().max(1e-9);
    // A cast of what is too large saturates.
    (used.ceil() as usize).saturating_add(1).clamp(2.min(depth_max), depth_max)
}

impl Pace {
    /// Prepares `depth` batches ahead until two rounds have been measured, and never more than `depth_max`.
    pub(super) fn new(depth: usize, depth_max: usize) -> Pace {
        let (depth, round) = (depth.min(depth_max), FIRST_BATCHES);
        Pace { depth, depth_max, round, batches: 0, using: Duration::ZERO, measured: None }
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    #[cfg(test)]
    pub(super) fn set_depth(&mut self, depth: usize) {
        self.depth = depth;
    }

    /// What the last round has shown; none before the second has ended.
    pub(super) fn measured(&self) -> Option<Measured> {
        self.measured
    }

    /// The caller came for another batch after this time. `longest` says what took longest to make since it was last asked.
    pub(super) fn came(&mut self, after: Duration, longest: impl FnOnce() -> Duration) {
        self.batches += 1;
        self.using += after;
        if self.batches < self.round {
            return;
        }
        let (interval, longest) = (self.using / self.round, longest());
        if self.round > FIRST_BATCHES {
            self.depth = batches_ahead(longest, interval, self.depth_max);
            self.measured = Some(Measured { interval, longest });
        }
        self.round = (2 * self.round).min(ROUND_BATCHES_MAX);
        (self.batches, self.using) = (0, Duration::ZERO);
    }

    /// A batch was not ready. If that happens although batches were measured, more of them are prepared.
    pub(super) fn waited(&mut self) {
        if self.measured.is_some() {
            self.depth = (self.depth + 1).min(self.depth_max);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Lets a round pass whose batches are used for `interval` and made within `longest`.
    fn round(pace: &mut Pace, interval: Duration, longest: Duration) {
        let before = (pace.depth(), pace.measured());
        for left in (0..pace.round).rev() {
            let asked = std::cell::Cell::new(false);
            pace.came(interval, || {
                asked.set(true);
                longest
            });
            assert_eq!(asked.get(), left == 0);
            assert!(left == 0 || (pace.depth(), pace.measured()) == before);
        }
    }

    /// A pace after the first rounds.
    fn measured(interval: Duration, depth_max: usize) -> Pace {
        let mut pace = Pace::new(6, depth_max);
        // What comes first takes long, and is not representative.
        round(&mut pace, 1000 * MS, 5000 * MS);
        pace.waited();
        assert_eq!((pace.depth(), pace.measured()), (6.min(depth_max), None));
        round(&mut pace, interval, 10 * MS);
        assert_eq!(pace.measured(), Some(Measured { interval, longest: 10 * MS }));
        pace
    }

    #[test]
    fn what_is_used_while_a_batch_is_made_is_prepared() {
        for (interval, expected) in
            [(100 * MS, 2), (10 * MS, 2), (4 * MS, 4), (2 * MS, 6), (MS, 11), (MS / 2, 16)]
        {
            assert_eq!(measured(interval, 16).depth(), expected, "{interval:?}");
        }
        assert_eq!(measured(Duration::ZERO, 16).depth(), 16);
        assert_eq!(measured(2 * MS, 1).depth(), 1);
    }

    #[test]
    fn waiting_prepares_more_up_to_what_memory_allows_until_the_next_round() {
        let mut pace = measured(4 * MS, 6);
        for expected in [5, 6, 6] {
            pace.waited();
            assert_eq!(pace.depth(), expected);
        }
        round(&mut pace, 10 * MS, 19 * MS);
        assert_eq!(pace.depth(), 3);
        for _ in 0..10 {
            round(&mut pace, MS, 3 * MS);
        }
        assert_eq!((pace.depth(), pace.round), (4, ROUND_BATCHES_MAX));
    }
}
