use super::thinned::Thinned;
use super::{Sink, StepRecord};
use crate::predict::Calibration;
use crate::{Event, ParameterGroup, Phase, Prediction, RunError, UpdateSeen, UpdatesSeen, Verdict};

/// Statistics of predictions: totals per phase, and the outcomes of jumps.
#[derive(Clone, Debug)]
pub struct Predictions {
    /// In the order of [`Phase::ALL`].
    phases: [PhaseTotals; 4],
    /// The phase of the last step.
    last: Option<Phase>,
    predicted: Thinned<(u64, Prediction)>,
    /// Jumps that were accepted.
    pub accepted: u64,
    /// Jumps that were rejected.
    pub refused: u64,
    /// Corrections after which the jumps were kept.
    pub kept: u64,
    /// Corrections after which the jumps were undone.
    pub undone: u64,
    /// Predictions in which a learned controller chose not to jump.
    pub declined: u64,
    calibration: Calibration,
    /// The last update statistics, and the sums and count of all.
    updates: UpdatesSeen,
    update_sums: [(u64, [f64; 2]); ParameterGroup::ALL.len()],
}

/// Totals of a phase over the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTotals {
    /// Steps made in it.
    pub steps: u64,
    /// Time spent in it.
    pub seconds: f64,
    /// Highest sampled device memory of the process in its steps.
    pub device_bytes_peak: u64,
    /// Highest sampled resident memory of the process in its steps.
    pub process_bytes_peak: u64,
}

impl Predictions {
    pub(super) fn new() -> Predictions {
        Predictions {
            phases: [PhaseTotals::default(); 4],
            last: None,
            predicted: Thinned::new(),
            accepted: 0,
            refused: 0,
            kept: 0,
            undone: 0,
            declined: 0,
            calibration: Calibration::new(),
            updates: UpdatesSeen::default(),
            update_sums: Default::default(),
        }
    }

    /// Whether no phase has been recorded.
    pub fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    /// The totals of a phase.
    pub fn of(&self, phase: Phase) -> &PhaseTotals {
        &self.phases[index(phase)]
    }

    /// The expectations of a learned controller compared with the outcomes.
    pub(super) fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// Cosine and ratio of a parameter group's updates: the mean, and the last. `None` if updates
    /// were not observed.
    pub fn updates(&self, group: ParameterGroup) -> Option<(UpdateSeen, UpdateSeen)> {
        let at = ParameterGroup::ALL.iter().position(|known| *known == group)?;
        let (count, sums) = self.update_sums[at];
        let [cosine, ratio] = sums.map(|sum| (sum / count as f64) as f32);
        Some((UpdateSeen { cosine, ratio }, self.updates.0[at]?))
    }

    /// Predictions with the step before each.
    pub(super) fn all(&self) -> &[(u64, Prediction)] {
        self.predicted.as_slice()
    }
}

fn index(phase: Phase) -> usize {
    Phase::ALL.iter().position(|known| *known == phase).unwrap_or(0)
}

impl Sink for Predictions {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        let Some(phase) = record.phase else { return Ok(()) };
        self.last = Some(phase);
        let totals = &mut self.phases[index(phase)];
        totals.steps += 1;
        totals.seconds += record.seconds;
        totals.device_bytes_peak = totals.device_bytes_peak.max(record.device_bytes);
        let process_bytes = record.process_bytes.unwrap_or(0);
        totals.process_bytes_peak = totals.process_bytes_peak.max(process_bytes);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match *event {
            Event::PredictionPrepared { seconds, .. } => {
                self.phases[index(self.last.unwrap_or(Phase::Full))].seconds += seconds;
            }
            Event::UpdatesSeen { updates, .. } => {
                self.updates = updates;
                for ((count, sums), seen) in self.update_sums.iter_mut().zip(updates.0) {
                    let Some(UpdateSeen { cosine, ratio }) = seen else { continue };
                    *count += 1;
                    sums[0] += f64::from(cosine);
                    sums[1] += f64::from(ratio);
                }
            }
            Event::Jumped { jump, .. } => {
                if let Some(expected) = jump.expected {
                    let accepted = jump.verdict == Verdict::Accepted;
                    let change = (jump.loss / jump.loss_before).ln();
                    self.calibration.add(
                        expected.acceptance as f32,
                        accepted,
                        expected.change,
                        if change.is_finite() { change } else { 0.0 },
                    );
                }
            }
            Event::Predicted { step, prediction } => {
                self.declined += u64::from(prediction.made == 0);
                self.predicted.push((step, prediction));
                self.accepted += u64::from(prediction.accepted);
                self.refused += u64::from(prediction.made.saturating_sub(prediction.accepted));
                let totals = &mut self.phases[index(Phase::Predict)];
                totals.seconds += prediction.seconds;
                totals.device_bytes_peak = totals.device_bytes_peak.max(prediction.device_bytes);
            }
            Event::PredictionJudged { judgement, .. } => {
                match judgement.kept {
                    true => self.kept += 1,
                    false => self.undone += 1,
                }
                self.phases[index(Phase::Correct)].seconds += judgement.seconds;
            }
            _ => {}
        }
        Ok(())
    }
}
