use super::{Sink, StepRecord};
use crate::{Event, RunError};

/// Points of a run that a page can show; every other one goes when there are twice as many.
const POINTS_MAX: usize = 2000;

/// What a run did, thinned to what a picture can show.
#[derive(Clone, Debug, Default)]
pub struct History {
    steps: Vec<StepRecord>,
    /// Only steps that are a multiple of this are kept.
    stride: u64,
    last: Option<StepRecord>,
    evaluations: Vec<(u64, f64)>,
    saves: Vec<(u64, f64)>,
}

impl History {
    /// Nothing yet.
    pub fn new() -> History {
        History { stride: 1, ..History::default() }
    }

    /// Steps, the last one included.
    pub fn steps(&self) -> impl Iterator<Item = &StepRecord> {
        let is_extra =
            self.last.as_ref().map(|last| last.step) != self.steps.last().map(|record| record.step);
        self.steps.iter().chain(self.last.iter().filter(move |_| is_extra))
    }

    /// The last step.
    pub fn last(&self) -> Option<&StepRecord> {
        self.last.as_ref()
    }

    /// Step and loss of each evaluation.
    pub fn evaluations(&self) -> &[(u64, f64)] {
        &self.evaluations
    }

    /// Of each checkpoint, its step and how long steps waited for it.
    pub fn saves(&self) -> &[(u64, f64)] {
        &self.saves
    }

    /// Median seconds of the steps that are kept.
    pub fn median_step_seconds(&self) -> Option<f64> {
        let mut seconds: Vec<f64> = self.steps().map(|record| record.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied()
    }

    /// Most device memory that was seen.
    pub fn device_bytes_peak(&self) -> u64 {
        self.steps().map(|record| record.device_bytes).max().unwrap_or(0)
    }

    fn thin(&mut self) {
        self.stride *= 2;
        let stride = self.stride;
        self.steps.retain(|record| record.step.is_multiple_of(stride));
    }
}

impl Sink for History {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.last = Some(*record);
        if record.step.is_multiple_of(self.stride) {
            self.steps.push(*record);
            if self.steps.len() > 2 * POINTS_MAX {
                self.thin();
            }
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match event {
            Event::Evaluated { step, loss, .. } => self.evaluations.push((*step, *loss)),
            Event::Saved { step, pause_seconds, .. } => self.saves.push((*step, *pause_seconds)),
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_is_thinned_and_keeps_its_end() {
        let mut history = History::new();
        let count = 10 * POINTS_MAX as u64 + 7;
        for step in 1..=count {
            let record = StepRecord {
                step,
                loss: 0.0,
                gradient_norm: 0.0,
                learning_rate: 0.0,
                tokens: step,
                seconds: 1.0,
                tokens_per_second: 1.0,
                device_bytes: step,
                host_bytes: 0,
                process_bytes: None,
                hidden_share: None,
                compute_share: None,
            };
            history.step(&record).expect("taken down");
        }
        let steps: Vec<u64> = history.steps().map(|record| record.step).collect();
        assert!(steps.len() <= 2 * POINTS_MAX + 1, "{}", steps.len());
        assert!(steps.len() > POINTS_MAX / 2);
        assert_eq!(steps.last(), Some(&count));
        assert!(steps.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(history.device_bytes_peak(), count);
    }
}
