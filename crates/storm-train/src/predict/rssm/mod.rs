//! The learned controller. A recurrent state-space model observes every step, learns the outcomes
//! of jumps during the run, imagines what would follow each candidate jump, and chooses whether to
//! jump and how far. It depends only on seed, steps and outcomes. It reads no clock, and all of its
//! state is in the checkpoint.

mod adam;
mod calibration;
mod choice;
mod lanes;
mod learner;
mod lesson;
mod model;
mod network;
mod observe;
mod rollout;

pub(crate) use calibration::Calibration;

use super::phases::Phase;
use super::updates::UpdatesSeen;
use adam::Adam;
use choice::{Prospect, Terms, prospects};
use learner::{Learner, Lesson};
use lesson::Lessons;
use network::{ACTED, Network, OBSERVED, Outcome, Tick, learners, words_of};
use observe::Seen;
use rollout::{LENGTHS, Question, Rollouts};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use storm_exec::ExecError;

/// Candidate lengths, in units of `tau`.
const FACTORS: [f32; LENGTHS] = [0.25, 0.5, 1.0, 2.0, 4.0];

/// Length of the history.
const TICKS: usize = 256;

/// Length of the sequence used for learning and choosing.
const SEQUENCE: usize = 12;

/// Steps between two updates of the model.
const LEARN_EVERY: u32 = 4;

/// Steps after a correction that are also imagined. The first ones show whether the jumps were
/// undone.
const AFTER_CORRECTION: u64 = 4;

/// Maximum steps imagined.
const HORIZON_MAX: u64 = 16;

/// A jump requires at least this probability of acceptance, both predicted and as observed for such
/// predictions.
const CONFIDENCE: f64 = 0.5;

/// Every n-th decision explores.
const EXPLORE_EVERY: u32 = 4;

/// Scale of log loss changes, which are small.
const CHANGE_SCALE: f64 = 50.0;

/// Scaled changes are clamped to this.
const CHANGE_MAX: f64 = 5.0;

/// Numbers of a tick in a checkpoint.
const TICK_NUMBERS: usize = ACTED + OBSERVED + 6;

/// What a controller expects of a jump.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expectation {
    /// Probability that it is accepted.
    pub acceptance: f64,
    /// Change of the log loss.
    pub change: f64,
    /// Standard deviation of the change.
    pub deviation: f64,
    /// How much further the log loss falls than with full steps in the same time, as imagined by
    /// the ensemble. Mean over members.
    #[serde(default)]
    pub gain: f64,
    /// Standard error of that mean.
    #[serde(default)]
    pub disagreement: f64,
}

/// A chosen jump.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Chosen {
    pub(super) tau: f32,
    pub(super) expected: Expectation,
}

/// Metrics of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepSeen {
    pub(super) loss: f32,
    pub(super) gradient_norm: f32,
    pub(super) learning_rate: f32,
    /// Progress of the run, from 0 to 1.
    pub(super) progress: f32,
    pub(super) phase: Phase,
    /// Update statistics of the previous step.
    pub(super) updates: UpdatesSeen,
}

/// Settings of a run's jumps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Settings {
    /// The middle of the lengths.
    pub(super) tau: f32,
    /// Cost of a prediction, in steps.
    pub(super) cost_steps: f64,
    /// Steps of a correction.
    pub(super) correct: u64,
}

impl Settings {
    /// Steps imagined.
    fn horizon(&self) -> usize {
        self.correct.saturating_add(AFTER_CORRECTION).min(HORIZON_MAX) as usize
    }
}

pub(super) struct Rssm {
    network: Network,
    seed: u64,
    settings: Settings,
    rollouts: Rollouts,
    learner: Learner,
    /// Steps observed, and decisions made.
    steps: u32,
    decisions: u32,
    ticks: VecDeque<Tick>,
    seen: Seen,
    calibration: Calibration,
}

impl Rssm {
    /// # Errors
    /// There is not enough memory.
    pub(super) fn new(seed: u64, settings: Settings) -> Result<Rssm, ExecError> {
        let network = Network::new();
        let (adam, lessons) = (Adam::new(network.initial(seed)), Lessons::new(&network)?);
        Ok(Rssm {
            learner: Learner::new(adam, lessons),
            network,
            seed,
            settings,
            rollouts: Rollouts::new(),
            steps: 0,
            decisions: 0,
            ticks: VecDeque::with_capacity(TICKS),
            seen: Seen::new(),
            calibration: Calibration::new(),
        })
    }

    /// Observes a step. Every few steps it begins to learn, beside the steps that follow.
    pub(super) fn see(&mut self, step: &StepSeen) {
        let (action, observation, excess) = self.seen.step(step);
        if self.ticks.len() == TICKS {
            self.ticks.pop_front();
        }
        let learners = learners(self.seed, self.steps);
        self.ticks.push_back(Tick { action, observation, excess, learners, jump: None });
        self.steps = self.steps.wrapping_add(1);
        if self.steps.is_multiple_of(LEARN_EVERY) {
            let lesson = Lesson { ticks: self.lesson(), bits: (self.seed, self.steps) };
            self.learner.begin(lesson);
        }
    }

    /// The sequence to learn from: alternately the newest, and one that ends with a jump.
    fn lesson(&self) -> Vec<Tick> {
        let jumps: Vec<usize> =
            (0..self.ticks.len()).filter(|&at| self.ticks[at].jump.is_some()).collect();
        let is_newest = (self.steps / LEARN_EVERY).is_multiple_of(2) || jumps.is_empty();
        let last = match is_newest {
            true => self.ticks.len() - 1,
            false => {
                let share = network::uniform(self.seed, self.steps, words_of::JUMP, 0);
                jumps[((share * jumps.len() as f32) as usize).min(jumps.len() - 1)]
            }
        };
        let first = (last + 1).saturating_sub(SEQUENCE);
        self.ticks.range(first..=last).copied().collect()
    }

    /// The expected value of a jump of each length.
    fn imagine(&mut self) -> [Prospect; LENGTHS] {
        let horizon = self.settings.horizon();
        let question = Question {
            lengths: FACTORS.map(f32::ln),
            correct: usize::try_from(self.settings.correct).unwrap_or(usize::MAX),
            horizon,
            bits: (self.seed, self.steps),
        };
        let ticks = self.ticks.range(self.ticks.len().saturating_sub(SEQUENCE)..);
        let parameters = self.learner.adam().parameters();
        let imagined = self.rollouts.imagine(&self.network, parameters, ticks, &question);
        let cost_steps = self.settings.cost_steps;
        let fall_per_step = self.seen.fall_per_step();
        prospects(&imagined, &Terms { fall_per_step, horizon, cost_steps })
    }

    /// The jump with the largest expected gain. `None` if full steps promise more, or if it is not
    /// confident.
    pub(super) fn choose(&mut self) -> Option<Chosen> {
        if self.ticks.is_empty() {
            return None;
        }
        let decision = self.decisions;
        self.decisions = decision.wrapping_add(1);
        let found = self.imagine();
        let chosen = |at: usize| Chosen {
            tau: self.settings.tau * FACTORS[at],
            expected: found[at].expected,
        };
        // Tries each length once at first, and later in turn, to keep learning.
        if (decision as usize) < FACTORS.len() {
            // From the middle outward.
            return Some(chosen([2, 1, 3, 0, 4][decision as usize]));
        }
        if decision.is_multiple_of(EXPLORE_EVERY) {
            return Some(chosen((decision / EXPLORE_EVERY) as usize % FACTORS.len()));
        }
        let gain = |at: usize| found[at].expected.gain;
        let best = (0..LENGTHS).max_by(|&a, &b| gain(a).total_cmp(&gain(b)))?;
        let (acceptance, gain) = found[best].agreed();
        let observed = self.calibration.observed_acceptance(found[best].expected.acceptance as f32);
        let is_sure = acceptance >= CONFIDENCE && observed >= CONFIDENCE;
        (is_sure && gain > 0.0).then(|| chosen(best))
    }

    /// Learns the outcome of a jump from the loss before and after it.
    pub(super) fn learn_outcome(
        &mut self,
        chosen: &Chosen,
        before: f64,
        after: f64,
        accepted: bool,
    ) {
        let change = (after / before).ln();
        // A NaN counts as the largest increase.
        let limit = CHANGE_MAX / CHANGE_SCALE;
        let change = if change.is_nan() { limit } else { change.clamp(-limit, limit) };
        let scaled = (change * CHANGE_SCALE) as f32;
        let length = (chosen.tau / self.settings.tau).ln();
        if let Some(tick) = self.ticks.back_mut() {
            tick.jump = Some((length, Outcome { change: scaled, accepted }));
        }
        self.seen.jump(length, scaled, accepted);
        let Expectation { acceptance, change: expected, .. } = chosen.expected;
        self.calibration.add(acceptance as f32, accepted, expected, change);
    }

    /// Observes the result of a correction.
    pub(super) fn judged(&mut self, kept: bool) {
        self.seen.judged(kept);
    }

    /// Size of its serialized state in bytes.
    pub(super) fn state_bytes() -> usize {
        let parameters = Network::new().parameters;
        let whole = 4 * (1 + 1 + 1 + 1) + 4 * TICKS * TICK_NUMBERS;
        4 * 3 * parameters + whole + 4 * observe::NUMBERS + 8 * calibration::NUMBERS
    }

    /// Serializes all mutable state.
    pub(super) fn write(&mut self, bytes: &mut [u8]) {
        let mut out = Writer(bytes);
        let adam = self.learner.adam();
        adam.vectors().into_iter().flatten().for_each(|&value| out.f32(value));
        let ticks = self.ticks.len() as u32;
        [adam.steps(), self.steps, self.decisions, ticks].into_iter().for_each(|n| out.u32(n));
        for tick in &self.ticks {
            tick.action.iter().chain(&tick.observation).for_each(|&value| out.f32(value));
            [tick.excess, f32::from(tick.learners)].into_iter().for_each(|value| out.f32(value));
            let jump = match tick.jump {
                None => [0.0; 4],
                Some((length, Outcome { change, accepted })) => {
                    [1.0, length, change, if accepted { 1.0 } else { 0.0 }]
                }
            };
            jump.into_iter().for_each(|value| out.f32(value));
        }
        (0..(TICKS - self.ticks.len()) * TICK_NUMBERS).for_each(|_| out.f32(0.0));
        self.seen.to_numbers().into_iter().for_each(|value| out.f32(value));
        self.calibration.to_numbers().into_iter().for_each(|value| out.f64(value));
    }

    /// Restores the serialized state.
    pub(super) fn read(&mut self, bytes: &[u8]) {
        let mut from = Reader(bytes);
        let vectors = [(); 3].map(|()| from.f32s(self.network.parameters));
        let [adam_steps, steps, decisions, ticks] = [(); 4].map(|()| from.u32());
        self.learner.adam().restore(vectors, adam_steps);
        (self.steps, self.decisions) = (steps, decisions);
        let all: Vec<Vec<f32>> = (0..TICKS).map(|_| from.f32s(TICK_NUMBERS)).collect();
        let tick = |numbers: &Vec<f32>| {
            let (action, rest) = numbers.split_at(ACTED);
            let (observation, rest) = rest.split_at(OBSERVED);
            let outcome = Outcome { change: rest[4], accepted: rest[5] > 0.5 };
            Tick {
                action: std::array::from_fn(|at| action[at]),
                observation: std::array::from_fn(|at| observation[at]),
                excess: rest[0],
                learners: rest[1] as u8,
                jump: (rest[2] > 0.5).then_some((rest[3], outcome)),
            }
        };
        self.ticks = all.iter().take(ticks as usize).map(tick).collect();
        self.seen = Seen::from_numbers(&from.f32s(observe::NUMBERS));
        let numbers: Vec<f64> = (0..calibration::NUMBERS).map(|_| from.f64()).collect();
        self.calibration = Calibration::from_numbers(&numbers);
    }
}

struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put<const N: usize>(&mut self, value: [u8; N]) {
        let bytes = std::mem::take(&mut self.0);
        let (first, rest) = bytes.split_at_mut(N);
        first.copy_from_slice(&value);
        self.0 = rest;
    }

    fn f32(&mut self, value: f32) {
        self.put(value.to_ne_bytes());
    }

    fn f64(&mut self, value: f64) {
        self.put(value.to_ne_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.put(value.to_ne_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (first, rest) = self.0.split_at(N);
        self.0 = rest;
        let mut value = [0; N];
        value.copy_from_slice(first);
        value
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn f64(&mut self) -> f64 {
        f64::from_ne_bytes(self.take())
    }

    fn f32s(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| f32::from_ne_bytes(self.take())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run in which jumps longer than `tau` are refused.
    #[derive(Clone, Copy)]
    struct World {
        /// The fraction of an accepted jump's gain on the probe that later steps show.
        share: f32,
        /// Total gain of jumps in log loss.
        gained: f32,
        is_correcting: bool,
    }

    const LASTING: World = World { share: 1.0, gained: 0.0, is_correcting: false };

    impl World {
        fn step(&mut self, number: u32) -> StepSeen {
            let noise = 0.02 * (number % 3) as f32;
            let phase = if self.is_correcting { Phase::Correct } else { Phase::Full };
            self.is_correcting = false;
            StepSeen {
                loss: 3.0 * (noise - 0.005 * number as f32 - self.gained).exp(),
                gradient_norm: 1.0 + 0.1 * (number % 5) as f32,
                learning_rate: 1e-3,
                progress: number as f32 / 800.0,
                phase,
                updates: UpdatesSeen::default(),
            }
        }

        /// Decisions in a range of steps.
        fn run(&mut self, rssm: &mut Rssm, steps: std::ops::Range<u32>) -> Vec<Option<Chosen>> {
            let mut decisions = Vec::new();
            for number in steps {
                rssm.see(&self.step(number));
                if number % 5 == 4 {
                    let chosen = rssm.choose();
                    if let Some(chosen) = &chosen {
                        let accepted = chosen.tau <= 1.0;
                        let fall = if accepted { 0.03 * chosen.tau } else { -0.02 };
                        let after = 2.0 * f64::from(-fall).exp();
                        rssm.learn_outcome(chosen, 2.0, after, accepted);
                        if accepted {
                            self.is_correcting = true;
                            self.gained += self.share * fall;
                        }
                        rssm.judged(accepted);
                    }
                    decisions.push(chosen);
                }
            }
            decisions
        }
    }

    fn rssm(seed: u64, cost_steps: f64) -> Rssm {
        Rssm::new(seed, Settings { tau: 1.0, cost_steps, correct: 1 }).expect("memory")
    }

    /// The chosen lengths, without exploration.
    fn chosen(decisions: &[Option<Chosen>], range: std::ops::Range<usize>) -> Vec<f32> {
        let late = range.filter(|decision| !decision.is_multiple_of(4));
        late.filter_map(|decision| decisions[decision].map(|chosen| chosen.tau)).collect()
    }

    #[test]
    fn it_goes_on_from_its_state_bit_by_bit() {
        let mut whole = rssm(9, 1.0);
        let all = LASTING.clone().run(&mut whole, 0..60);
        for stop in [1, 13, 33, 34] {
            let (mut first, mut world) = (rssm(9, 1.0), LASTING);
            world.run(&mut first, 0..stop);
            let mut bytes = vec![0; Rssm::state_bytes()];
            first.write(&mut bytes);
            let mut second = rssm(9, 1.0);
            second.read(&bytes);
            let rest = world.run(&mut second, stop..60);
            assert_eq!(rest, all[all.len() - rest.len()..], "stopped after {stop}");
            let bytes_of = |rssm: &mut Rssm| {
                let mut bytes = vec![0; Rssm::state_bytes()];
                rssm.write(&mut bytes);
                bytes
            };
            assert!(bytes_of(&mut second) == bytes_of(&mut whole), "stopped after {stop}");
        }
    }

    #[test]
    fn it_tries_each_length_and_then_chooses_what_helps() {
        let mut late = Vec::new();
        for seed in [3, 4, 5] {
            let mut rssm = rssm(seed, 0.01);
            let decisions = LASTING.clone().run(&mut rssm, 0..400);
            let first: Vec<f32> =
                decisions[..5].iter().flatten().map(|chosen| chosen.tau).collect();
            assert_eq!(first, [1.0, 0.5, 2.0, 0.25, 4.0]);
            late.extend(chosen(&decisions, 50..80));
            let brier = rssm.calibration.brier().expect("jumps");
            assert!(brier < 0.2, "{brier}");
        }
        let good = late.iter().filter(|tau| **tau <= 1.0).count();
        assert!(late.len() >= 45 && good * 10 >= late.len() * 9, "{late:?}");
    }

    /// The probe accepts the same jumps as above, but later steps show that they do harm.
    #[test]
    fn jumps_that_harm_the_steps_after_them_are_not_made() {
        let mut world = World { share: -1.0, ..LASTING };
        let decisions = world.run(&mut rssm(4, 0.01), 0..400);
        assert!(decisions[..5].iter().all(Option::is_some), "it tries them");
        let late = chosen(&decisions, 50..80);
        assert!(late.len() <= 2, "{late:?}");
    }

    #[test]
    fn jumps_that_cost_more_than_they_bring_are_not_made() {
        let mut rssm = rssm(4, 1e6);
        let decisions = LASTING.clone().run(&mut rssm, 0..200);
        for (number, decision) in decisions.iter().enumerate().skip(5) {
            assert_eq!(
                decision.is_some(),
                number.is_multiple_of(4),
                "only what it tries: {number}"
            );
        }
    }
}
