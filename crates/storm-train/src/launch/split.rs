//! How large micro-batches are, where only the tokens of a step are given.

use super::{LaunchRequest, StepPlan};
use crate::TrainError;
use crate::task::check_lanes;
use storm_plan::{PlanError, Planned, guess_step_seconds};

/// Micro-batches of more tokens are not tried: kernels do not get faster any more, and all of a
/// layer's temporaries must be on the device at a time.
const TOKENS_MAX: usize = 65_536;

/// How many sizes in a row may be slower than the best before smaller ones are not tried.
const SLOWER_MAX: usize = 2;

/// How many sizes are planned in full.
const PLANNED: usize = 2;

/// Sizes that are guessed to be slower than the best by more than this are not planned in full.
const WORTH_PLANNING: f64 = 1.03;

/// Predictions are off by so much: a size that is guessed to be slower than a measured one by more is not tried.
const WORTH_TRYING: f64 = 1.10;

/// Sizes that differ by a smaller factor take about as long.
const FAR: usize = 4;

/// A size of micro-batches that was tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedSplit {
    /// Sequences per micro-batch.
    pub batch: usize,
    /// Micro-batches per step.
    pub accumulate: usize,
    /// What a step was predicted to take.
    pub predicted_seconds: f64,
    /// What it took.
    pub step_seconds: f64,
}

/// A size of micro-batches that was looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuessedSplit {
    /// Sequences per micro-batch.
    pub batch: usize,
    /// Micro-batches per step.
    pub accumulate: usize,
    /// A guess of the step's time from a few plans; none if nothing was found to fit.
    pub guessed_seconds: Option<f64>,
}

/// Finds the size of micro-batches whose step of `tokens_per_step` tokens is the fastest within the budget.
pub(super) fn choose(
    request: &LaunchRequest,
    tokens_per_step: usize,
) -> Result<StepPlan, TrainError> {
    let LaunchRequest { options, profile, budget, forced, .. } = request;
    let sequences = sequences(tokens_per_step, options.sequence)?;
    check_lanes(options, sequences)?;
    let mut guesses: Vec<GuessedSplit> = Vec::new();
    let mut slower = 0;
    // The micro-batches of every size are divided into the same lanes.
    for batch in sizes(sequences / options.lanes.count(), options.sequence) {
        let task = request.task(batch, sequences / batch)?;
        let guessed_seconds = match guess_step_seconds(&task, profile, *budget, forced) {
            Ok(seconds) => seconds,
            // A group that does not divide this number of micro-batches may divide another.
            Err(PlanError::Decisions { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let fastest = guesses.iter().filter_map(|t| t.guessed_seconds).fold(f64::MAX, f64::min);
        slower = match guessed_seconds {
            Some(seconds) if seconds >= fastest => slower + 1,
            Some(_) => 0,
            None => slower,
        };
        guesses.push(GuessedSplit { batch, accumulate: sequences / batch, guessed_seconds });
        if slower >= SLOWER_MAX {
            break;
        }
    }
    let mut best: Option<(usize, Planned)> = None;
    for batch in worth_planning(&guesses) {
        let planned = request.plan_split(batch, sequences / batch)?;
        let seconds = |planned: &Planned| planned.prediction.step_seconds;
        if best.as_ref().is_none_or(|(_, known)| seconds(&planned) < seconds(known)) {
            best = Some((batch, planned));
        }
    }
    let (batch, planned) = best.expect("at least one size is planned");
    Ok(StepPlan { batch, accumulate: sequences / batch, planned, guesses })
}

/// The size to try next, after the sizes in `tried`, the fastest of which took `fastest_seconds` a step: the best guess
/// among sizes far from all of these, since the profile errs for neighbours alike; otherwise the best guess.
pub(super) fn next(
    guesses: &[GuessedSplit],
    tried: &[usize],
    fastest_seconds: f64,
) -> Option<GuessedSplit> {
    let is_far =
        |batch: usize| tried.iter().all(|&known| batch >= FAR * known || known >= FAR * batch);
    guesses
        .iter()
        .filter_map(|guess| Some((guess.guessed_seconds?, guess)))
        .filter(|(seconds, guess)| {
            *seconds <= WORTH_TRYING * fastest_seconds && !tried.contains(&guess.batch)
        })
        .min_by(|(a, first), (b, second)| {
            let near = |guess: &GuessedSplit| !is_far(guess.batch);
            near(first).cmp(&near(second)).then(a.total_cmp(b))
        })
        .map(|(_, guess)| *guess)
}

fn sequences(tokens_per_step: usize, sequence: usize) -> Result<usize, TrainError> {
    match tokens_per_step.checked_div(sequence) {
        Some(sequences) if sequences > 0 && tokens_per_step.is_multiple_of(sequence) => {
            Ok(sequences)
        }
        _ => Err(TrainError::Option {
            option: "tokens per step",
            problem: format!(
                "{tokens_per_step} must be a multiple of the {sequence} tokens of a sequence"
            ),
        }),
    }
}

/// Sizes worth trying, largest first: divisors of the step, each at most two thirds of the one
/// before it.
fn sizes(sequences: usize, sequence: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = Vec::new();
    let most = sequences.min(TOKENS_MAX / sequence).max(1);
    for batch in (1..=most).rev().filter(|batch| sequences.is_multiple_of(*batch)) {
        if sizes.last().is_none_or(|&last| 3 * batch <= 2 * last) {
            sizes.push(batch);
        }
    }
    sizes
}

/// The sizes with the best guesses, best first; if none was found to fit, the smallest, whose plan will
/// say why.
fn worth_planning(tried: &[GuessedSplit]) -> Vec<usize> {
    let mut known: Vec<(f64, usize)> =
        tried.iter().filter_map(|t| Some((t.guessed_seconds?, t.batch))).collect();
    known.sort_by(|a, b| a.0.total_cmp(&b.0));
    let limit = known.first().map_or(0.0, |(fastest, _)| fastest * WORTH_PLANNING);
    let mut worth: Vec<usize> =
        known.iter().filter(|(seconds, _)| *seconds <= limit).map(|&(_, batch)| batch).collect();
    worth.truncate(PLANNED);
    if worth.is_empty() {
        worth.extend(tried.iter().map(|t| t.batch).min());
    }
    worth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_divisors_well_apart() {
        assert_eq!(sizes(64, 1024), [64, 32, 16, 8, 4, 2, 1]);
        assert_eq!(sizes(60, 1024), [60, 30, 20, 12, 6, 4, 2, 1]);
        assert_eq!(sizes(7, 1024), [7, 1]);
        assert_eq!(sizes(512, 1024), [64, 32, 16, 8, 4, 2, 1]);
        // One sequence may be longer than a micro-batch usually is.
        assert_eq!(sizes(4, 131_072), [1]);
    }

    #[test]
    fn tokens_are_whole_sequences() {
        assert_eq!(sequences(4096, 1024).ok(), Some(4));
        for (tokens, sequence) in [(1000, 1024), (0, 1024), (4096, 0), (1025, 1024)] {
            let error = sequences(tokens, sequence).expect_err("not whole").to_string();
            assert!(error.contains(&tokens.to_string()), "{error}");
        }
    }

    #[test]
    fn sizes_far_from_those_tried_come_first() {
        let guesses: Vec<GuessedSplit> =
            [(16, 0.746), (8, 0.72), (4, 0.705), (2, 0.701), (1, 0.700)]
                .map(|(batch, seconds)| GuessedSplit {
                    batch,
                    accumulate: 16 / batch,
                    guessed_seconds: Some(seconds),
                })
                .into();
        let next = |tried: &[usize], fastest| next(&guesses, tried, fastest).map(|next| next.batch);
        // The profile is far too fast for the smallest.
        assert_eq!(next(&[1], 1.05), Some(4));
        assert_eq!(next(&[1, 4], 0.708), Some(16));
        assert_eq!(next(&[1, 4, 16], 0.708), Some(2));
        // Nothing is as fast as what was measured.
        assert_eq!(next(&[1], 0.6), None);
        assert_eq!(next(&[1, 2, 4, 8, 16], 1.0), None);
    }

    #[test]
    fn the_best_guesses_are_planned() {
        let tried = |guesses: &[Option<f64>]| -> Vec<GuessedSplit> {
            let size = |(i, &guessed_seconds): (usize, &Option<f64>)| GuessedSplit {
                batch: 8 >> i,
                accumulate: 1 << i,
                guessed_seconds,
            };
            guesses.iter().enumerate().map(size).collect()
        };
        assert_eq!(worth_planning(&tried(&[None, Some(1.02), Some(1.0), Some(1.01)])), [2, 1]);
        assert_eq!(worth_planning(&tried(&[Some(1.0), Some(1.1)])), [8]);
        assert_eq!(worth_planning(&tried(&[None, None, None])), [2]);
    }
}
