//! The state machine of phases. It is independent of clocks, devices and weights.

use serde::{Deserialize, Serialize};

/// Limit on how often the length of the full phase doubles.
const DOUBLINGS_MAX: u32 = 6;

/// The phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Ordinary steps at the start, before predictions.
    WarmUp,
    /// Ordinary steps, from which the next prediction derives its direction.
    Full,
    /// Jumps, between two steps.
    Predict,
    /// Ordinary steps after jumps, to decide whether the jumps are kept.
    Correct,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Phase; 4] = [Phase::WarmUp, Phase::Full, Phase::Predict, Phase::Correct];

    /// Its name in logs.
    pub fn name(self) -> &'static str {
        match self {
            Phase::WarmUp => "warm-up",
            Phase::Full => "full",
            Phase::Predict => "predict",
            Phase::Correct => "correct",
        }
    }
}

/// Steps of each phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseLengths {
    /// Steps before the first full phase.
    pub warm_up: u64,
    /// Steps of a full phase. Doubles after each correction in a row that undid its jumps.
    pub full: u64,
    /// Steps after jumps before they are judged. 0 if they never are.
    pub correct: u64,
}

/// What to do between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// The first full phase begins.
    FirstFull,
    /// Make jumps, then call [`Phases::predicted`].
    Predict,
    /// Compare with the trend, then call [`Phases::judged`].
    Judge,
}

/// The current phase and its progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Position {
    phase: Phase,
    /// Steps left in the phase.
    left: u64,
    /// Consecutive corrections that undid their jumps.
    undone: u32,
}

/// The phases of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Phases {
    lengths: PhaseLengths,
    position: Position,
}

impl Phases {
    /// At the first step.
    pub(super) fn new(lengths: PhaseLengths) -> Phases {
        let position = Position { phase: Phase::WarmUp, left: lengths.warm_up, undone: 0 };
        Phases { lengths, position }
    }

    pub(super) fn position(&self) -> Position {
        self.position
    }

    /// Resumes from a position. Returns false if it is impossible with these lengths.
    pub(super) fn resume(&mut self, position: Position) -> bool {
        let longest = match position.phase {
            Phase::WarmUp => self.lengths.warm_up,
            Phase::Full => self.full_length(position.undone),
            Phase::Correct => self.lengths.correct,
            Phase::Predict => 0,
        };
        let is_possible = (1..=longest).contains(&position.left);
        if is_possible {
            self.position = position;
        }
        is_possible
    }

    /// The phase of the next step.
    pub(super) fn phase(&self) -> Phase {
        self.position.phase
    }

    /// Steps until the next prediction, in a full phase.
    pub(super) fn until_prediction(&self) -> Option<u64> {
        (self.position.phase == Phase::Full).then_some(self.position.left)
    }

    /// Called after a step, with the steps left in the run.
    pub(super) fn after_step(&mut self, steps_left: u64) -> Due {
        self.position.left = self.position.left.saturating_sub(1);
        if self.position.left > 0 {
            return Due::Nothing;
        }
        match self.position.phase {
            Phase::WarmUp => {
                self.begin_full();
                Due::FirstFull
            }
            // Skip jumps that could not be corrected before the end.
            Phase::Full if steps_left < self.lengths.correct => {
                self.begin_full();
                Due::Nothing
            }
            Phase::Full | Phase::Predict => {
                self.position.phase = Phase::Predict;
                Due::Predict
            }
            Phase::Correct => Due::Judge,
        }
    }

    /// Called after a prediction. `moved` is whether any jump must be corrected.
    pub(super) fn predicted(&mut self, moved: bool) {
        match moved {
            true => {
                self.position.phase = Phase::Correct;
                self.position.left = self.lengths.correct;
            }
            false => self.begin_full(),
        }
    }

    /// Called after a correction. `kept` is whether its jumps are kept.
    pub(super) fn judged(&mut self, kept: bool) {
        self.position.undone = match kept {
            true => 0,
            false => self.position.undone.saturating_add(1),
        };
        self.begin_full();
    }

    fn begin_full(&mut self) {
        self.position.phase = Phase::Full;
        self.position.left = self.full_length(self.position.undone);
    }

    /// Doubles for each consecutive correction that undid its jumps.
    fn full_length(&self, undone: u32) -> u64 {
        self.lengths.full.saturating_mul(1 << undone.min(DOUBLINGS_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: PhaseLengths = PhaseLengths { warm_up: 3, full: 4, correct: 2 };

    /// What is due after each step of a run, with these answers to predictions and judgements.
    fn run(steps: u64, moved: impl Fn(u32) -> bool, kept: impl Fn(u32) -> bool) -> Vec<(u64, Due)> {
        let mut phases = Phases::new(LENGTHS);
        let (mut predictions, mut judgements) = (0, 0);
        let mut found = Vec::new();
        for step in 1..=steps {
            assert_ne!(phases.phase(), Phase::Predict, "no step is made in it");
            let due = phases.after_step(steps - step);
            match due {
                Due::Nothing => continue,
                Due::FirstFull => {}
                Due::Predict => {
                    assert_eq!(phases.phase(), Phase::Predict);
                    phases.predicted(moved(predictions));
                    predictions += 1;
                }
                Due::Judge => {
                    phases.judged(kept(judgements));
                    judgements += 1;
                }
            }
            found.push((step, due));
        }
        found
    }

    #[test]
    fn phases_follow_one_another() {
        let found = run(15, |_| true, |_| true);
        let expected = [
            (3, Due::FirstFull),
            (7, Due::Predict),
            (9, Due::Judge),
            (13, Due::Predict),
            (15, Due::Judge),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn what_stays_where_it_was_needs_no_correction() {
        let found = run(15, |_| false, |_| unreachable!("nothing to judge"));
        let expected = [(3, Due::FirstFull), (7, Due::Predict), (11, Due::Predict)];
        // At 15 there are no steps left for a correction.
        assert_eq!(found, expected);
    }

    #[test]
    fn each_undo_doubles_the_next_full_phase_up_to_a_limit() {
        let judged: Vec<u64> = run(4000, |_| true, |_| false)
            .into_iter()
            .filter_map(|(step, due)| (due == Due::Predict).then_some(step))
            .collect();
        let full: Vec<u64> = judged.windows(2).map(|pair| pair[1] - pair[0] - 2).collect();
        assert_eq!(full[..8], [8, 16, 32, 64, 128, 256, 256, 256]);
        // A kept correction makes it short again.
        let judged: Vec<u64> = run(100, |_| true, |judgement| judgement == 1)
            .into_iter()
            .filter_map(|(step, due)| (due == Due::Predict).then_some(step))
            .collect();
        assert_eq!(judged[..4], [7, 17, 23, 33]);
    }

    #[test]
    fn nothing_is_predicted_that_cannot_be_corrected() {
        for steps in 0..60 {
            let found = run(steps, |_| true, |judgement| judgement % 2 == 0);
            let count = |due: Due| found.iter().filter(|(_, found)| *found == due).count();
            assert_eq!(count(Due::Predict), count(Due::Judge), "{steps} steps");
        }
    }

    #[test]
    fn a_run_goes_on_from_any_position() {
        let mut phases = Phases::new(LENGTHS);
        for step in 1..200_u64 {
            match phases.after_step(1000) {
                Due::Nothing | Due::FirstFull => {}
                Due::Predict => phases.predicted(step % 3 != 0),
                Due::Judge => phases.judged(step % 2 == 0),
            }
            let mut resumed = Phases::new(LENGTHS);
            assert!(resumed.resume(phases.position()));
            assert_eq!(resumed, phases);
        }
        let mut other = Phases::new(PhaseLengths { correct: 1, ..LENGTHS });
        let impossible = [
            Position { phase: Phase::Correct, left: 2, undone: 0 },
            Position { phase: Phase::Full, left: 0, undone: 0 },
            Position { phase: Phase::Full, left: 9, undone: 1 },
            Position { phase: Phase::Predict, left: 1, undone: 0 },
        ];
        for position in impossible {
            assert!(!other.resume(position), "{position:?}");
        }
    }
}
