use super::thinned::Thinned;
use super::{Sink, StepRecord};
use crate::{Event, RunError};
use storm_model::Unit;

/// Statistics of a run since it last started or changed its plan: the part that ran under one plan and budget.
///
/// This defines the throughput of a run: tokens or images of all steps over the time of those steps. A step is timed
/// from requesting its data to its loss. Evaluations and pauses for checkpoints are therefore excluded and counted
/// separately. A checkpoint written in the background slows steps down, which is included.
#[derive(Clone, Debug)]
pub struct Part {
    steps: u64,
    unit: Unit,
    units: f64,
    seconds: f64,
    data_wait_seconds: f64,
    /// Time of each step.
    step_seconds: Thinned<f64>,
    device_bytes_peak: u64,
    evaluation_seconds: f64,
    paused_seconds: f64,
    written_seconds: f64,
}

impl Default for Part {
    fn default() -> Part {
        Part::new()
    }
}

impl Part {
    /// No steps yet.
    pub fn new() -> Part {
        Part {
            steps: 0,
            unit: Unit::default(),
            units: 0.0,
            seconds: 0.0,
            data_wait_seconds: 0.0,
            step_seconds: Thinned::new(),
            device_bytes_peak: 0,
            evaluation_seconds: 0.0,
            paused_seconds: 0.0,
            written_seconds: 0.0,
        }
    }

    /// Number of steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The unit of the model's input: tokens or images.
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// Throughput over all steps; `None` if there are none.
    pub fn units_per_second(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.units / self.seconds.max(1e-9))
    }

    /// Time of all steps.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Part of that time spent waiting for data.
    pub fn data_wait_seconds(&self) -> f64 {
        self.data_wait_seconds
    }

    /// Median time of a step; `None` if there are none.
    pub fn median_step_seconds(&self) -> Option<f64> {
        let mut seconds = self.step_seconds.as_slice().to_vec();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied()
    }

    /// Highest sampled device memory.
    pub fn device_bytes_peak(&self) -> u64 {
        self.device_bytes_peak
    }

    /// Time of evaluations between steps.
    pub fn evaluation_seconds(&self) -> f64 {
        self.evaluation_seconds
    }

    /// Time that steps were paused for checkpoints.
    pub fn paused_seconds(&self) -> f64 {
        self.paused_seconds
    }

    /// Time during which checkpoints were written in the background.
    pub fn written_seconds(&self) -> f64 {
        self.written_seconds
    }
}

impl Sink for Part {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.steps += 1;
        self.unit = record.throughput.unit();
        self.units += record.throughput.per_second() * record.seconds;
        self.seconds += record.seconds;
        self.data_wait_seconds += record.data_wait_seconds;
        self.step_seconds.push(record.seconds);
        self.device_bytes_peak = self.device_bytes_peak.max(record.device_bytes);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match *event {
            Event::Started { .. } => *self = Part::new(),
            Event::Evaluated { seconds, .. }
            | Event::Tested { seconds, .. }
            | Event::Viewed { seconds, .. } => {
                self.evaluation_seconds += seconds;
            }
            Event::Saved { seconds, pause_seconds, .. } => {
                self.paused_seconds += pause_seconds;
                self.written_seconds += (seconds - pause_seconds).max(0.0);
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Throughput;
    use super::super::history::tests::record;
    use super::*;
    use std::path::Path;

    fn saved(seconds: f64, pause_seconds: f64) -> Event<'static> {
        let path = Path::new("step-1");
        Event::Saved { step: 1, path, seconds, pause_seconds, before_seconds: 0.0 }
    }

    #[test]
    fn a_part_begins_with_each_start() {
        let mut part = Part::new();
        let mut step = |step: u64, seconds: f64, device_bytes: u64| {
            let throughput = Throughput::new(Unit::Tokens, step, 300.0 / seconds);
            let record = StepRecord { seconds, throughput, device_bytes, ..record(step) };
            part.step(&record).expect("taken down");
            part.clone()
        };
        let before = step(1, 9.0, 9000);
        assert_eq!((before.device_bytes_peak(), before.steps()), (9000, 1));
        // Planned again, for less.
        part.event(&Event::Started { step: 1, steps: 4 }).expect("taken down");
        assert_eq!((part.steps(), part.units_per_second(), part.device_bytes_peak()), (0, None, 0));
        let mut step = |step: u64, seconds: f64, device_bytes: u64| {
            let throughput = Throughput::new(Unit::Tokens, step, 300.0 / seconds);
            let record = StepRecord { seconds, throughput, device_bytes, ..record(step) };
            part.step(&record).expect("taken down");
        };
        step(2, 1.0, 5000);
        step(3, 1.0, 5500);
        step(4, 4.0, 5400);
        assert_eq!(part.device_bytes_peak(), 5500);
        assert_eq!(part.median_step_seconds(), Some(1.0));
        // 900 tokens in 6 seconds.
        let speed = part.units_per_second().expect("steps were made");
        assert!((speed - 150.0).abs() < 1e-9, "{speed}");
    }

    #[test]
    fn what_is_between_steps_is_counted_by_itself() {
        let mut part = Part::new();
        part.step(&record(1)).expect("taken down");
        let speed = part.units_per_second();
        let evaluated =
            Event::Evaluated { step: 1, loss: 1.0, accuracy: None, is_best: true, seconds: 2.0 };
        // One beside the steps, one that they waited for.
        for event in [evaluated, saved(5.0, 0.5), saved(3.0, 3.5)] {
            part.event(&event).expect("taken down");
        }
        assert_eq!(part.units_per_second(), speed);
        assert_eq!((part.evaluation_seconds(), part.paused_seconds()), (2.0, 4.0));
        assert_eq!(part.written_seconds(), 4.5);
    }
}
