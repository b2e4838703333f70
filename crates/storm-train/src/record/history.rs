use super::thinned::Thinned;
use super::{Sink, StepRecord};
use crate::{Event, RunError};

/// What a run did, thinned to what a picture can show: its size does not depend on how long the run is.
#[derive(Clone, Debug)]
pub struct History {
    steps: Thinned<StepRecord>,
    last: Option<StepRecord>,
    device_bytes_peak: u64,
    evaluations: Thinned<(u64, f64)>,
    last_evaluation: Option<(u64, f64)>,
    best_loss: Option<f64>,
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
            device_bytes_peak: 0,
            evaluations: Thinned::new(),
            last_evaluation: None,
            best_loss: None,
        }
    }

    /// Steps, the last one included.
    pub fn steps(&self) -> impl Iterator<Item = &StepRecord> {
        with_last(self.steps.as_slice(), self.last.as_ref(), |record| record.step)
    }

    /// The last step.
    pub fn last(&self) -> Option<&StepRecord> {
        self.last.as_ref()
    }

    /// Step and loss of evaluations, the last one included.
    pub fn evaluations(&self) -> impl Iterator<Item = &(u64, f64)> {
        with_last(self.evaluations.as_slice(), self.last_evaluation.as_ref(), |(step, _)| *step)
    }

    /// The least loss of all evaluations.
    pub fn best_loss(&self) -> Option<f64> {
        self.best_loss
    }

    /// Median seconds of the steps that are kept.
    pub fn median_step_seconds(&self) -> Option<f64> {
        let mut seconds: Vec<f64> = self.steps().map(|record| record.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied()
    }

    /// Most device memory that was seen.
    pub fn device_bytes_peak(&self) -> u64 {
        self.device_bytes_peak
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
        self.device_bytes_peak = self.device_bytes_peak.max(record.device_bytes);
        self.steps.push(*record);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        if let Event::Evaluated { step, loss, .. } = *event {
            self.evaluations.push((step, loss));
            self.last_evaluation = Some((step, loss));
            self.best_loss = Some(self.best_loss.map_or(loss, |best| best.min(loss)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::thinned::KEPT_MIN;
    use super::*;

    #[test]
    fn a_long_run_is_thinned_and_keeps_its_end_and_its_extremes() {
        let mut history = History::new();
        let count = 10 * KEPT_MIN as u64 + 8;
        // Neither is among those that are kept.
        let extreme = count / 2 + 1;
        for step in 1..=count {
            let record = StepRecord {
                step,
                loss: 0.0,
                gradient_norm: 0.0,
                learning_rate: 0.0,
                tokens: step,
                seconds: 1.0,
                tokens_per_second: 1.0,
                device_bytes: u64::from(step == extreme),
                host_bytes: 0,
                process_bytes: None,
                hidden_share: None,
                compute_share: None,
            };
            history.step(&record).expect("taken down");
            let loss = if step == extreme { 0.5 } else { 1.0 };
            let evaluated = Event::Evaluated { step, loss, is_best: false, seconds: 0.0 };
            history.event(&evaluated).expect("taken down");
        }
        let steps: Vec<u64> = history.steps().map(|record| record.step).collect();
        let evaluations: Vec<u64> = history.evaluations().map(|(step, _)| *step).collect();
        assert_eq!(evaluations, steps);
        assert!(steps.len() <= 2 * KEPT_MIN + 1, "{}", steps.len());
        assert_eq!(steps.last(), Some(&count));
        assert!(steps.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(!steps.contains(&extreme));
        assert_eq!((history.device_bytes_peak(), history.best_loss()), (1, Some(0.5)));
    }
}
