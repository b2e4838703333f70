//! Turns a request into a trainer that is ready to run: plan, commit, trial, and a new plan if the machine does not
//! behave as predicted.
//!
//! The machine may refuse memory, and a profile may be wrong. Both are handled only here: `storm train` and `storm
//! bench` build a [`LaunchRequest`], implement [`LaunchSite`], and print notices.

mod commit;
mod notice;
mod request;
mod split;
mod trial;

pub use notice::{Correction, Notice, Replanned};
pub use request::{LaunchRequest, StepPlan, StepSize};
pub use split::{GuessedSplit, TimedSplit};
pub use trial::{Trial, TrialOptions, try_plan};

use crate::{Alarm, AnyBatch, RunError, TrainError, TrainOptions, Trainer};
use storm_device::PlanDevice;
use storm_plan::{Budget, HardwareProfile, PlanError, Tier, simulate};

/// What the caller of a launch provides.
pub trait LaunchSite<D: PlanDevice> {
    /// Options for a device limited to `budget` that runs `plan`. A device used before may pass on its memory. For a
    /// trial, the device must be created with recording enabled.
    fn device(&mut self, budget: Budget, plan: &StepPlan, before: Option<D>) -> D::Options;

    /// The micro-batches of a step, for a trial.
    ///
    /// # Errors
    /// The batches cannot be read.
    fn batches(&mut self, batch: usize, accumulate: usize) -> Result<Vec<AnyBatch>, RunError>;

    /// Reports progress.
    fn notice(&mut self, notice: Notice<'_>);
}

/// A request with its plan. The plan changes if memory is refused or a trial finds a better one.
#[derive(Clone, Debug)]
pub struct Launch {
    request: LaunchRequest,
    /// The budget for planning: less than the request's if the machine refused part of it.
    available: Budget,
    plan: StepPlan,
}

/// A trainer that is ready for its first step, and the results of its trials.
pub struct Launched<D: PlanDevice> {
    /// With its initial parameters.
    pub trainer: Trainer<D>,
    /// The micro-batch sizes that were tried, in order; empty without a trial.
    pub splits: Vec<TimedSplit>,
    /// How the profile was corrected; `None` if steps took as long as predicted, or without a trial.
    pub correction: Option<Correction>,
}

/// The result of replanning with less device memory.
pub struct Shrunk<D: PlanDevice> {
    /// Ready for its first step.
    pub trainer: Trainer<D>,
    /// Whether a smaller plan was found; if not, the plan did not change.
    pub is_smaller: bool,
}

impl Launch {
    /// Plans the request.
    ///
    /// # Errors
    /// [`PlanError::TooSmall`] if nothing fits, or the request is invalid.
    pub fn new(request: LaunchRequest) -> Result<Launch, TrainError> {
        let plan = request.plan()?;
        Ok(Launch { available: request.budget, request, plan })
    }

    /// The current plan.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// The profile, with the corrections from trials.
    pub fn profile(&self) -> &HardwareProfile {
        &self.request.profile
    }

    /// The budget that limits devices.
    pub fn budget(&self) -> Budget {
        self.request.budget
    }

    /// The training options, with the micro-batch size of the plan.
    pub fn options(&self) -> TrainOptions {
        TrainOptions { batch: self.plan.batch, ..self.request.options.clone() }
    }

    /// Commits the plan to a device. If the request asks for a trial, tries the plan and replans if it does not perform
    /// as predicted. Steps of a trial leave no trace: the returned trainer has made none.
    ///
    /// # Errors
    /// [`PlanError::TooSmall`] if the machine does not have enough memory; otherwise from the device, or from reading
    /// the batches of a trial.
    pub fn start<D: PlanDevice>(
        &mut self,
        site: &mut impl LaunchSite<D>,
        before: Option<D>,
    ) -> Result<Launched<D>, RunError> {
        let trainer = self.commit(site, before)?;
        self.keep_split();
        match self.request.trial {
            Some(trial) => self.try_out(site, trainer, trial),
            None => Ok(Launched { trainer, splits: Vec::new(), correction: None }),
        }
    }

    /// Fixes the micro-batch size to that of the plan.
    fn keep_split(&mut self) {
        self.request.step = StepSize::MicroBatches(self.plan.accumulate);
        self.request.options.batch = self.plan.batch;
    }

    /// Runs some steps to test the prediction, with several micro-batch sizes if the request leaves the size open. If
    /// the prediction is wrong for the fastest size, corrects the profile and replans.
    fn try_out<D: PlanDevice>(
        &mut self,
        site: &mut impl LaunchSite<D>,
        mut trainer: Trainer<D>,
        options: TrialOptions,
    ) -> Result<Launched<D>, RunError> {
        let trial = self.time(site, &mut trainer, options)?;
        let mut splits = vec![self.timed(&trial)];
        let mut device = Some(trainer.into_device());
        let trial = self.try_splits(site, trial, &mut splits, &mut device, options)?;
        let (trainer, correction) = self.correct(site, trial, device, options)?;
        Ok(Launched { trainer, splits, correction })
    }

    /// Tries other micro-batch sizes, and takes the fastest.
    fn try_splits<D: PlanDevice>(
        &mut self,
        site: &mut impl LaunchSite<D>,
        first: Trial,
        splits: &mut Vec<TimedSplit>,
        device: &mut Option<D>,
        options: TrialOptions,
    ) -> Result<Trial, RunError> {
        let mut fastest = (self.plan.clone(), first);
        let guesses = self.plan.guesses.clone();
        let mut seen = vec![self.plan.batch];
        while splits.len() < options.splits
            && let Some(guess) = split::next(&guesses, &seen, fastest.1.step_seconds)
        {
            seen.push(guess.batch);
            let available = self.available;
            (self.plan.batch, self.plan.accumulate) = (guess.batch, guess.accumulate);
            self.keep_split();
            let committed = self.planned_again().and_then(|plan| {
                self.plan = plan;
                self.commit(site, device.take())
            });
            let mut trainer = match committed {
                Ok(trainer) => trainer,
                Err(error) => {
                    // Continue: another size is known to work.
                    self.available = available;
                    site.notice(Notice::NotTried { split: &guess, reason: &error.to_string() });
                    continue;
                }
            };
            let trial = self.time(site, &mut trainer, options)?;
            *device = Some(trainer.into_device());
            splits.push(self.timed(&trial));
            if trial.step_seconds < fastest.1.step_seconds {
                fastest = (self.plan.clone(), trial);
            }
        }
        self.plan = fastest.0;
        self.plan.guesses = guesses;
        self.keep_split();
        Ok(fastest.1)
    }

    /// Builds a trainer that has made no step. If the tried plan did not perform as predicted, replans with the
    /// corrected profile and keeps the faster of the two plans.
    fn correct<D: PlanDevice>(
        &mut self,
        site: &mut impl LaunchSite<D>,
        first: Trial,
        device: Option<D>,
        options: TrialOptions,
    ) -> Result<(Trainer<D>, Option<Correction>), RunError> {
        let Some(corrected) = first.corrected else {
            return Ok((self.commit(site, device)?, None));
        };
        let predicted_seconds = self.plan.predicted_seconds();
        self.request.profile = corrected;
        let again = self.planned_again()?;
        let before = std::mem::replace(&mut self.plan, again);
        let mut trainer = self.commit(site, device)?;
        let mut outcome = Replanned::Same;
        if self.plan.planned.decisions != before.planned.decisions {
            outcome = Replanned::Other;
            let second = self.time(site, &mut trainer, options)?;
            if second.step_seconds > first.step_seconds {
                // Something outside the profile makes the new plan slower.
                outcome = Replanned::Kept;
                self.plan = before;
                let simulation = simulate(&self.plan.planned.plan, &self.request.profile);
                self.plan.planned.prediction.step_seconds = simulation.step_seconds;
            }
            trainer = self.commit(site, Some(trainer.into_device()))?;
        }
        let correction = Correction {
            measured_seconds: first.step_seconds,
            predicted_seconds,
            corrected_seconds: self.plan.predicted_seconds(),
            outcome,
        };
        site.notice(Notice::Corrected(&correction));
        Ok((trainer, Some(correction)))
    }

    /// The measured time of the plan's micro-batch size.
    fn timed(&self, trial: &Trial) -> TimedSplit {
        TimedSplit {
            batch: self.plan.batch,
            accumulate: self.plan.accumulate,
            predicted_seconds: self.plan.predicted_seconds(),
            step_seconds: trial.step_seconds,
        }
    }

    fn time<D: PlanDevice>(
        &self,
        site: &mut impl LaunchSite<D>,
        trainer: &mut Trainer<D>,
        trial: TrialOptions,
    ) -> Result<Trial, RunError> {
        site.notice(Notice::Trying(&self.plan));
        let batches = site.batches(self.plan.batch, self.plan.accumulate)?;
        let predicted = self.plan.predicted_seconds();
        Ok(try_plan(trainer, &batches, trial.warm_up, &self.request.profile, predicted)?)
    }

    /// Replans the same step with the current profile and available memory.
    fn planned_again(&self) -> Result<StepPlan, TrainError> {
        LaunchRequest { budget: self.available, ..self.request.clone() }.plan()
    }

    /// Builds a trainer for a run that saved and stopped because device memory ran short, with a plan that needs less
    /// if there is one.
    ///
    /// # Errors
    /// Like [`Launch::start`].
    pub fn shrink<D: PlanDevice>(
        &mut self,
        site: &mut impl LaunchSite<D>,
        trainer: Trainer<D>,
        alarm: Alarm,
    ) -> Result<Shrunk<D>, RunError> {
        let (budget, available) = (self.request.budget, self.available);
        let peak_bytes = self.plan.planned.prediction.peak_bytes[Tier::DEVICE];
        let vram_bytes = alarm.smaller_budget(peak_bytes, budget[Tier::DEVICE]);
        self.request.budget[Tier::DEVICE] = vram_bytes;
        self.available[Tier::DEVICE] = vram_bytes.min(available[Tier::DEVICE]);
        let is_smaller = match self.planned_again() {
            Ok(plan) => {
                self.plan = plan;
                true
            }
            Err(TrainError::Plan(PlanError::TooSmall(_))) => {
                (self.request.budget, self.available) = (budget, available);
                false
            }
            Err(error) => return Err(error.into()),
        };
        let trainer = self.commit(site, Some(trainer.into_device()))?;
        Ok(Shrunk { trainer, is_smaller })
    }
}
