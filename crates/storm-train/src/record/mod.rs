//! What a run leaves behind: metrics as JSON lines, TensorBoard files, and a history for reports.

mod history;
mod measure;
mod metrics;
mod part;
mod predictions;
mod report;
mod tensorboard;
mod thinned;
mod throughput;

pub use history::{Evaluated, History, Sample, View};
pub(crate) use measure::process_bytes;
pub use measure::{Measure, StepRecord};
pub use metrics::{MetricsFile, read_metrics};
pub use part::Part;
pub use predictions::{PhaseTotals, Predictions};
pub use report::{LastPlan, Picture, Pictures, PlanFacts, RunFacts, Shown, write_report};
pub use tensorboard::TensorBoardFile;
pub use throughput::Throughput;

use crate::{Event, Observed, Observer, RunError, StepEvent};

/// The most ranks of one event.
const RANKS_AT_ONCE: usize = 256;

/// Something that takes down what a run does.
pub trait Sink {
    /// A step was made.
    ///
    /// # Errors
    /// It cannot be taken down; the run ends.
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError>;

    /// Something else happened.
    ///
    /// # Errors
    /// As [`Sink::step`].
    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError>;
}

/// Measures every step once and hands it to all sinks.
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
        // Few enough for a line of metrics.
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
