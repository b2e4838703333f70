//! Runs predictions with a trainer: phases, directions, jumps and undo.

use super::copies::{CHUNK, Copies, PIECE_ELEMENTS, WithCopies};
use super::direction::{Averaged, Course, decay, mean_factor};
use super::held_out::HeldOut;
use super::int8::{Int8Probe, ProbeDevice};
use super::jump::f32_at;
use super::phases::{Due, Phases};
use super::probe::Measured;
use super::rssm::{Chosen, Expectation, Rssm, Settings, StepSeen};
use super::state::{Point, PredictState, Undo, extrapolated};
use super::updates::UpdateWatch;
use super::write::{Jumped, Origin, Work};
use super::{Accept, Controller, Direction, Phase, PredictOptions, PredictionCost};
use crate::{
    AnyBatch, Event, Observer, RunError, StatePart, StepEvent, TrainError, Trainer, Verified,
};
use rayon::prelude::*;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::time::Instant;
use storm_device::PlanDevice;
use storm_plan::Idle;

/// The outcome of a jump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The probe loss fell by more than its noise, or every jump is accepted.
    Accepted,
    /// The probe loss did not fall. The weights were restored.
    Refused,
    /// The weights or the probe loss are not finite. The weights were restored.
    NotFinite,
    /// Rounding left every weight unchanged.
    Unmoved,
}

impl Verdict {
    /// Its name in logs.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Accepted => "accepted",
            Verdict::Refused => "refused",
            Verdict::NotFinite => "not-finite",
            Verdict::Unmoved => "unmoved",
        }
    }
}

/// A jump, θ ← θ + τ·d.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Jump {
    /// Its length, in units of the direction.
    pub tau: f32,
    /// Norm of the change of the stored weights.
    #[serde(deserialize_with = "number_or_null")]
    pub distance: f64,
    /// Probe loss before it. NaN if not measured.
    #[serde(deserialize_with = "number_or_null")]
    pub loss_before: f64,
    /// Probe loss after it. NaN if not measured.
    #[serde(deserialize_with = "number_or_null")]
    pub loss: f64,
    /// Standard error of the change of the loss.
    #[serde(deserialize_with = "number_or_null")]
    pub noise: f64,
    /// Its outcome.
    pub verdict: Verdict,
    /// The expectation of a learned controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<Expectation>,
}

/// The jumps between two steps, in total.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Jumps accepted.
    pub accepted: u32,
    /// Jumps attempted.
    pub made: u32,
    /// Total length of the accepted jumps, in units of the direction.
    pub tau: f32,
    /// Probe loss before the first jump. NaN if not measured.
    #[serde(deserialize_with = "number_or_null")]
    pub loss_before: f64,
    /// Probe loss after the last accepted jump. NaN if not measured.
    #[serde(deserialize_with = "number_or_null")]
    pub loss: f64,
    /// Time taken, including copies and losses.
    pub seconds: f64,
    /// Peak device memory of the process seen while losses were measured. 0 if none were.
    #[serde(default)]
    pub device_bytes: u64,
}

/// The result of a correction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// The held-out loss after its steps. NaN if one of them was non-finite.
    #[serde(deserialize_with = "number_or_null")]
    pub loss: f64,
    /// The loss expected from the trend before the jumps.
    #[serde(deserialize_with = "number_or_null")]
    pub expected: f64,
    /// Whether the jumps are kept. Otherwise the state from before them was restored.
    pub kept: bool,
    /// Time taken, including the restore.
    pub seconds: f64,
}

/// JSON has no NaN, so it is written as null.
fn number_or_null<'de, D: Deserializer<'de>>(source: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(source)?.unwrap_or(f64::NAN))
}

/// NaN if there is no measurement.
fn loss_of(measured: Option<&Measured>) -> f64 {
    measured.map_or(f64::NAN, Measured::loss)
}

/// The position that an undo returned to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BackTo {
    pub(crate) updates: u32,
    pub(crate) data: Value,
}

/// A finished step.
pub(crate) struct Made<'a> {
    pub(crate) step: u64,
    /// Its metrics.
    pub(crate) event: StepEvent,
    /// Steps left in the run after it.
    pub(crate) steps_left: u64,
    /// The data position.
    pub(crate) data: &'a Value,
}

/// The predictions of a run.
pub(crate) struct Predictor<D: PlanDevice> {
    options: PredictOptions,
    phases: Phases,
    copies: Copies,
    rssm: Option<Rssm>,
    /// For a learned controller. `None` if the optimizer does not record update statistics.
    updates: Option<UpdateWatch>,
    /// `None` if every jump is accepted.
    held_out: Option<HeldOut<D>>,
    /// Whether `copies.reference` holds the weights at the start of the window.
    has_reference: bool,
    /// Updates in the average.
    averaged: u64,
    start: Option<Point>,
    undo: Option<Undo>,
    work: Work,
    /// Peak device memory seen in this prediction.
    device_bytes: u64,
}

/// Passes over held-out micro-batches that a jump needs: the loss before and after it, and the same
/// for its correction.
const PASSES: u32 = 4;

/// Times a prediction with one jump, and the judgement of its correction. Call it before training
/// begins; it changes no bit of the trainer. The held-out data and the device are those of
/// [`Run::predict`](crate::Run::predict).
///
/// # Errors
/// Like [`Run::predict`](crate::Run::predict); or the device failed.
pub fn prediction_seconds<D: PlanDevice>(
    trainer: &mut Trainer<D>,
    options: PredictOptions,
    steps: u64,
    mut held_out: Vec<AnyBatch>,
    device: Option<ProbeDevice<D>>,
) -> Result<f64, TrainError> {
    let check = held_out.split_off(held_out.len() / 2);
    let mut predictor = Predictor::new(trainer, options, steps, [held_out, check], device)?;
    // The first time also faults in the pages of the copies.
    predictor.rehearse(trainer)?;
    let begun = Instant::now();
    predictor.rehearse(trainer)?;
    Ok(begun.elapsed().as_secs_f64())
}

/// The time of a step that prepares predictions, apart from predictions and judgements themselves.
struct Preparing {
    since: Instant,
    /// `None` if nothing was prepared.
    seconds: Option<f64>,
}

impl Preparing {
    fn new() -> Preparing {
        Preparing { since: Instant::now(), seconds: None }
    }

    /// Adds the time since the last count or restart.
    fn count(&mut self) {
        *self.seconds.get_or_insert(0.0) += self.since.elapsed().as_secs_f64();
        self.restart();
    }

    /// Leaves out the time until now.
    fn restart(&mut self) {
        self.since = Instant::now();
    }
}

impl<D: PlanDevice> Predictor<D> {
    /// Allocates the copies, and commits the probe to its device if it has one. Both sets of
    /// held-out batches are used for nothing else. They are unused if every jump is accepted.
    ///
    /// # Errors
    /// An option is invalid, there is too little held-out data, or not enough memory.
    pub(crate) fn new(
        trainer: &mut Trainer<D>,
        options: PredictOptions,
        steps: u64,
        [probe, check]: [Vec<AnyBatch>; 2],
        device: Option<ProbeDevice<D>>,
    ) -> Result<Predictor<D>, TrainError> {
        options.check(steps)?;
        let rssm = match options.controller {
            Controller::Rssm { tau, cost } => {
                let cost_steps = match cost {
                    PredictionCost::Counted => {
                        // A forward pass is about a third of the work of a training one.
                        let passes = f64::from(PASSES) / 3.0 * probe.len() as f64;
                        passes / trainer.micro_batches() as f64
                    }
                    PredictionCost::Steps(steps) => steps,
                };
                let settings = Settings { tau, cost_steps, correct: options.lengths.correct };
                Some(Rssm::new(trainer.options().seed, settings)?)
            }
            Controller::Constant { .. } | Controller::LineSearch { .. } => None,
        };
        let updates = rssm.as_ref().and_then(|_| UpdateWatch::new(trainer));
        let mut copies = Copies::new(trainer, &options)?;
        let mut work = Work::default();
        let held_out = match options.accept {
            Accept::IfLower => {
                let sets = [probe, check];
                Some(HeldOut::new(trainer, &mut copies, &mut work, &options, sets, device)?)
            }
            Accept::Always => None,
        };
        Ok(Predictor {
            rssm,
            updates,
            phases: Phases::new(options.lengths),
            copies,
            held_out,
            options,
            has_reference: false,
            averaged: 0,
            start: None,
            undo: None,
            work,
            device_bytes: 0,
        })
    }

    /// Host memory it needs, without the held-out data.
    pub(crate) fn size_bytes(&self) -> u64 {
        let int8 = self.held_out.as_ref().and_then(|held_out| held_out.int8.as_ref());
        self.copies.size_bytes()
            + self.updates.as_ref().map_or(0, UpdateWatch::size_bytes)
            + int8.map_or(0, Int8Probe::host_bytes)
    }

    /// The phase of the next step.
    pub(crate) fn phase(&self) -> Phase {
        self.phases.phase()
    }

    /// Reads the update statistics right after a step.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn see_updates(&mut self, trainer: &mut Trainer<D>) -> Result<(), TrainError> {
        self.updates.as_mut().map_or(Ok(()), |updates| updates.after_step(trainer))
    }

    /// Called after the trainer's state was restored.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn restart_updates(&mut self, trainer: &mut Trainer<D>) -> Result<(), TrainError> {
        self.updates.as_mut().map_or(Ok(()), |updates| updates.restart(trainer))
    }

    /// Does what is due after a step. Returns the position that it returned to, if jumps were
    /// undone.
    ///
    /// # Errors
    /// The device, the data or the observer failed.
    pub(crate) fn after_step(
        &mut self,
        trainer: &mut Trainer<D>,
        made: &Made<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<BackTo>, RunError> {
        let mut preparing = Preparing::new();
        if let Some(rssm) = &mut self.rssm {
            let all = (made.step + made.steps_left) as f32;
            let updates = self.updates.as_ref().map(UpdateWatch::shown).unwrap_or_default();
            rssm.see(&StepSeen {
                loss: made.event.loss,
                gradient_norm: made.event.gradient_norm,
                learning_rate: made.event.learning_rate,
                progress: made.step as f32 / all,
                phase: self.phases.phase(),
                updates,
            });
            if self.updates.is_some() {
                observer.event(&Event::UpdatesSeen { step: made.step, updates })?;
            }
            preparing.count();
        }
        if let (Some((what, window)), Phase::Full) =
            (self.options.direction.averaged(), self.phases.phase())
        {
            self.average(trainer, what, window)?;
            preparing.count();
        }
        let mut back_to = None;
        // Predictions and judgements report their own time.
        match self.phases.after_step(made.steps_left) {
            Due::Nothing => {}
            Due::FirstFull => {
                self.start = self.judged_loss(trainer)?;
                preparing.count();
            }
            Due::Predict => self.predict(trainer, made, observer)?,
            Due::Judge => {
                let begun = Instant::now();
                let loss = self.judged_loss(trainer)?.map_or(f64::NAN, |point| point.loss());
                back_to = self.judge(trainer, loss, made.step, begun, observer)?;
            }
        }
        preparing.restart();
        if self.is_window_due() {
            self.copies.reference.take(trainer)?;
            self.has_reference = true;
            self.averaged = 0;
            if self.options.direction.averaged().is_some() {
                self.copies.clear_state();
            }
            preparing.count();
        }
        if let Some(number) = self.copy_due() {
            self.copies.copy_weights(trainer, number)?;
            preparing.count();
        }
        if let Some(seconds) = preparing.seconds {
            observer.event(&Event::PredictionPrepared { step: made.step, seconds })?;
        }
        Ok(back_to)
    }

    /// The held-out loss at the current weights, for the trend and corrections. `None` if not
    /// measured. A probe in 8 bits uses the reference copy, which is free outside of full phases.
    fn judged_loss(&mut self, trainer: &mut Trainer<D>) -> Result<Option<Point>, TrainError> {
        if self.int8().is_none() {
            return self.loss_of_corrections(trainer);
        }
        self.copies.reference.take(trainer)?;
        self.begin_measuring(trainer, Origin::Reference)?;
        let point = self.loss_of_corrections(trainer)?;
        self.end_measuring(trainer)?;
        self.work.write_back(&self.copies, trainer)?;
        Ok(point)
    }

    /// The held-out loss for the trend and corrections. `None` if not measured.
    fn loss_of_corrections(
        &mut self,
        trainer: &mut Trainer<D>,
    ) -> Result<Option<Point>, TrainError> {
        let Some(held_out) = &mut self.held_out else { return Ok(None) };
        let loss = held_out.of_corrections(trainer)?.loss();
        Ok(Some(Point::new(trainer.updates(), loss)))
    }

    /// The probe in 8 bits, if losses are measured with it.
    fn int8(&mut self) -> Option<&mut Int8Probe<D>> {
        self.held_out.as_mut()?.int8.as_mut()
    }

    /// Before losses are measured: releases device memory. A probe in 8 bits takes what it needs of
    /// it, and gets the weights from a copy.
    fn begin_measuring(
        &mut self,
        trainer: &mut Trainer<D>,
        origin: Origin,
    ) -> Result<(), TrainError> {
        let nowhere = self.copies.nowhere();
        let Some(held_out) = &mut self.held_out else { return Ok(()) };
        let Some(int8) = &mut held_out.int8 else {
            trainer.release_idle(Idle::BesideEvaluation)?;
            return Ok(());
        };
        trainer.release_idle(Idle::WithParameters)?;
        int8.reclaim()?;
        let unmoved = Jumped::new(trainer, origin, &nowhere, 0.0, 0.0);
        self.work.write(&self.copies, &unmoved, int8)?;
        Ok(())
    }

    /// After losses were measured: takes the memory back. With a probe in 8 bits, the weights of
    /// the trainer must be written next.
    fn end_measuring(&mut self, trainer: &mut Trainer<D>) -> Result<(), TrainError> {
        if let Some(int8) = self.int8() {
            int8.release()?;
        }
        trainer.reclaim_idle()
    }

    /// Whether the window of the next prediction begins here.
    fn is_window_due(&self) -> bool {
        let Some(left) = self.phases.until_prediction() else { return false };
        match self.options.direction {
            direction if direction.averaged().is_some() => !self.has_reference,
            direction => left == direction.window(),
        }
    }

    /// The number of the weight copy that the direction takes here, if any.
    fn copy_due(&self) -> Option<usize> {
        let left = self.phases.until_prediction().filter(|_| self.has_reference)?;
        self.options.direction.copies_at().iter().position(|at| *at == left)
    }

    /// Called after a step with a non-finite loss or gradient. In a correction, restores the state
    /// from before the jumps. In other phases, returns `None`.
    ///
    /// # Errors
    /// The device, the data or the observer failed.
    pub(crate) fn after_bad_step(
        &mut self,
        trainer: &mut Trainer<D>,
        step: u64,
        observer: &mut dyn Observer,
    ) -> Result<Option<BackTo>, RunError> {
        if self.undo.is_none() {
            return Ok(None);
        }
        let back_to = self.judge(trainer, f64::NAN, step, Instant::now(), observer)?;
        if self.is_window_due() {
            self.copies.reference.take(trainer)?;
            self.has_reference = true;
        }
        Ok(back_to)
    }

    fn judge(
        &mut self,
        trainer: &mut Trainer<D>,
        loss: f64,
        step: u64,
        begun: Instant,
        observer: &mut dyn Observer,
    ) -> Result<Option<BackTo>, RunError> {
        let undo = self.undo.take().expect("jumps were made");
        let start = self.start.expect("a full phase began");
        let expected = extrapolated(&start, &undo.before, trainer.updates());
        // NaN is never kept.
        let kept = loss <= expected + self.options.margin;
        let back_to = match kept {
            true => {
                self.start = Some(Point::new(trainer.updates(), loss));
                None
            }
            false => {
                self.copies.undo.restore(trainer)?;
                trainer.set_updates(undo.before.updates);
                self.restart_updates(trainer)?;
                trainer.resume_source(&undo.data)?;
                self.start = Some(undo.before);
                Some(BackTo { updates: undo.before.updates, data: undo.data })
            }
        };
        self.phases.judged(kept);
        if let Some(rssm) = &mut self.rssm {
            rssm.judged(kept);
        }
        let seconds = begun.elapsed().as_secs_f64();
        let judgement = Judgement { loss, expected, kept, seconds };
        observer.event(&Event::PredictionJudged { step, judgement })?;
        Ok(back_to)
    }

    /// Adds the last update, or the weights after it, to the average.
    fn average(
        &mut self,
        trainer: &mut Trainer<D>,
        what: Averaged,
        window: u64,
    ) -> Result<(), TrainError> {
        let keep = decay(window) as f32;
        let Copies { weights, reference, state, .. } = &mut self.copies;
        let state = state.as_mut().expect("an average has it");
        let piece = &mut self.work.parameter;
        for (index, weight) in weights.iter().enumerate() {
            let size = weight.form.copied_bytes();
            let before = reference.bytes_mut(index);
            let state = state.bytes_mut(index);
            let value = weight.value();
            let elements = before.len() / size;
            for first in (0..elements).step_by(PIECE_ELEMENTS) {
                let count = PIECE_ELEMENTS.min(elements - first);
                piece.resize(count * size, 0);
                trainer.read_state(&value, first * size, piece)?;
                let before = &mut before[first * size..(first + count) * size];
                let averages = state[4 * first..4 * (first + count)].par_chunks_mut(4 * CHUNK);
                let values = piece.par_chunks(size * CHUNK);
                let befores = before.par_chunks_mut(size * CHUNK);
                averages.zip(values).zip(befores).for_each(|((averages, values), before)| {
                    for (at, average) in averages.chunks_exact_mut(4).enumerate() {
                        let value = weight.form.read(values, at);
                        let added = match what {
                            Averaged::Updates => value - weight.form.read(before, at),
                            Averaged::Weights => value,
                        };
                        let now = keep * f32_at(average, 0) + (1.0 - keep) * added;
                        average.copy_from_slice(&now.to_ne_bytes());
                    }
                    before.copy_from_slice(values);
                });
            }
        }
        self.averaged += 1;
        Ok(())
    }

    fn predict(
        &mut self,
        trainer: &mut Trainer<D>,
        made: &Made<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let begun = Instant::now();
        let chosen = self.rssm.as_mut().map(Rssm::choose);
        if let Some(None) = chosen {
            return self.train_fully(made, begun, observer);
        }
        let chosen: Option<Chosen> = chosen.flatten();
        self.copies.undo.take(trainer)?;
        self.begin_measuring(trainer, Origin::Undo)?;
        let before = self.loss_of_corrections(trainer)?;
        self.see_memory(trainer)?;
        let courses = self.courses();
        let mut measured = self.probed(trainer)?;
        let loss_before = loss_of(measured.as_ref());
        let (mut total, mut accepted, mut jumps) = (0.0, 0, 0);
        let of_chosen = chosen.map(|chosen| chosen.tau);
        while let Some(tau) = self.options.controller.next(accepted, of_chosen) {
            let distance = self.write_weights(trainer, &courses, total + tau, total)?;
            let now = self.probed(trainer)?;
            self.see_memory(trainer)?;
            let change = match (&self.held_out, &measured, &now) {
                (Some(held_out), Some(before), Some(now)) => {
                    Some(held_out.probe().change(before, now))
                }
                _ => None,
            };
            let is_finite = now.as_ref().is_none_or(|now| now.loss().is_finite());
            let verdict = match change {
                _ if !(distance.is_finite() && is_finite) => Verdict::NotFinite,
                _ if distance == 0.0 => Verdict::Unmoved,
                Some(change) if !change.falls(self.options.noise) => Verdict::Refused,
                _ => Verdict::Accepted,
            };
            jumps += 1;
            let jump = Jump {
                tau,
                distance,
                loss_before: loss_of(measured.as_ref()),
                loss: loss_of(now.as_ref()),
                noise: change.map_or(f64::NAN, |change| change.error),
                verdict,
                expected: chosen.map(|chosen| chosen.expected),
            };
            if let (Some(rssm), Some(chosen)) = (&mut self.rssm, &chosen) {
                let is_accepted = verdict == Verdict::Accepted;
                rssm.learn_outcome(chosen, jump.loss_before, jump.loss, is_accepted);
            }
            // A probe in 8 bits has the weights for now.
            if verdict != Verdict::Accepted && self.int8().is_none() {
                self.leave_at(trainer, &courses, accepted, total)?;
            }
            observer.event(&Event::Jumped { step: made.step, jump })?;
            if verdict != Verdict::Accepted {
                break;
            }
            total += tau;
            measured = now;
            accepted += 1;
        }
        self.end_measuring(trainer)?;
        if self.int8().is_some() {
            self.leave_at(trainer, &courses, accepted, total)?;
        }
        self.has_reference = false;
        match before {
            Some(before) if accepted > 0 => {
                self.undo = Some(Undo { before, data: made.data.clone() });
            }
            before => self.start = before,
        }
        // Jumps that are always kept have no correction.
        self.phases.predicted(self.undo.is_some());
        let prediction = Prediction {
            accepted,
            made: jumps,
            tau: total,
            loss_before,
            loss: loss_of(measured.as_ref()),
            seconds: begun.elapsed().as_secs_f64(),
            device_bytes: std::mem::take(&mut self.device_bytes),
        };
        observer.event(&Event::Predicted { step: made.step, prediction })
    }

    /// The work of a prediction with one jump that is refused, and of the judgement that an accepted
    /// one would have. Changes no bit.
    fn rehearse(&mut self, trainer: &mut Trainer<D>) -> Result<(), TrainError> {
        self.copies.undo.take(trainer)?;
        self.begin_measuring(trainer, Origin::Undo)?;
        self.loss_of_corrections(trainer)?;
        self.probed(trainer)?;
        let nowhere = self.copies.nowhere();
        self.write_weights(trainer, &nowhere, 1.0, 0.0)?;
        self.probed(trainer)?;
        self.end_measuring(trainer)?;
        self.leave_at(trainer, &nowhere, 0, 0.0)?;
        self.judged_loss(trainer)?;
        trainer.synchronize()
    }

    /// Skips the jump, because the controller expects more from full steps. Nothing is copied or
    /// measured.
    fn train_fully(
        &mut self,
        made: &Made<'_>,
        begun: Instant,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        self.has_reference = false;
        self.phases.predicted(false);
        let prediction = Prediction {
            accepted: 0,
            made: 0,
            tau: 0.0,
            loss_before: f64::NAN,
            loss: f64::NAN,
            seconds: begun.elapsed().as_secs_f64(),
            device_bytes: 0,
        };
        observer.event(&Event::Predicted { step: made.step, prediction })
    }

    /// Records the device memory in use, if losses are measured.
    fn see_memory(&mut self, trainer: &Trainer<D>) -> Result<(), TrainError> {
        if let Some(held_out) = &self.held_out {
            self.device_bytes = self.device_bytes.max(held_out.memory_in_use(trainer)?);
        }
        Ok(())
    }

    /// The probe losses. `None` if not measured.
    fn probed(&mut self, trainer: &mut Trainer<D>) -> Result<Option<Measured>, TrainError> {
        self.held_out.as_mut().map(|held_out| held_out.of_jumps(trainer)).transpose()
    }

    /// The direction of each weight.
    fn courses(&mut self) -> Vec<Course> {
        let direction = self.options.direction;
        let averaged = self.averaged;
        (0..self.copies.weights.len())
            .map(|index| match direction {
                Direction::LastUpdate | Direction::Difference { .. } => Course::Difference,
                Direction::Dmd { .. } => {
                    self.copies.extrapolate(index);
                    Course::State(1.0)
                }
                Direction::Average { window } => Course::State(mean_factor(window, averaged)),
                Direction::WeightAverage { window } => {
                    Course::ToState(mean_factor(window, averaged))
                }
                Direction::Outer { momentum, .. } => {
                    self.copies.add_to_state(index, momentum);
                    Course::State(momentum)
                }
                Direction::None { .. } => Course::Nowhere,
                Direction::Random { .. } => Course::Signs(self.copies.root_mean_square(index)),
            })
            .collect()
    }

    /// Writes θ + τ·d to where losses are measured. Returns the norm of the change of the stored
    /// weights since the jump to `before`.
    fn write_weights(
        &mut self,
        trainer: &mut Trainer<D>,
        courses: &[Course],
        tau: f32,
        before: f32,
    ) -> Result<f64, TrainError> {
        let moved = Jumped::new(trainer, Origin::Undo, courses, tau, before);
        match self.held_out.as_mut().and_then(|held_out| held_out.int8.as_mut()) {
            Some(int8) => self.work.write(&self.copies, &moved, int8),
            None => self.work.write(&self.copies, &moved, trainer),
        }
    }

    /// Writes the weights to the trainer as the accepted jumps leave them.
    fn leave_at(
        &mut self,
        trainer: &mut Trainer<D>,
        courses: &[Course],
        accepted: u32,
        tau: f32,
    ) -> Result<(), TrainError> {
        if accepted == 0 {
            return self.copies.restore_weights(trainer);
        }
        let moved = Jumped::new(trainer, Origin::Undo, courses, tau, tau);
        self.work.write(&self.copies, &moved, trainer).map(drop)
    }

    /// The state for a checkpoint.
    pub(crate) fn state(&self) -> PredictState {
        PredictState {
            position: self.phases.position(),
            has_reference: self.has_reference,
            averaged: self.averaged,
            start: self.start,
            undo: self.undo.clone(),
        }
    }

    /// The trainer together with the copies, for a checkpoint.
    pub(crate) fn with_copies<'a>(&'a mut self, trainer: &'a mut Trainer<D>) -> WithCopies<'a, D> {
        let undo = self.undo.as_ref().map(|_| StatePart::Undo);
        let reference = self.has_reference.then_some(StatePart::Reference);
        let state = self.copies.state.as_ref().map(|_| StatePart::Direction);
        let mut controller = None;
        if let (Some(rssm), Some(state)) = (&mut self.rssm, &mut self.copies.controller) {
            rssm.write(state.bytes_mut(0));
            controller = Some(StatePart::Controller);
        }
        let held = [undo, reference, state, controller].into_iter().flatten().collect();
        WithCopies { trainer, copies: &mut self.copies, held }
    }

    /// Resumes from a checkpoint, once the copies are restored.
    ///
    /// # Errors
    /// It is from a run with other prediction options.
    pub(crate) fn resume(
        &mut self,
        state: &PredictState,
        verified: &Verified,
    ) -> Result<(), TrainError> {
        let other = |problem: &str| {
            let problem = format!(
                "the state of predictions in {} does not fit: {problem}; go on with the [predict] section that the run \
                 began with, or give another --name",
                verified.path().display()
            );
            Err(TrainError::Option { option: "predict", problem })
        };
        if !self.phases.resume(state.position) {
            return other("its phases are of other lengths");
        }
        let is_correcting = self.phases.phase() == Phase::Correct;
        let needed = [
            (StatePart::Undo, is_correcting),
            (StatePart::Reference, state.has_reference),
            (StatePart::Direction, self.copies.state.is_some()),
            (StatePart::Controller, self.rssm.is_some()),
        ];
        if needed.into_iter().any(|(part, is_needed)| is_needed && !verified.has(part)) {
            return other("copies of weights or the state of its controller are missing");
        }
        let needs_start = self.held_out.is_some() && self.phases.phase() != Phase::WarmUp;
        if state.undo.is_some() != is_correcting || state.start.is_some() != needs_start {
            return other("its phase has another state");
        }
        self.has_reference = state.has_reference;
        self.averaged = state.averaged;
        if let (Some(rssm), Some(state)) = (&mut self.rssm, &self.copies.controller) {
            rssm.read(state.bytes(0));
        }
        self.start = state.start;
        self.undo = state.undo.clone();
        Ok(())
    }
}
