//! Records of a run: metrics as JSON lines, TensorBoard files, and a history for reports.

mod history;
mod measure;
mod metrics;
mod part;
mod predictions;
mod report;
mod tensorboard;
mod thinned;
mod throughput;

pub use history::{Evaluated, History, Sample, Tested, View};
pub(crate) use measure::process_bytes;
pub use measure::{Measure, StepRecord};
pub use metrics::{MetricsFile, read_metrics};
pub use part::Part;
pub use predictions::{PhaseTotals, Predictions};
pub use report::{LastPlan, Picture, Pictures, PlanFacts, RunFacts, Shown, write_report};
pub use tensorboard::TensorBoardFile;
pub use throughput::Throughput;

use crate::{Event, Observed, Observer, RunError, StepEvent};

/// Most ranks in one event.
const RANKS_AT_ONCE: usize = 256;

/// Records what a run does.
pub trait Sink {
    /// Records a step.
    ///
    /// # Errors
    /// The step cannot be recorded; the run ends.
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError>;

    /// Records any other event.
    ///
    /// # Errors
    /// Like [`Sink::step`].
    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError>;
}

/// Measures every step once and passes it to all sinks.
pub struct Recorder<'a> {
    measure: &'a mut Measure,
    sinks: Vec<&'a mut dyn Sink>,
}

impl<'a> Recorder<'a> {
    /// A recorder over these sinks, in this order.
    pub fn new(measure: &'a mut Measure, sinks: Vec<&'a mut dyn Sink>) -> Recorder<'a> {
        Recorder { measure, sinks }
    }
}

impl Observer for Recorder<'_> {
    fn step(&mut self, step: &StepEvent, observed: &mut dyn Observed) -> Result<(), RunError> {
        let record = self.measure.step(step, observed)?;
        self.sinks.iter_mut().try_for_each(|sink| sink.step(&record))?;
        if !self.measure.looks() {
            return Ok(());
        }
        // In chunks that fit in a line of the metrics.
        for ranks in observed.ranks().chunks(RANKS_AT_ONCE) {
            let event = Event::Ranks { step: step.step, ranks };
            self.sinks.iter_mut().try_for_each(|sink| sink.event(&event))?;
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        if let Event::Started { .. } = event {
            self.measure.restart();
        }
        self.sinks.iter_mut().try_for_each(|sink| sink.event(event))
    }
}
