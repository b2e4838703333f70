//! Combines what the ensemble members expect of jumps.

use super::network::MEMBERS;
use super::observe::EXCESS_SCALE;
use super::rollout::{Imagined, LENGTHS};
use super::{CHANGE_SCALE, Expectation};

/// What a prediction is compared with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Terms {
    /// Fall of the log loss per step, from its trend.
    pub(super) fall_per_step: f64,
    /// Steps imagined.
    pub(super) horizon: usize,
    /// Cost of a prediction, in steps.
    pub(super) cost_steps: f64,
}

/// The expected value of a jump.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Prospect {
    pub(super) expected: Expectation,
    /// Standard error of the mean probability over members.
    acceptance_error: f64,
}

impl Prospect {
    /// Lower confidence bounds, one standard error below the mean: the probability of acceptance,
    /// and the gain.
    pub(super) fn agreed(&self) -> (f64, f64) {
        let Expectation { acceptance, gain, disagreement, .. } = self.expected;
        (acceptance - self.acceptance_error, gain - disagreement)
    }
}

/// Mean over members, and its standard error.
fn over_members(of: impl Fn(usize) -> f64) -> (f64, f64) {
    let mean = (0..MEMBERS).map(&of).sum::<f64>() / MEMBERS as f64;
    let squares = (0..MEMBERS).map(|member| (of(member) - mean).powi(2)).sum::<f64>();
    (mean, (squares / (MEMBERS * (MEMBERS - 1)) as f64).sqrt())
}

/// The expected value of a jump of each length.
pub(super) fn prospects(imagined: &Imagined, terms: &Terms) -> [Prospect; LENGTHS] {
    let Imagined { jumps, excess } = imagined;
    let excess =
        |candidate: usize, member: usize| f64::from(excess[candidate][member]) / EXCESS_SCALE;
    std::array::from_fn(|length| {
        let jump = |member: usize| &jumps[length][member];
        let change = |member: usize| f64::from(jump(member).change) / CHANGE_SCALE;
        let gain = |member: usize| {
            // A refused jump is followed by the same steps as no jump.
            let without = excess(LENGTHS, member);
            let fall_if_accepted = without - excess(length, member) - change(member);
            let horizon = terms.horizon.max(1) as f64;
            let fall_of_step = terms.fall_per_step - without / horizon;
            // Steps could be made in the time of a prediction. If they would raise the loss,
            // skipping them is no gain.
            let cost = terms.cost_steps * fall_of_step.max(0.0);
            f64::from(jump(member).acceptance) * fall_if_accepted - cost
        };
        let (acceptance, acceptance_error) =
            over_members(|member| f64::from(jump(member).acceptance));
        let (mean, _) = over_members(change);
        // Variance of the mixture: the variance that members predict plus the variance of their
        // means.
        let (square, _) = over_members(|member| {
            let deviation = f64::from(jump(member).deviation) / CHANGE_SCALE;
            deviation.powi(2) + (change(member) - mean).powi(2)
        });
        let deviation = square.sqrt();
        let (gain, disagreement) = over_members(gain);
        let expected = Expectation { acceptance, change: mean, deviation, gain, disagreement };
        Prospect { expected, acceptance_error }
    })
}

#[cfg(test)]
mod tests {
    use super::super::rollout::{CANDIDATES, Expected};
    use super::*;

    fn imagined() -> Imagined {
        let one = Expected { change: -1.0, deviation: 0.5, acceptance: 0.8 };
        Imagined { jumps: [[one; MEMBERS]; LENGTHS], excess: [[0.0; MEMBERS]; CANDIDATES] }
    }

    const FREE: Terms = Terms { fall_per_step: 0.01, horizon: 5, cost_steps: 0.0 };

    #[test]
    fn members_that_agree_have_no_disagreement() {
        let [found, ..] = prospects(&imagined(), &FREE);
        let Expectation { acceptance, change, deviation, gain, disagreement } = found.expected;
        assert!((acceptance - 0.8).abs() < 1e-6 && (change + 0.02).abs() < 1e-9);
        assert!((deviation - 0.01).abs() < 1e-9, "that of one of them");
        assert!((gain - 0.8 * 0.02).abs() < 1e-8 && disagreement < 1e-12);
        let (sure, least) = found.agreed();
        assert!((sure - acceptance).abs() < 1e-12 && (least - gain).abs() < 1e-12);
    }

    #[test]
    fn disagreement_lowers_what_is_sure() {
        let mut some = imagined();
        for member in 0..MEMBERS / 2 {
            some.jumps[2][member] = Expected { change: -3.0, deviation: 0.5, acceptance: 0.4 };
        }
        let [one, _, other, ..] = prospects(&some, &FREE);
        let (sure, least) = other.agreed();
        // Half of the members are above the mean by as much as the others are below it.
        let error = |off: f64| off / ((MEMBERS - 1) as f64).sqrt();
        assert!((other.expected.acceptance - 0.6).abs() < 1e-6);
        assert!((sure - (0.6 - error(0.2))).abs() < 1e-6);
        // 0.8 · 0.02 and 0.4 · 0.06: the mean is higher than that of the others.
        let gain = other.expected.gain;
        assert!((gain - 0.02).abs() < 1e-8 && (least - (0.02 - error(0.004))).abs() < 1e-8);
        assert!(gain > one.expected.gain);
        let deviation = (0.01_f64.powi(2) + 0.02_f64.powi(2)).sqrt();
        assert!((other.expected.deviation - deviation).abs() < 1e-8);
    }

    #[test]
    fn what_follows_a_jump_counts_against_what_follows_none() {
        let mut some = imagined();
        some.excess[1] = [0.1; MEMBERS];
        some.excess[LENGTHS] = [-0.1; MEMBERS];
        let [untouched, risen, ..] = prospects(&some, &FREE);
        assert!((untouched.expected.gain - 0.8 * (0.02 - 0.01)).abs() < 1e-8);
        assert!(risen.expected.gain.abs() < 1e-8, "all of it is lost again");
    }

    #[test]
    fn a_prediction_costs_the_steps_that_it_takes_the_time_of() {
        let costly = Terms { cost_steps: 2.0, ..FREE };
        let gain = |some: &Imagined, terms: &Terms| prospects(some, terms)[0].expected.gain;
        let mut some = imagined();
        assert!((gain(&some, &costly) - (0.8 * 0.02 - 0.02)).abs() < 1e-8);
        // If steps are imagined to raise the loss, skipping them neither costs nor gains anything.
        some.excess = [[5.0; MEMBERS]; CANDIDATES];
        assert!((gain(&some, &costly) - 0.8 * 0.02).abs() < 1e-8);
        // And if they lower it by more than their trend.
        some.excess = [[-0.5; MEMBERS]; CANDIDATES];
        assert!((gain(&some, &costly) - (0.8 * 0.02 - 2.0 * 0.02)).abs() < 1e-8);
    }
}
