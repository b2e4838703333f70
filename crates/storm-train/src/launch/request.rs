use super::split::{self, GuessedSplit};
use super::trial::TrialOptions;
use crate::{TrainError, TrainOptions, rank_task};
use storm_model::AnyModel;
use storm_plan::{
    Budget, Decisions, Forced, HardwareProfile, Planned, RankPlace, Task, plan, plan_decided,
};

/// What is to be trained, and within what.
#[derive(Clone, Debug)]
pub struct LaunchRequest {
    /// The model.
    pub model: AnyModel,
    /// How it is trained. The batch does not matter if the step is given in tokens.
    pub options: TrainOptions,
    /// How large a step is.
    pub step: StepSize,
    /// What the machine can do.
    pub profile: HardwareProfile,
    /// What may be taken.
    pub budget: Budget,
    /// What the planner may not decide.
    pub forced: Forced,
    /// How a plan is tried before anything counts on it; none if it is not.
    pub trial: Option<TrialOptions>,
    /// Which of the ranks that share a step the plan is for.
    pub rank: RankPlace,
    /// What was decided already, for all ranks; none if it is to be planned.
    pub decided: Option<Decisions>,
}

/// How large a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepSize {
    /// In micro-batches of [`TrainOptions::batch`] sequences.
    MicroBatches(usize),
    /// In tokens: the size of micro-batches is chosen.
    Tokens(usize),
}

/// A plan for a step. The size of micro-batches is part of the semantics of a run: it is chosen once, recorded,
/// and then stays.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// Sequences per micro-batch.
    pub batch: usize,
    /// Micro-batches per step.
    pub accumulate: usize,
    /// The plan with these.
    pub planned: Planned,
    /// All sizes that were looked at, largest first; none if the size was given.
    pub guesses: Vec<GuessedSplit>,
}

impl StepPlan {
    /// How long a step should take.
    pub fn predicted_seconds(&self) -> f64 {
        self.planned.prediction.step_seconds
    }
}

impl LaunchRequest {
    /// Plans; where the step is given in tokens, chooses the size of micro-batches whose step is the fastest.
    ///
    /// # Errors
    /// [`PlanError::TooSmall`](storm_plan::PlanError::TooSmall) if nothing fits; tokens that are no whole number of
    /// sequences, or a model that is not valid for these sizes.
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

    /// The step as the planner takes it, in micro-batches of this size.
    ///
    /// # Errors
    /// A model that is not valid for these sizes.
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
