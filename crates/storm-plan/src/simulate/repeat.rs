//! Repetitions of a segment without following each.
//!
//! Every moment is the latest of a few others, plus a duration. When from one repetition to the next
//! every moment moves by as much as it did before, it will go on like that for as long as the latest
//! of each few remains the latest. That may end, as moments that are not the latest may move faster:
//! a queue that falls behind a little in each repetition will at some time hold up others. How many
//! repetitions that takes is known, so these are skipped and the next ones followed again. The result
//! is that of following all.

use super::queues::{Moments, Queues, Reasons, Waited};
use crate::plan::Run;

/// Repetitions that are followed if they do not become regular; the others are taken to be like
/// those of the last half of these, on average.
const FOLLOWED_MAX: usize = 64;

/// Differences below this share of a repetition are those of rounding.
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

    /// Moves everything on as it moved from the second to the third.
    fn skip_regular(&mut self, [first, second, third]: [&Snapshot; 3], times: f64) {
        self.move_on(&second.now, &third.now, times);
        // What a repetition waits may itself change by the same in each: a sum over a ramp.
        let all = [&first.waited, &second.waited, &third.waited];
        let ramp = times * (times + 1.0) / 2.0;
        self.waited =
            Waited::combine(all, |[a, b, c]| c + times * (c - b) + ramp * (c - 2.0 * b + a));
    }

    /// Moves everything on by a share of what it moved between two snapshots.
    fn skip_on_average(&mut self, from: &Snapshot, to: &Snapshot, share: f64) {
        self.move_on(&from.now, &to.now, share);
        self.waited = Waited::combine([&from.waited, &to.waited], |[a, b]| b + share * (b - a));
    }

    fn move_on(&mut self, from: &Moments, to: &Moments, times: f64) {
        let move_on = |now: &mut f64, from: f64, to: f64| {
            // What was never issued stays so.
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

/// If every moment moved by the same twice: how many repetitions that will go on for at least.
fn regular_repetitions(first: &Snapshot, second: &Snapshot, third: &Snapshot) -> Option<usize> {
    let [a, b, c] = [first, second, third].map(|snapshot| &snapshot.reasons.moments[..]);
    if a.len() != c.len() || b.len() != c.len() {
        return None;
    }
    let moved = |index: usize| c[index] - b[index];
    let is_known = |index: usize| c[index] > f64::NEG_INFINITY;
    let period = (0..c.len()).filter(|&i| is_known(i)).map(moved).fold(0.0, f64::max);
    let tolerance = period * ROUNDING;
    // Also false where a moment became known only just now.
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
