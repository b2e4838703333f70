//! The losses of a model under a forward-only plan: no gradients, no state, and of the weights only what fits.

use crate::feed::{Exchange, StepSeeds};
use crate::input_rules::InputRules;
use crate::{Batch, TrainError, weights};
use std::sync::Arc;
use storm_device::PlanDevice;
use storm_exec::Planned;
use storm_graph::StepScalars;
use storm_graph::random::Seed;
use storm_model::{BuildOptions, ModelConfig, ModelOutput, ParameterSource, Trainable, build};
use storm_plan::{CheckedPlan, PerTier, Task};

/// The loss of a model on batches. The plan may use less memory than the model needs.
pub struct Evaluation<D: PlanDevice> {
    planned: Planned<D>,
    exchange: Exchange,
    rules: InputRules,
    options: BuildOptions,
    loss_sum: f64,
    targets: u64,
}

/// The forward pass of some micro-batches of a model, before any decision about memory.
///
/// # Errors
/// The model is not valid for these sizes.
pub fn evaluation_task(
    config: &ModelConfig,
    options: &BuildOptions,
    micro_batches: usize,
) -> Result<Task, TrainError> {
    let forward = build(config, &frozen(options))?;
    Ok(Task { forward, training: None, micro_batches })
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
        config: &ModelConfig,
        options: &BuildOptions,
        source: &impl ParameterSource,
        plan: Arc<CheckedPlan>,
        device: D::Options,
    ) -> Result<Evaluation<D>, TrainError> {
        let options = frozen(options);
        let rules = InputRules::of_program(&build(config, &options)?);
        let exchange = Exchange::new(&plan, &rules)?;
        let mut planned = Planned::commit(plan, device)?;
        weights::load(&mut planned, config, source)?;
        Ok(Evaluation { planned, exchange, rules, options, loss_sum: 0.0, targets: 0 })
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
    pub fn add(&mut self, batches: &[Batch]) -> Result<(), TrainError> {
        let most = self.micro_batches();
        if batches.len() > most {
            let problem = format!("{} go together, of {most} at most", batches.len());
            return Err(TrainError::Batch { problem });
        }
        let BuildOptions { batch: rows, sequence, packing, .. } = self.options;
        batches.iter().try_for_each(|batch| {
            batch.check_form(rows, sequence, packing)?;
            self.rules.check_entries(batch)
        })?;
        let valid: usize = batches.iter().map(Batch::valid_tokens).sum();
        if valid == 0 {
            return Ok(());
        }
        let seeds = StepSeeds { update: Seed { seed: 0, step: 0 }, forward: None };
        let mut feed = self.exchange.feed(batches, valid as f32, StepScalars::NONE, seeds);
        self.planned.step(&mut feed)?;
        let loss = feed.loss;
        if !loss.is_finite() {
            return Err(TrainError::NonFiniteResult { what: "loss", value: loss });
        }
        self.loss_sum += f64::from(loss) * valid as f64;
        self.targets += valid as u64;
        Ok(())
    }

    /// The mean loss of all targets so far; none before the first.
    pub fn loss(&self) -> Option<f64> {
        (self.targets > 0).then(|| self.loss_sum / self.targets as f64)
    }

    /// Targets that were counted.
    pub fn targets(&self) -> u64 {
        self.targets
    }
}
