//! The losses of a model under a forward-only plan: no gradients, no state, and of the weights only what fits.

use crate::feed::{Batches, Exchange, StepSeeds};
use crate::input_rules::InputRules;
use crate::{Found, Losses, MicroBatch, Precision, TrainError, TrainOptions, weights};
use std::collections::BTreeSet;
use std::sync::Arc;
use storm_device::PlanDevice;
use storm_exec::Planned;
use storm_graph::StepScalars;
use storm_graph::random::Seed;
use storm_model::{AnyModel, BuildOptions, ModelOutput, ParameterSource, Trainable};
use storm_plan::{CheckedPlan, PerTier, RankPlace, Task};

/// The loss of a model on batches, and its accuracy if it classifies. The plan may use less memory than the model needs.
pub struct Evaluation<D: PlanDevice> {
    planned: Planned<D>,
    exchange: Exchange,
    rules: InputRules,
    /// What batches are checked against.
    options: TrainOptions,
    losses: Losses,
}

/// The forward pass of some micro-batches of a model, before any decision about memory.
///
/// # Errors
/// The model is not valid for these sizes.
pub fn evaluation_task(
    model: impl Into<AnyModel>,
    options: &BuildOptions,
    micro_batches: usize,
) -> Result<Task, TrainError> {
    let forward = model.into().build(&frozen(options))?;
    Ok(Task {
        forward,
        training: None,
        micro_batches,
        lanes: 1,
        lane_groups: 1,
        rank: RankPlace::default(),
        data: BTreeSet::new(),
    })
}

/// Nothing learns, and the result is the loss.
fn frozen(options: &BuildOptions) -> BuildOptions {
    let output = match options.output {
        ModelOutput::Logits => ModelOutput::Loss { chunk_rows: storm_model::DEFAULT_CHUNK_ROWS },
        loss => loss,
    };
    BuildOptions { output, trainable: Trainable::Where(|_| false), ..options.clone() }
}

impl<D: PlanDevice> Evaluation<D> {
    /// Puts a plan of [`evaluation_task`] with the same config and options on a device, and loads the model.
    ///
    /// # Errors
    /// The plan is of something else, the files do not hold the model, or the memory cannot be had.
    pub fn load(
        model: impl Into<AnyModel>,
        options: &BuildOptions,
        source: &impl ParameterSource,
        plan: Arc<CheckedPlan>,
        device: D::Options,
    ) -> Result<Evaluation<D>, TrainError> {
        let model = model.into();
        let mut evaluation = Evaluation::commit(&model, options, plan, device)?;
        weights::load(&mut evaluation.planned, &model, source)?;
        Ok(evaluation)
    }

    /// [`Evaluation::load`] without weights: they are zero.
    pub(crate) fn commit(
        model: &AnyModel,
        options: &BuildOptions,
        plan: Arc<CheckedPlan>,
        device: D::Options,
    ) -> Result<Evaluation<D>, TrainError> {
        let options = frozen(options);
        let rules = InputRules::of_program(&model.build(&options)?);
        let exchange = Exchange::new(&plan, &rules)?;
        let planned = Planned::commit(plan, device)?;
        let BuildOptions { batch, sequence, packing, .. } = options;
        let options =
            TrainOptions { packing, ..TrainOptions::new(batch, sequence, Precision::F32) };
        Ok(Evaluation { planned, exchange, rules, options, losses: Losses::default() })
    }

    /// The plan on its device.
    pub(crate) fn planned(&mut self) -> &mut Planned<D> {
        &mut self.planned
    }

    /// The device.
    pub(crate) fn device(&self) -> &D {
        self.planned.device()
    }

    /// Batches that go together: their loss is one sum, divided once.
    pub fn micro_batches(&self) -> usize {
        self.planned.micro_batches()
    }

    /// What is taken in each tier.
    pub fn memory_taken(&self) -> PerTier<usize> {
        self.planned.memory_taken()
    }

    /// Counts batches in, at most as many as go together. Some in which no target counts change nothing.
    ///
    /// # Errors
    /// A batch does not fit, there are too many, a loss is not finite, or from the device.
    pub fn add(&mut self, batches: &[impl MicroBatch]) -> Result<(), TrainError> {
        let valid: usize = batches.iter().map(MicroBatch::counted).sum();
        let Some(found) = self.run(batches, valid, None)? else { return Ok(()) };
        if !found.loss.is_finite() {
            return Err(TrainError::NonFiniteResult { what: "loss", value: found.loss });
        }
        self.losses.add(found, valid);
        Ok(())
    }

    /// The loss of each of these batches, at most as many as go together: the sum over its targets, divided by `valid`.
    ///
    /// # Errors
    /// A batch does not fit, there are too many, or from the device.
    pub(crate) fn each(
        &mut self,
        batches: &[impl MicroBatch],
        valid: usize,
        losses: &mut [f32],
    ) -> Result<(), TrainError> {
        self.run(batches, valid, Some(losses)).map(drop)
    }

    /// Runs batches whose losses are divided by `valid`. `None` if that is zero, which changes nothing.
    fn run(
        &mut self,
        batches: &[impl MicroBatch],
        valid: usize,
        losses: Option<&mut [f32]>,
    ) -> Result<Option<Found>, TrainError> {
        let most = self.micro_batches();
        if batches.len() > most {
            let problem = format!("{} go together, of {most} at most", batches.len());
            return Err(TrainError::Batch { problem });
        }
        batches.iter().try_for_each(|batch| {
            batch.check(&self.options)?;
            self.rules.check_entries(batch)
        })?;
        if valid == 0 {
            return Ok(None);
        }
        let seeds = StepSeeds { update: Seed { seed: 0, step: 0 }, forward: None };
        let mut feed =
            self.exchange.feed(Batches::Given(batches), valid as f32, StepScalars::NONE, seeds);
        feed.losses = losses;
        self.planned.step(&mut feed)?;
        Ok(Some(feed.found()))
    }

    /// What was found so far.
    pub fn losses(&self) -> &Losses {
        &self.losses
    }
}
