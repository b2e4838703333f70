//! From a request to a trainer that is ready: plan, commit, trial, and a new plan where the machine is not what
//! was thought.
//!
//! Memory may be refused, and a profile may be wrong. Both are handled here and nowhere else: `storm train` and
//! `storm bench` make a [`LaunchRequest`], implement [`LaunchSite`], and print notices.

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

/// What a launch needs of its caller.
pub trait LaunchSite<D: PlanDevice> {
    /// Options for a device that is bound to `budget` and runs `plan`. A device that ran before may have something to
    /// keep. For a trial, the device must be asked to record.
    fn device(&mut self, budget: Budget, plan: &StepPlan, before: Option<D>) -> D::Options;

    /// The micro-batches of a step, for a trial.
    ///
    /// # Errors
    /// They cannot be read.
    fn batches(&mut self, batch: usize, accumulate: usize) -> Result<Vec<AnyBatch>, RunError>;

    /// Something happened.
    fn notice(&mut self, notice: Notice<'_>);
}

/// A request with its plan. The plan changes where memory is refused and where a trial shows that another is
/// better.
#[derive(Clone, Debug)]
pub struct Launch {
    request: LaunchRequest,
    /// What is planned with: less than the request's budget where the machine refused some of it.
    available: Budget,
    plan: StepPlan,
}

/// A trainer that is ready for its first step, and what happened on the way.
pub struct Launched<D: PlanDevice> {
    /// With parameters as they start.
    pub trainer: Trainer<D>,
    /// The sizes of micro-batches that were tried, in that order; none without a trial.
    pub splits: Vec<TimedSplit>,
    /// How the profile was corrected; none if steps took as long as predicted, or were not tried.
    pub correction: Option<Correction>,
}

/// What came of planning for less device memory.
pub struct Shrunk<D: PlanDevice> {
    /// Ready for its first step.
    pub trainer: Trainer<D>,
    /// Whether a plan within less was found; if not, the plan is the one before.
    pub is_smaller: bool,
}

impl Launch {
    /// Plans.
    ///
    /// # Errors
    /// [`PlanError::TooSmall`] if nothing fits, or what is asked for makes no sense.
    pub fn new(request: LaunchRequest) -> Result<Launch, TrainError> {
        let plan = request.plan()?;
        Ok(Launch { available: request.budget, request, plan })
    }

    /// The plan as it is now.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// The profile as trials have corrected it.
    pub fn profile(&self) -> &HardwareProfile {
        &self.request.profile
    }

    /// The budget that devices are bound to.
    pub fn budget(&self) -> Budget {
        self.request.budget
    }

    /// How the model is trained, with the size of micro-batches.
    pub fn options(&self) -> TrainOptions {
        TrainOptions { batch: self.plan.batch, ..self.request.options.clone() }
    }

    /// Puts the plan on a device and, if the request wants it, tries it and plans again where it is not as
    /// predicted. Steps of a trial are not part of what follows: the trainer has made none.
    ///
    /// # Errors
    /// [`PlanError::TooSmall`] if the memory that the machine gives is not enough; from the device otherwise, or
    /// from the batches of a trial.
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

    /// From here on micro-batches have the size that the plan has.
    fn keep_split(&mut self) {
        self.request.step = StepSize::MicroBatches(self.plan.accumulate);
        self.request.options.batch = self.plan.batch;
    }

    /// Makes some steps to see whether the prediction holds, with other sizes of micro-batches too if the request
    /// leaves them open. If it does not hold for the fastest, corrects the profile and plans again.
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

    /// Tries other sizes of micro-batches, and takes the fastest.
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
                    // There is a size that works.
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

    /// A trainer that has made no step, under the plan that was tried; or, if that was not as predicted, under one
    /// by a corrected profile. Of the two the one that was faster stays.
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
                // Something that no profile knows of makes the difference.
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

    /// What a trial of the plan showed of its size of micro-batches.
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

    /// The same step, planned with the profile and the memory as they are known now.
    fn planned_again(&self) -> Result<StepPlan, TrainError> {
        LaunchRequest { budget: self.available, ..self.request.clone() }.plan()
    }

    /// A trainer for a run that was saved because device memory got short: under a plan that takes less, if there
    /// is one.
    ///
    /// # Errors
    /// As [`Launch::start`].
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
