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
pub use split::GuessedSplit;
pub use trial::{Trial, TrialOptions, try_plan};

use crate::{Alarm, Batch, RunError, TrainError, TrainOptions, Trainer};
use storm_device::PlanDevice;
use storm_plan::{Budget, HardwareProfile, PlanError, Tier, simulate};

/// What a launch needs of its caller.
pub trait LaunchSite<D: PlanDevice> {
    /// Options for a device that is bound to `budget`. A device that ran before may have something to keep. For a
    /// trial, the device must be asked to record.
    fn device(&mut self, budget: Budget, before: Option<D>) -> D::Options;

    /// The micro-batches of a step, for a trial.
    ///
    /// # Errors
    /// They cannot be read.
    fn batches(&mut self, batch: usize, accumulate: usize) -> Result<Vec<Batch>, RunError>;

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
        // From here on the size of micro-batches is that of the plan.
        self.request.step = StepSize::MicroBatches(self.plan.accumulate);
        self.request.options.batch = self.plan.batch;
        match self.request.trial {
            Some(trial) => self.try_out(site, trainer, trial),
            None => Ok(Launched { trainer, correction: None }),
        }
    }

    /// Makes some steps to see whether the prediction holds; corrects the profile and plans again if it does not.
    /// Of two plans the one that was faster stays.
    fn try_out<D: PlanDevice>(
        &mut self,
        site: &mut impl LaunchSite<D>,
        mut trainer: Trainer<D>,
        trial: TrialOptions,
    ) -> Result<Launched<D>, RunError> {
        let first = self.time(site, &mut trainer, trial)?;
        let device = trainer.into_device();
        let Some(corrected) = first.corrected else {
            return Ok(Launched { trainer: self.commit(site, Some(device))?, correction: None });
        };
        let predicted_seconds = self.plan.predicted_seconds();
        self.request.profile = corrected;
        let again = self.planned_again()?;
        let before = std::mem::replace(&mut self.plan, again);
        let mut trainer = self.commit(site, Some(device))?;
        let mut outcome = Replanned::Same;
        if self.plan.planned.decisions != before.planned.decisions {
            outcome = Replanned::Other;
            let second = self.time(site, &mut trainer, trial)?;
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
        Ok(Launched { trainer, correction: Some(correction) })
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
