//! How many batches to prepare ahead: as many as the caller uses while the slowest one is
//! assembled.

use std::time::Duration;

/// Batches of the first round, which is not representative: kernels are compiled, memory is faulted
/// in and the first window is read. Each later round has twice as many.
const FIRST_BATCHES: u32 = 8;
/// Maximum batches of a round.
const ROUND_BATCHES_MAX: u32 = 1024;

/// Measures rounds of batches, and adjusts after each how many to prepare ahead.
#[derive(Debug)]
pub(super) struct Pace {
    depth: usize,
    depth_max: usize,
    /// Batches of this round.
    round: u32,
    batches: u32,
    /// Time that the caller spent using them, without waiting for the next.
    using: Duration,
    measured: Option<Measured>,
}

/// Results of the last round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Measured {
    /// Time the caller takes per batch.
    pub(super) interval: Duration,
    /// Time to assemble the slowest batch.
    pub(super) longest: Duration,
}

/// The number of batches to prepare ahead, given the time to assemble a batch and the time the
/// caller uses one: those used while one is assembled, plus one that is ready.
pub(in crate::records) fn batches_ahead(
    making: Duration,
    interval: Duration,
    depth_max: usize,
) -> usize {
    let used = making.as_secs_f64() / interval.as_secs_f64().max(1e-9);
    // The cast saturates.
    (used.ceil() as usize).saturating_add(1).clamp(2.min(depth_max), depth_max)
}

impl Pace {
    /// Prepares `depth` batches ahead until two rounds have been measured, and never more than
    /// `depth_max`.
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

    /// Results of the last round. `None` before the second has ended.
    pub(super) fn measured(&self) -> Option<Measured> {
        self.measured
    }

    /// Called when the caller requests another batch after this time. `longest` returns the time of
    /// the slowest batch since its last call.
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

    /// Called when a batch was not ready. Once a round has been measured, this increases the depth.
    pub(super) fn waited(&mut self) {
        if self.measured.is_some() {
            self.depth = (self.depth + 1).min(self.depth_max);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::random::Random;

    const MS: Duration = Duration::from_millis(1);

    /// Simulates a round whose batches are used for `interval` and assembled within `longest`.
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
        // The first batches take long, and are not representative.
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

    /// A run in virtual time that requests batches like `Staging` in storm-train: those of the next
    /// step while one computes, group by group, each group once the device has consumed its slots.
    /// A step begins when all of its batches have arrived.
    struct Run {
        pace: Pace,
        workers: Vec<Duration>,
        /// When each planned batch is ready, and the time of the slowest since the last round.
        ready: Vec<Duration>,
        longest: Duration,
        taken: usize,
        returned: Option<Duration>,
    }

    impl Run {
        fn new(pace: Pace, workers: usize) -> Run {
            let workers = vec![Duration::ZERO; workers];
            let longest = Duration::ZERO;
            Run { pace, workers, ready: Vec::new(), longest, taken: 0, returned: None }
        }

        /// Plans batches as far ahead as the pace allows. The first free worker takes the next.
        fn plan(&mut self, now: Duration, making: &dyn Fn(usize) -> Duration) {
            while self.ready.len() - self.taken < self.pace.depth() {
                let time = making(self.ready.len());
                let free = self.workers.iter_mut().min().expect("a worker");
                *free = now.max(*free) + time;
                self.ready.push(*free);
                self.longest = self.longest.max(time);
            }
        }

        /// Requests a batch, and returns when it is ready.
        fn next(&mut self, now: Duration, making: &dyn Fn(usize) -> Duration) -> Duration {
            if let Some(returned) = self.returned {
                let longest = &mut self.longest;
                self.pace.came(now - returned, || std::mem::take(longest));
            }
            self.plan(now, making);
            let there = self.ready[self.taken].max(now);
            if there > now {
                self.pace.waited();
            }
            self.taken += 1;
            self.plan(there, making);
            self.returned = Some(there);
            there
        }

        /// How long each step waits for its data. A step has `groups` groups of `size` batches,
        /// which compute for `group` each.
        fn waits(
            &mut self,
            steps: usize,
            [groups, size]: [usize; 2],
            group: Duration,
            making: &dyn Fn(usize) -> Duration,
        ) -> Vec<Duration> {
            let mut read = Duration::ZERO;
            for _ in 0..groups * size {
                read = self.next(read, making);
            }
            let mut end = Duration::ZERO;
            let mut waits = Vec::new();
            for _ in 0..steps {
                let start = end.max(read);
                waits.push(start - end);
                for index in 0..groups {
                    // Its slots are free when it begins, or later if their previous contents were
                    // read late.
                    read = read.max(start + group * index as u32);
                    for _ in 0..size {
                        read = self.next(read, making);
                    }
                }
                end = start + group * groups as u32;
            }
            waits
        }
    }

    /// Reading is uneven: most batches are assembled quickly, and some take as long as several
    /// steps. The loader's batches ahead absorb that, so the slots of a step need no depth of their
    /// own.
    #[test]
    fn steps_do_not_wait_for_batches_that_are_made_unevenly() {
        // Three workers together assemble one per 3 ms, and each is used for 4 ms. One in sixteen,
        // at random, is slow, and one in sixteen rather slow.
        let making = |batch: usize| {
            let place = Random(batch as u64 / 16).bits() as usize;
            match (batch + place) % 16 {
                0 => 70 * MS,
                7 => 30 * MS,
                _ => 3 * MS,
            }
        };
        for shape @ [groups, size] in [[1, 1], [4, 1], [1, 4], [2, 3]] {
            let group = 4 * MS * size as u32;
            let mut run = Run::new(Pace::new(2, 64), 3);
            let waits = run.waits(4000 / (groups * size), shape, group, &making);
            // Skip the steps during the first rounds.
            let (before, after) = waits.split_at(waits.len() / 4);
            assert!(before.iter().sum::<Duration>() > Duration::ZERO, "{shape:?}");
            assert_eq!(after.iter().sum::<Duration>(), Duration::ZERO, "{shape:?}");
            let depth = run.pace.depth();
            assert!((19..64).contains(&depth), "{shape:?}: {depth}");

            // With a fixed depth of two, steps keep waiting.
            let mut shallow = Run::new(Pace::new(2, 2), 3);
            let waits = shallow.waits(4000 / (groups * size), shape, group, &making);
            let waited = waits.iter().skip(waits.len() / 4).filter(|wait| !wait.is_zero()).count();
            assert!(waited > 10, "{shape:?}: {waited}");
        }
    }
}
