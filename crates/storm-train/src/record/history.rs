use super::thinned::Thinned;
use super::{Predictions, Sink, StepRecord};
use crate::{Event, Guess, RankFigures, RunError};

/// What a run did, thinned to what a picture can show: its size does not depend on how long the run is.
#[derive(Clone, Debug)]
pub struct History {
    steps: Thinned<StepRecord>,
    last: Option<StepRecord>,
    evaluations: Thinned<Evaluated>,
    last_evaluation: Option<Evaluated>,
    best_loss: Option<f64>,
    best_accuracy: Option<f64>,
    step_seconds: f64,
    other_seconds: f64,
    sample: Option<Sample>,
    predictions: Predictions,
    views: Thinned<View>,
    last_view: Option<View>,
    ranks: Vec<RankFigures>,
}

/// What an evaluation found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluated {
    /// After which step.
    pub step: u64,
    /// Mean over its targets.
    pub loss: f64,
    /// Share of them that the model found, for one that classifies.
    pub accuracy: Option<f64>,
}

/// Of the views of pictures, at least so many are kept.
const VIEWS_KEPT_MIN: usize = 6;

/// What the model took pictures for, which are always the same.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// After which step.
    pub step: u64,
    /// Of each picture.
    pub guesses: Vec<Guess>,
}

/// Some text by the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// After which step.
    pub step: u64,
    /// What it begins with.
    pub prompt: String,
    /// How the model goes on.
    pub text: String,
}

impl Default for History {
    fn default() -> History {
        History::new()
    }
}

impl History {
    /// Nothing yet.
    pub fn new() -> History {
        History {
            steps: Thinned::new(),
            last: None,
            evaluations: Thinned::new(),
            last_evaluation: None,
            best_loss: None,
            best_accuracy: None,
            step_seconds: 0.0,
            other_seconds: 0.0,
            sample: None,
            predictions: Predictions::new(),
            views: Thinned::keeping(VIEWS_KEPT_MIN),
            last_view: None,
            ranks: Vec::new(),
        }
    }

    /// Of a run that predicts.
    pub fn predictions(&self) -> &Predictions {
        &self.predictions
    }

    /// Time and memory of all ranks, when they were last told of; empty if one rank makes the steps.
    pub fn ranks(&self) -> &[RankFigures] {
        &self.ranks
    }

    /// Steps, the last one included.
    pub fn steps(&self) -> impl Iterator<Item = &StepRecord> {
        with_last(self.steps.as_slice(), self.last.as_ref(), |record| record.step)
    }

    /// The last step.
    pub fn last(&self) -> Option<&StepRecord> {
        self.last.as_ref()
    }

    /// Evaluations, the last one included.
    pub fn evaluations(&self) -> impl Iterator<Item = &Evaluated> {
        with_last(self.evaluations.as_slice(), self.last_evaluation.as_ref(), |found| found.step)
    }

    /// What it took pictures for after some of the evaluations, the last one included.
    pub fn views(&self) -> impl Iterator<Item = &View> {
        with_last(self.views.as_slice(), self.last_view.as_ref(), |view| view.step)
    }

    /// The least loss of all evaluations.
    pub fn best_loss(&self) -> Option<f64> {
        self.best_loss
    }

    /// The highest accuracy of all evaluations; none for a model that does not classify.
    pub fn best_accuracy(&self) -> Option<f64> {
        self.best_accuracy
    }

    /// That all steps took.
    pub fn step_seconds(&self) -> f64 {
        self.step_seconds
    }

    /// That evaluations, views and predictions took, and that steps waited for checkpoints.
    pub fn other_seconds(&self) -> f64 {
        self.other_seconds
    }

    /// The last text by the model.
    pub fn sample(&self) -> Option<&Sample> {
        self.sample.as_ref()
    }
}

/// All that was kept, and the last if it was not.
fn with_last<'a, T>(
    kept: &'a [T],
    last: Option<&'a T>,
    step: impl Fn(&T) -> u64,
) -> impl Iterator<Item = &'a T> {
    let is_extra = last.map(&step) != kept.last().map(&step);
    kept.iter().chain(last.filter(|_| is_extra))
}

impl Sink for History {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.last = Some(*record);
        self.step_seconds += record.seconds;
        self.steps.push(*record);
        self.predictions.step(record)
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        self.predictions.event(event)?;
        match *event {
            Event::Evaluated { step, loss, accuracy, seconds, .. } => {
                let found = Evaluated { step, loss, accuracy };
                self.evaluations.push(found);
                self.last_evaluation = Some(found);
                self.best_loss = Some(self.best_loss.map_or(loss, |best| best.min(loss)));
                let best =
                    |best: Option<f64>| accuracy.map(|now| best.map_or(now, |best| best.max(now)));
                self.best_accuracy = best(self.best_accuracy).or(self.best_accuracy);
                self.other_seconds += seconds;
            }
            Event::Viewed { step, guesses, seconds } => {
                let view = View { step, guesses: guesses.to_vec() };
                self.views.push(view.clone());
                self.last_view = Some(view);
                self.other_seconds += seconds;
            }
            Event::Saved { pause_seconds, .. } => self.other_seconds += pause_seconds,
            Event::PredictionPrepared { seconds, .. } => self.other_seconds += seconds,
            Event::Predicted { prediction, .. } => self.other_seconds += prediction.seconds,
            Event::PredictionJudged { judgement, .. } => self.other_seconds += judgement.seconds,
            Event::Ranks { ranks, .. } => {
                if ranks.first().is_some_and(|first| first.rank == 0) {
                    self.ranks.clear();
                }
                self.ranks.extend_from_slice(ranks);
            }
            Event::Sampled { step, prompt, text } => {
                let (prompt, text) = (prompt.to_owned(), text.to_owned());
                self.sample = Some(Sample { step, prompt, text });
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Throughput;
    use super::super::thinned::KEPT_MIN;
    use super::*;
    use storm_model::Unit;

    /// A step of a second.
    pub(in super::super) fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            loss: 0.0,
            accuracy: None,
            gradient_norm: 0.0,
            learning_rate: 0.0,
            throughput: Throughput::new(Unit::Tokens, step, 1.0),
            seconds: 1.0,
            device_bytes: 0,
            host_bytes: 0,
            process_bytes: None,
            data_wait_seconds: 0.0,
            hidden_share: None,
            compute_share: None,
            phase: None,
        }
    }

    #[test]
    fn a_long_run_is_thinned_and_keeps_its_end_and_its_best() {
        let mut history = History::new();
        let count = 10 * KEPT_MIN as u64 + 8;
        // It is not among those that are kept.
        let extreme = count / 2 + 1;
        for step in 1..=count {
            let record = record(step);
            history.step(&record).expect("taken down");
            let loss = if step == extreme { 0.5 } else { 1.0 };
            let (accuracy, is_best, seconds) = (None, false, 0.0);
            let evaluated = Event::Evaluated { step, loss, accuracy, is_best, seconds };
            history.event(&evaluated).expect("taken down");
        }
        let steps: Vec<u64> = history.steps().map(|record| record.step).collect();
        let evaluations: Vec<u64> = history.evaluations().map(|found| found.step).collect();
        assert_eq!(evaluations, steps);
        assert!(steps.len() <= 2 * KEPT_MIN + 1, "{}", steps.len());
        assert_eq!(steps.last(), Some(&count));
        assert!(steps.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(!steps.contains(&extreme));
        assert_eq!(history.best_loss(), Some(0.5));
    }
}
