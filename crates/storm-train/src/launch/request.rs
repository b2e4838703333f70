use super::split::{self, GuessedSplit};
use super::trial::TrialOptions;
use crate::{TrainError, TrainOptions, rank_task};
use storm_model::AnyModel;
use storm_plan::{
    Budget, Decisions, Forced, HardwareProfile, Planned, RankPlace, Task, plan, plan_decided,
};

/// A training step to plan, with the hardware and the budget.
#[derive(Clone, Debug)]
pub struct LaunchRequest {
    /// The model.
    pub model: AnyModel,
    /// How it is trained. `batch` is ignored if the step size is given in tokens.
    pub options: TrainOptions,
    /// How large a step is.
    pub step: StepSize,
    /// Performance of the hardware.
    pub profile: HardwareProfile,
    /// The memory budget.
    pub budget: Budget,
    /// Choices that the planner must not change.
    pub forced: Forced,
    /// How to try the plan first; `None` to skip the trial.
    pub trial: Option<TrialOptions>,
    /// The rank that the plan is for.
    pub rank: RankPlace,
    /// Decisions already made for all ranks; `None` to let the planner decide.
    pub decided: Option<Decisions>,
}

/// The size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepSize {
    /// In micro-batches of [`TrainOptions::batch`] sequences.
    MicroBatches(usize),
    /// In tokens: the planner chooses the micro-batch size.
    Tokens(usize),
}

/// The plan of a step. The micro-batch size is part of a run's semantics: it is chosen once, recorded, and never
/// changes.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// Sequences per micro-batch.
    pub batch: usize,
    /// Micro-batches per step.
    pub accumulate: usize,
    /// The plan for this split.
    pub planned: Planned,
    /// All micro-batch sizes considered, largest first; empty if the size was given.
    pub guesses: Vec<GuessedSplit>,
}

impl StepPlan {
    /// The predicted time of a step.
    pub fn predicted_seconds(&self) -> f64 {
        self.planned.prediction.step_seconds
    }
}

impl LaunchRequest {
    /// Plans the step. If its size is given in tokens, chooses the micro-batch size with the fastest step.
    ///
    /// # Errors
    /// [`PlanError::TooSmall`](storm_plan::PlanError::TooSmall) if nothing fits; also if the tokens are not a whole
    /// number of sequences, or the model is invalid for these sizes.
    pub fn plan(&self) -> Result<StepPlan, TrainError> {
        match self.step {
            StepSize::MicroBatches(accumulate) => {
                let batch = self.options.batch;
                let planned = self.plan_split(batch, accumulate)?;
                Ok(StepPlan { batch, accumulate, planned, guesses: Vec::new() })
            }
            StepSize::Tokens(tokens) => split::choose(self, tokens),
        }
    }

    /// The planner's task for micro-batches of this size.
    ///
    /// # Errors
    /// The model is invalid for these sizes.
    pub fn task(&self, batch: usize, accumulate: usize) -> Result<Task, TrainError> {
        let options = TrainOptions { batch, ..self.options.clone() };
        rank_task(&self.model, &options, accumulate, self.rank)
    }

    /// Plans for micro-batches of this size.
    pub(super) fn plan_split(
        &self,
        batch: usize,
        accumulate: usize,
    ) -> Result<Planned, TrainError> {
        let task = self.task(batch, accumulate)?;
        Ok(match &self.decided {
            Some(decided) => plan_decided(&task, &self.profile, self.budget, decided.clone())?,
            None => plan(&task, &self.profile, self.budget, &self.forced)?,
        })
    }
}
