//! Simulates repetitions of a segment without following each one.
//!
//! Every time is the maximum of a few others, plus a duration. Once every time advances from one
//! repetition to the next by the same amount as before, this continues for as long as each maximum
//! keeps coming from the same candidate. It may end, because other candidates may advance faster: a
//! queue that falls behind a little in each repetition eventually delays others. The number of
//! repetitions until then can be computed, so those are skipped and the next ones are followed again.
//! The result is the same as following all of them.

use super::queues::{Moments, Queues, Reasons, Waited};
use crate::plan::Run;

/// Repetitions that are followed if they do not become regular; the others are assumed to equal the
/// average of the last half of these.
const FOLLOWED_MAX: usize = 64;

/// Differences below this share of a repetition are rounding errors.
const ROUNDING: f64 = 1e-9;

/// The end of a repetition.
#[derive(Clone, Debug)]
struct Snapshot {
    now: Moments,
    waited: Waited,
    reasons: Reasons,
}

impl Queues<'_> {
    /// All repetitions of a run.
    pub(super) fn repeat(&mut self, run: &Run) {
        let mut left = run.times;
        let mut followed = 0;
        let mut middle = None;
        let mut last: Vec<Snapshot> = Vec::new();
        while left > 0 {
            self.reasons = (run.times > 3).then(Reasons::default);
            self.segment(run.segment);
            left -= 1;
            followed += 1;
            if left == 0 {
                break;
            }
            let snapshot = self.snapshot();
            if last.len() == 3 {
                last.remove(0);
            }
            last.push(snapshot.clone());
            if let [first, second, third] = &last[..]
                && let Some(regular) = regular_repetitions(first, second, third)
                && regular > 0
            {
                let skipped = regular.min(left);
                self.skip_regular([first, second, third], skipped as f64);
                left -= skipped;
                last.clear();
                continue;
            }
            match &middle {
                None if followed >= FOLLOWED_MAX / 2 => middle = Some((left, snapshot)),
                Some((left_then, middle)) if followed >= FOLLOWED_MAX => {
                    let share = left as f64 / (left_then - left) as f64;
                    self.skip_on_average(middle, &snapshot, share);
                    left = 0;
                }
                _ => {}
            }
        }
        self.reasons = None;
    }

    fn snapshot(&mut self) -> Snapshot {
        let reasons = self.reasons.take().unwrap_or_default();
        Snapshot { now: self.now.clone(), waited: self.waited, reasons }
    }

    /// Advances everything as it advanced from the second to the third.
    fn skip_regular(&mut self, [first, second, third]: [&Snapshot; 3], times: f64) {
        self.move_on(&second.now, &third.now, times);
        // The wait of a repetition may itself change by the same amount each time: a sum over a ramp.
        let all = [&first.waited, &second.waited, &third.waited];
        let ramp = times * (times + 1.0) / 2.0;
        self.waited =
            Waited::combine(all, |[a, b, c]| c + times * (c - b) + ramp * (c - 2.0 * b + a));
    }

    /// Advances everything by a share of the difference between two snapshots.
    fn skip_on_average(&mut self, from: &Snapshot, to: &Snapshot, share: f64) {
        self.move_on(&from.now, &to.now, share);
        self.waited = Waited::combine([&from.waited, &to.waited], |[a, b]| b + share * (b - a));
    }

    fn move_on(&mut self, from: &Moments, to: &Moments, times: f64) {
        let move_on = |now: &mut f64, from: f64, to: f64| {
            // An instruction that was never issued stays that way.
            if to > f64::NEG_INFINITY && from > f64::NEG_INFINITY {
                *now += times * (to - from);
            }
        };
        move_on(&mut self.now.host, from.host, to.host);
        for queue in self.plan.queues() {
            move_on(&mut self.now.free[queue], from.free[queue], to.free[queue]);
        }
        for (index, end) in self.now.ends.iter_mut().enumerate() {
            move_on(end, from.ends[index], to.ends[index]);
        }
    }
}

/// If every time advanced by the same amount twice: for how many repetitions at least that will
/// continue.
fn regular_repetitions(first: &Snapshot, second: &Snapshot, third: &Snapshot) -> Option<usize> {
    let [a, b, c] = [first, second, third].map(|snapshot| &snapshot.reasons.moments[..]);
    if a.len() != c.len() || b.len() != c.len() {
        return None;
    }
    let moved = |index: usize| c[index] - b[index];
    let is_known = |index: usize| c[index] > f64::NEG_INFINITY;
    let period = (0..c.len()).filter(|&i| is_known(i)).map(moved).fold(0.0, f64::max);
    let tolerance = period * ROUNDING;
    // Also false if a time only just became known.
    let is_regular = |i: usize| (moved(i) - (b[i] - a[i])).abs() <= tolerance;
    if !(0..c.len()).all(|index| !is_known(index) || is_regular(index)) {
        return None;
    }
    let mut repetitions = usize::MAX;
    let mut start = 0;
    for &end in &third.reasons.group_ends {
        let latest = end - 1;
        for candidate in (start..latest).filter(|&index| is_known(index)) {
            let gain = moved(candidate) - moved(latest);
            if gain > tolerance {
                let left = ((c[latest] - c[candidate]) / gain).floor();
                repetitions = repetitions.min(left.max(0.0) as usize);
            }
        }
        start = end;
    }
    Some(repetitions)
}
