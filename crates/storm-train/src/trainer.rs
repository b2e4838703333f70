use crate::checkpoint::{Base, StateTensor, state_tensors};
use crate::feed::{Batches, Exchange, Numbering, StepSeeds, foreign};
use crate::input_rules::InputRules;
use crate::optimizer::names;
use crate::ranks::{RankState, Store};
use crate::reference::{check_options, initial_graph};
use crate::staging::{Rate, Staging, StepData};
use crate::unwritten::Unwritten;
use crate::{
    BatchSource, Found, MicroBatch, NamedInputs, RunError, StepReport, TrainError, TrainOptions,
    weights,
};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use storm_device::{HostBuffer, PlanDevice, Supply, Trace, bytes_of};
use storm_exec::Planned;
use storm_graph::random::Seed;
use storm_graph::{
    DType, Graph, Op, ParameterInstance, Program, ProgramParameter, StepScalars, Tensor, Training,
};
use storm_model::{AnyModel, IfExists, Initialization, ParameterSource, SaveOptions, Unit};
use storm_plan::{CheckedPlan, Idle, PerTier, UpdateTime, Work};

/// Trains a model under a plan. What the plan does not keep on the device is in host memory or on disk.
///
/// Computes bitwise the same as a [`ReferenceTrainer`](crate::ReferenceTrainer) with the same options on the same kind
/// of device, whatever the plan.
pub struct Trainer<D: PlanDevice> {
    pub(crate) planned: Planned<D>,
    /// `None` for a program built by the caller.
    model: Option<AnyModel>,
    options: TrainOptions,
    pub(crate) rules: InputRules,
    instances: Vec<ParameterInstance>,
    pub(crate) exchange: Exchange,
    /// The data that steps fetch.
    pub(crate) staging: Arc<Staging>,
    /// Updates made or pending.
    updates: u32,
    /// The scalars of a pending update, which the next step or flush applies.
    pub(crate) pending: Option<StepScalars>,
    /// The non-finite gradient norm of a step whose update could not be cancelled.
    partly_updated: Option<f32>,
    /// Parameters that have no values, because their memory was released.
    unwritten: Unwritten,
    /// The other ranks, if this is rank 0 of several.
    pub(crate) ranks: Option<Box<RankState>>,
}

/// Per-micro-batch results of a step over one rank's lanes.
#[derive(Default)]
pub(crate) struct OwnLanes<'a> {
    pub(crate) losses: Option<&'a mut [f32]>,
    /// Number of correct predictions of each.
    pub(crate) found: Option<&'a mut [f32]>,
    pub(crate) numbering: Numbering,
}

/// Whether another step follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Another step follows, so its data is read during this one.
    Follows,
    /// This is the last step.
    None,
}

/// The result of a step over data from the source.
pub struct SourceStep {
    pub(crate) report: StepReport,
    pub(crate) data: StepData,
    /// Time spent waiting for data.
    pub(crate) wait_seconds: f64,
}

impl SourceStep {
    /// Tokens or images read.
    pub fn units(&self) -> usize {
        self.data.units
    }
}

/// Progress of initializing parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initialized {
    /// Bytes of initialized parameters.
    pub done_bytes: u64,
    /// Bytes of all parameters, as stored.
    pub total_bytes: u64,
}

impl<D: PlanDevice> Trainer<D> {
    /// Commits a plan of [`training_task`](crate::training_task) with the same config and options to a device.
    /// Initializes the parameters from the seed.
    ///
    /// # Errors
    /// The plan belongs to something else, or there is not enough memory.
    pub fn new(
        model: impl Into<AnyModel>,
        options: TrainOptions,
        plan: Arc<CheckedPlan>,
        device: D::Options,
    ) -> Result<Trainer<D>, TrainError> {
        Trainer::with_progress(model, options, plan, device, &mut |_| {})
    }

    /// [`Trainer::new`] with progress reports: initializing a large model takes a while.
    ///
    /// # Errors
    /// Like [`Trainer::new`].
    pub fn with_progress(
        model: impl Into<AnyModel>,
        options: TrainOptions,
        plan: Arc<CheckedPlan>,
        device: D::Options,
        progress: &mut dyn FnMut(Initialized),
    ) -> Result<Trainer<D>, TrainError> {
        let model = model.into();
        let program = model.build(&options.build_options())?;
        let start = |name: &str| model.initialization(name);
        let mut trainer = Trainer::commit(&program, options, plan, device)?;
        trainer.initialize(&program, start, progress)?;
        trainer.model = Some(model);
        Ok(trainer)
    }

    /// [`Trainer::new`] for a program built by the caller, with a plan of [`task_of_program`](crate::task_of_program)
    /// for the same program and options. `start` returns the initial value of a parameter, by its name within its
    /// section.
    ///
    /// The program reads micro-batches by the names of its inputs: a [`Batch`](crate::Batch) has `tokens`, `targets`,
    /// `positions` and `segments`, each (B, T) of i32; a [`NamedInputs`] has whatever it was given. The trainer fills
    /// the scalar `denominator` with the number of targets in the step that count, and minimizes the program's result
    /// `loss`.
    ///
    /// # Errors
    /// The plan belongs to something else, the program has unsupported inputs, or there is not enough memory.
    pub fn of_program(
        program: &Program,
        options: TrainOptions,
        plan: Arc<CheckedPlan>,
        device: D::Options,
        start: impl Fn(&str) -> Initialization,
    ) -> Result<Trainer<D>, TrainError> {
        let mut trainer = Trainer::commit(program, options, plan, device)?;
        trainer.initialize(program, start, &mut |_| {})?;
        Ok(trainer)
    }

    /// Builds a trainer whose parameters are not initialized.
    fn commit(
        program: &Program,
        options: TrainOptions,
        plan: Arc<CheckedPlan>,
        device: D::Options,
    ) -> Result<Trainer<D>, TrainError> {
        check_options(&options)?;
        let instances = program.parameter_instances();
        let rules = InputRules::of_program(program);
        let exchange = Exchange::new(&plan, &rules)?;
        let mut planned = Planned::commit(plan, device)?;
        let micro_batches = planned.micro_batches();
        let staging = Arc::new(Staging::new(planned.plan(), &rules, &options, micro_batches));
        planned.set_supply(Arc::clone(&staging) as Arc<dyn Supply>)?;
        for ParameterInstance { name, parameter, .. } in &instances {
            let Tensor { shape, dtype, .. } = planned.tensor(name)?;
            if *shape != parameter.shape || *dtype != parameter.dtype {
                return Err(foreign(format!("`{name}` is {dtype} {shape} there")));
            }
        }
        Ok(Trainer {
            planned,
            model: None,
            options,
            rules,
            instances,
            exchange,
            staging,
            updates: 0,
            pending: None,
            partly_updated: None,
            unwritten: Unwritten::default(),
            ranks: None,
        })
    }

    fn initialize(
        &mut self,
        program: &Program,
        start: impl Fn(&str) -> Initialization,
        progress: &mut dyn FnMut(Initialized),
    ) -> Result<(), TrainError> {
        let random = self.seed(0).to_words();
        let given = [(names::RANDOM, bytes_of(&random))];
        let bytes = |instance: &ParameterInstance| {
            let ProgramParameter { shape, dtype, .. } = &instance.parameter;
            (shape.elements() * dtype.size_bytes()) as u64
        };
        let total_bytes = self.instances.iter().map(bytes).sum();
        let mut done_bytes = 0;
        for instance in &self.instances {
            let name = &instance.parameter.name;
            let graph = initial_graph(start(name), instance, program.quantized_rows(name))?;
            self.planned.initialize(&instance.name, &graph, instance.index, &given)?;
            let learns = instance.parameter.training == Training::Trainable;
            let precision = self.options.precision.of_parameter(instance.parameter.dtype);
            if learns && precision.has_master() {
                let master = format!("{}.master", instance.name);
                if self.planned.sharded(&master).is_some() {
                    weights::widen_master(&mut self.planned, &instance.name)?;
                } else {
                    let graph = widening_graph(instance)?;
                    self.planned.initialize(&master, &graph, instance.index, &[])?;
                }
            }
            done_bytes += bytes(instance);
            progress(Initialized { done_bytes, total_bytes });
        }
        weights::draw_uniform(&mut self.planned, &self.instances, self.options.seed, start)
    }

    /// Micro-batches per step, of all ranks together.
    pub fn micro_batches(&self) -> usize {
        self.planned.micro_batches() * self.plan().rank.ranks as usize
    }

    /// Makes one optimizer step: normalizes the gradients of all micro-batches by the step's valid tokens, clips them
    /// and applies them. A plan that defers updates applies them at the start of the next step. If the norm is not
    /// finite, nothing is applied, unless the plan updates in the backward pass: see [`Trainer::is_partly_updated`].
    ///
    /// # Errors
    /// Batches do not fit, their number differs from the plan's, or from the device. A refused batch changes nothing.
    pub fn step<B: MicroBatch>(
        &mut self,
        batches: &[B],
        learning_rate: f32,
    ) -> Result<StepReport, TrainError> {
        check_rate(learning_rate)?;
        self.check_whole()?;
        let wanted = self.micro_batches();
        if batches.len() != wanted {
            let problem =
                format!("the plan's step has {wanted} micro-batches, not {}", batches.len());
            return Err(TrainError::Batch { problem });
        }
        let counted = self.rules.check(batches, &self.options)?;
        if self.ranks.is_some() {
            return self.lead_step(batches, counted, learning_rate);
        }
        self.planned.wait_for_data()?;
        self.staging.put(batches);
        self.step_with(Batches::Given(batches), counted, learning_rate)
    }

    /// Sets the source for [`Trainer::step_from_source`]. Returns the one before, positioned at the first micro-batch
    /// that no step used.
    ///
    /// # Errors
    /// From the device.
    pub fn exchange_source(
        &mut self,
        source: Option<Box<dyn BatchSource>>,
    ) -> Result<Option<Box<dyn BatchSource>>, TrainError> {
        self.planned.wait_for_data()?;
        Ok(self.staging.set_source(source))
    }

    /// Moves the source to a position.
    pub(crate) fn resume_source(&mut self, position: &Value) -> Result<(), RunError> {
        self.planned.wait_for_data().map_err(TrainError::from)?;
        self.staging.resume(position)
    }

    /// Runs a function on the source, which must leave its position unchanged.
    pub(crate) fn borrow_source<T>(
        &mut self,
        use_it: impl FnOnce(&mut dyn BatchSource) -> Result<T, RunError>,
    ) -> Result<Option<T>, RunError> {
        self.planned.wait_for_data().map_err(TrainError::from)?;
        self.staging.borrow_source(use_it).transpose()
    }

    /// [`Trainer::step`] over the next micro-batches of the source. Meanwhile reads those of the next step, if one
    /// follows.
    ///
    /// # Errors
    /// Like [`Trainer::step`], or data cannot be read.
    pub fn step_from_source(
        &mut self,
        learning_rate: f32,
        next: NextStep,
    ) -> Result<SourceStep, RunError> {
        check_rate(learning_rate)?;
        self.check_whole()?;
        if self.ranks.is_some() {
            return self.ranked_step_from_source(learning_rate);
        }
        let start = self.planned.device().now();
        self.planned.wait_for_data().map_err(TrainError::from)?;
        let data = self.staging.begin_step(next == NextStep::Follows)?;
        let waited = self.planned.device().now().saturating_sub(start);
        let batches = Batches::<NamedInputs>::Fetched(self.micro_batches());
        let report = self.step_with(batches, data.counted, learning_rate)?;
        Ok(SourceStep { report, data, wait_seconds: waited.as_secs_f64() })
    }

    /// [`Trainer::step_from_source`] with several ranks. Does not read ahead.
    fn ranked_step_from_source(&mut self, learning_rate: f32) -> Result<SourceStep, RunError> {
        let start = self.planned.device().now();
        let batches = self.read_step_data()?;
        let waited = self.planned.device().now().saturating_sub(start);
        let position = self.borrow_source(|source| Ok(source.position()))?;
        let report = self.step(&batches, learning_rate)?;
        let data = StepData {
            counted: batches.iter().map(MicroBatch::counted).sum(),
            units: batches.iter().map(MicroBatch::units).sum(),
            position: position.unwrap_or(Value::Null),
        };
        self.keep_step_data(batches);
        Ok(SourceStep { report, data, wait_seconds: waited.as_secs_f64() })
    }

    /// Reading statistics of the source.
    pub(crate) fn read_rate(&self) -> Rate {
        self.staging.rate()
    }

    /// A step over staged micro-batches.
    fn step_with<B: MicroBatch>(
        &mut self,
        batches: Batches<'_, B>,
        counted: usize,
        learning_rate: f32,
    ) -> Result<StepReport, TrainError> {
        let scalars = self.options.optimizer.method.scalars(learning_rate, self.updates + 1);
        let report = self.run_step(batches, counted as f32, scalars, OwnLanes::default())?;
        self.count_update(&report, scalars);
        Ok(report)
    }

    /// A step over this rank's lanes, whose micro-batches are staged. The losses in its report cover only these.
    pub(crate) fn step_of_lanes<B: MicroBatch>(
        &mut self,
        batches: &[B],
        counted: usize,
        learning_rate: f32,
        lanes: OwnLanes<'_>,
    ) -> Result<StepReport, TrainError> {
        self.planned.wait_for_data()?;
        self.staging.put(batches);
        let scalars = self.options.optimizer.method.scalars(learning_rate, self.updates + 1);
        let report = self.run_step(Batches::Given(batches), counted as f32, scalars, lanes)?;
        self.count_update(&report, scalars);
        // The collectives queue must be empty before anything else is sent.
        self.planned.synchronize()?;
        Ok(report)
    }

    fn count_update(&mut self, report: &StepReport, scalars: StepScalars) {
        // A non-finite norm makes the clip scale zero, which cancels the update.
        if report.gradient_norm.is_finite() {
            self.updates += 1;
            self.pending = self.defers().then_some(scalars);
        } else if self.planned.plan().update == UpdateTime::InBackward {
            self.partly_updated = Some(report.gradient_norm);
        }
    }

    /// The mean loss and accuracy over these batches, by forward passes only. Parameters and state stay those after the
    /// last step. The plan has a segment for this, within the memory of a step.
    ///
    /// # Errors
    /// Like [`Trainer::step`], but with any number of batches; also if the plan has no such segment.
    pub fn evaluate(&mut self, batches: &[impl MicroBatch]) -> Result<Found, TrainError> {
        self.evaluate_into(batches, None)
    }

    /// [`Trainer::evaluate`], with each batch's contribution to the loss.
    pub(crate) fn evaluate_each(
        &mut self,
        batches: &[impl MicroBatch],
        losses: &mut [f32],
    ) -> Result<Found, TrainError> {
        self.evaluate_into(batches, Some(losses))
    }

    fn evaluate_into(
        &mut self,
        batches: &[impl MicroBatch],
        losses: Option<&mut [f32]>,
    ) -> Result<Found, TrainError> {
        let Some(group) = self.planned.evaluated_micro_batches() else {
            return Err(TrainError::Option {
                option: "plan",
                problem: "has no segment that evaluates".to_owned(),
            });
        };
        let denominator = self.rules.check(batches, &self.options)? as f32;
        self.flush()?;
        let seeds = StepSeeds { update: self.seed(self.updates), forward: None };
        let batches_fed = Batches::Given(batches);
        let mut feed = self.exchange.feed(batches_fed, denominator, StepScalars::NONE, seeds);
        feed.losses = losses;
        for first in (0..batches.len()).step_by(group) {
            self.planned.evaluate(&mut feed, first)?;
        }
        Ok(feed.found())
    }

    /// The bytes of a result of the program other than its loss, from the last micro-batch; `None` if there is no such
    /// result.
    pub fn result(&self, name: &str) -> Option<&[u8]> {
        self.exchange.result(name)
    }

    /// Whether the plan applies the gradients of a step in the next one.
    fn defers(&self) -> bool {
        self.planned.plan().flush.is_some()
    }

    /// Whether parameters and state are neither those before the last step nor those after it: its gradients were not
    /// finite, and a plan that updates in the backward pass cannot cancel the update. Reading them returns
    /// [`TrainError::PartlyUpdated`].
    pub fn is_partly_updated(&self) -> bool {
        self.partly_updated.is_some()
    }

    /// A step whose gradients are applied with the scalars `own`.
    fn run_step<B: MicroBatch>(
        &mut self,
        batches: Batches<'_, B>,
        denominator: f32,
        own: StepScalars,
        lanes: OwnLanes<'_>,
    ) -> Result<StepReport, TrainError> {
        // A plan that defers updates applies that of the step before; other plans apply their own.
        let (applied, number) = match self.defers() {
            true => (self.pending.take(), self.updates),
            false => (Some(own), self.updates + 1),
        };
        // Dropout belongs to the gradients of this step, whenever they are applied.
        let forward = Some(self.seed(self.updates + 1));
        let seeds = StepSeeds { update: self.seed(number), forward };
        let scalars = applied.unwrap_or(StepScalars::NONE);
        let mut feed = self.exchange.feed(batches, denominator, scalars, seeds);
        (feed.losses, feed.found, feed.numbering) = (lanes.losses, lanes.found, lanes.numbering);
        self.planned.step(&mut feed)?;
        let (Found { loss, accuracy }, gradient_norm) = (feed.found(), feed.gradient_norm);
        Ok(StepReport { loss, accuracy, gradient_norm })
    }

    /// Applies a pending update, so that parameters are those after the last step.
    ///
    /// # Errors
    /// From the device.
    pub fn flush(&mut self) -> Result<(), TrainError> {
        self.check_whole()?;
        let Some(pending) = self.pending.take() else { return Ok(()) };
        self.tell_flush()?;
        let seeds = StepSeeds { update: self.seed(self.updates), forward: None };
        let none = Batches::<NamedInputs>::Given(&[]);
        let mut feed = self.exchange.feed(none, 1.0, pending, seeds);
        // The gradients remain, but nothing is pending, so the next step does not apply them.
        self.planned.flush(&mut feed)?;
        if self.plan().rank.is_shared() {
            self.planned.synchronize()?;
        }
        Ok(())
    }

    fn check_whole(&self) -> Result<(), TrainError> {
        match (self.partly_updated, self.unwritten.first()) {
            (Some(norm), _) => Err(TrainError::PartlyUpdated { norm }),
            (None, Some(parameter)) => {
                Err(TrainError::Released { parameter: parameter.to_owned() })
            }
            (None, None) => Ok(()),
        }
    }

    /// Before a write: applies a pending update. If parameters were released, nothing is pending, and their memory must
    /// be there.
    fn prepare_write(&mut self) -> Result<(), TrainError> {
        match self.unwritten.first() {
            Some(_) => self.reclaim_idle(),
            None => self.flush(),
        }
    }

    /// Loads all parameters of a model with the same config; a head that the source lacks keeps its initial values.
    /// Memory beyond the plan's does not depend on the size of a parameter.
    ///
    /// # Errors
    /// A tensor is missing, has another shape or cannot be read, or this trainer runs a program without a config.
    pub fn load(&mut self, source: &impl ParameterSource) -> Result<(), TrainError> {
        self.flush()?;
        let (model, mut store) = self.model_and_store()?;
        weights::load_or_start_fresh(&mut store, model, source)
    }

    /// Loads the adapters of a model that has some, and the parameters trained in full besides them.
    ///
    /// # Errors
    /// Like [`Trainer::load`].
    pub fn load_adapters(&mut self, source: &impl ParameterSource) -> Result<(), TrainError> {
        self.flush()?;
        let (model, mut store) = self.model_and_store()?;
        weights::load_adapters(&mut store, model, source)
    }

    /// Saves the adapters as a PEFT directory that names `base` as its base model.
    ///
    /// # Errors
    /// Like [`Trainer::save`]; also if the model has no adapters.
    pub fn save_adapters(
        &mut self,
        output: &Path,
        base: Option<&str>,
        if_exists: IfExists,
    ) -> Result<(), TrainError> {
        self.flush()?;
        let (model, mut store) = self.model_and_store()?;
        weights::save_adapters(&mut store, model, output, base, if_exists)
    }

    /// Saves all parameters as a directory for other programs: see [`AnyModel::save`].
    ///
    /// # Errors
    /// From the device or the file system; an existing directory stays unchanged. Also if this trainer runs a program
    /// without a config.
    pub fn save(&mut self, output: &Path, options: &SaveOptions<'_>) -> Result<(), TrainError> {
        self.flush()?;
        let (model, mut store) = self.model_and_store()?;
        weights::save(&mut store, model, output, options)
    }

    /// Copies all parameters, as saved in f32, to a store with the same names.
    pub(crate) fn copy_weights(&mut self, to: &mut impl weights::Writer) -> Result<(), TrainError> {
        self.flush()?;
        let (model, mut store) = self.model_and_store()?;
        weights::copy_widened(&mut store, model, to)
    }

    /// Reads a parameter or its state after the last step, widened to f32; see
    /// [`ReferenceTrainer::read`](crate::ReferenceTrainer::read).
    ///
    /// # Errors
    /// The tensor does not exist. Only plans that defer updates keep the gradients of a step.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>, TrainError> {
        self.flush()?;
        weights::read(&mut self.store(), name)
    }

    /// Sets a parameter or its state; see [`ReferenceTrainer::write`](crate::ReferenceTrainer::write).
    ///
    /// # Errors
    /// The tensor does not exist, or has another number of elements.
    pub fn write(&mut self, name: &str, values: &[f32]) -> Result<(), TrainError> {
        self.prepare_write()?;
        let format = self.model.as_ref().and_then(AnyModel::quantized);
        weights::write(&mut self.store(), name, values, format)?;
        self.unwritten.wrote_all(name);
        Ok(())
    }

    /// Updates made so far.
    pub fn updates(&self) -> u32 {
        self.updates
    }

    /// How the model is trained.
    pub fn options(&self) -> &TrainOptions {
        &self.options
    }

    /// The model; `None` for a program built by the caller.
    pub fn model(&self) -> Option<&AnyModel> {
        self.model.as_ref()
    }

    /// The unit of the model's input. A program built by the caller counts tokens.
    pub fn unit(&self) -> Unit {
        self.model.as_ref().map_or(Unit::Tokens, AnyModel::unit)
    }

    /// Names of all parameters, layer by layer.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> {
        self.instances.iter().map(|instance| instance.name.as_str())
    }

    /// Releases device memory that is idle until the next step. Returns its size. After [`Idle::WithParameters`], all
    /// parameters must be written before anything else is done: until then, everything else is refused.
    ///
    /// # Errors
    /// From the device.
    pub fn release_idle(&mut self, idle: Idle) -> Result<u64, TrainError> {
        self.flush()?;
        if idle == Idle::WithParameters {
            self.unwritten = Unwritten::all(&self.instances);
        }
        Ok(self.planned.release_idle(idle)?)
    }

    /// Reclaims the released memory.
    ///
    /// # Errors
    /// The memory is no longer available. What was not released is intact.
    pub fn reclaim_idle(&mut self) -> Result<(), TrainError> {
        Ok(self.planned.reclaim_idle()?)
    }

    /// Waits until all work is done, for timing.
    ///
    /// # Errors
    /// From earlier work.
    pub fn synchronize(&mut self) -> Result<(), TrainError> {
        Ok(self.planned.synchronize()?)
    }

    /// Turns recording of steps on or off, on a device created with recording enabled.
    pub fn set_recording(&mut self, recording: bool) {
        self.planned.set_recording(recording);
    }

    /// The trace of the last recorded step or flush; `None` if the device does not record.
    ///
    /// # Errors
    /// From earlier work.
    pub fn trace(&mut self) -> Result<Option<Trace>, TrainError> {
        Ok(self.planned.trace()?)
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<CheckedPlan> {
        self.planned.plan()
    }

    /// The device.
    pub fn device(&self) -> &D {
        self.planned.device()
    }

    /// Ends training, and returns the device, whose memory the next one may reuse.
    pub fn into_device(self) -> D {
        self.planned.into_device()
    }

    /// Memory allocated in each tier.
    pub fn memory_taken(&self) -> PerTier<usize> {
        self.planned.memory_taken()
    }

    /// The name and sum of squares of each gradient of the last step, in the order of the backward pass.
    pub(crate) fn gradient_squares(&mut self) -> Result<Vec<(String, f32)>, TrainError> {
        let plan = Arc::clone(self.planned.plan());
        let mut found = Vec::new();
        for instruction in &plan.instructions {
            let Work::Compute(compute) = &instruction.work else { continue };
            for &operand in &compute.writes {
                let name = &plan.value(operand.value).name;
                if let Some(gradient) = name.strip_suffix(names::SQUARES_SUFFIX) {
                    found.push((gradient.to_owned(), self.planned.read_scalar(operand)?));
                }
            }
        }
        Ok(found)
    }

    /// Every tensor of the training state, in a fixed order.
    pub(crate) fn state_tensors(&self) -> Vec<StateTensor> {
        let base = Base::of(self.model.as_ref());
        state_tensors(&self.instances, &self.options, base)
    }

    /// All parameters.
    pub(crate) fn instances(&self) -> &[ParameterInstance] {
        &self.instances
    }

    /// Reads several whole state tensors as of the last step.
    pub(crate) fn read_states(&mut self, reads: Vec<(&str, &mut [u8])>) -> Result<(), TrainError> {
        self.flush()?;
        if self.ranks.is_some() {
            let mut store = self.store();
            return reads
                .into_iter()
                .try_for_each(|(name, bytes)| store.read_bytes(name, 0, bytes));
        }
        Ok(self.planned.read_all(reads)?)
    }

    /// Reads several whole state tensors as of the last applied update.
    pub(crate) fn read_applied(&mut self, reads: Vec<(&str, &mut [u8])>) -> Result<(), TrainError> {
        Ok(self.planned.read_all(reads)?)
    }

    /// Begins to read several whole state tensors as of the last applied update, beside the next step. Returns `false` if the
    /// device or the plan does not allow it.
    pub(crate) fn begin_read_applied<'n>(
        &mut self,
        names: impl Iterator<Item = &'n str>,
    ) -> Result<bool, TrainError> {
        Ok(self.planned.begin_read(names)?)
    }

    /// Fills `bytes` with what was begun to be read, one tensor after another. Returns `false` if nothing was.
    pub(crate) fn finish_read_applied(&mut self, bytes: &mut [u8]) -> Result<bool, TrainError> {
        Ok(self.planned.finish_read(bytes)?)
    }

    /// Whether the update of the last step is still pending.
    pub(crate) fn has_pending_update(&self) -> bool {
        self.pending.is_some()
    }

    /// Allocates the host memory that the device fills fastest.
    pub(crate) fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, TrainError> {
        Ok(self.planned.host_buffer(bytes)?)
    }

    /// Reads bytes of a state tensor as of the last step, starting at byte `first`.
    pub(crate) fn read_state(
        &mut self,
        name: &str,
        first: usize,
        bytes: &mut [u8],
    ) -> Result<(), TrainError> {
        self.flush()?;
        self.store().read_bytes(name, first, bytes)
    }

    /// Writes bytes of a state tensor, starting at byte `first`.
    pub(crate) fn write_state(
        &mut self,
        name: &str,
        first: usize,
        bytes: &[u8],
    ) -> Result<(), TrainError> {
        self.prepare_write()?;
        self.store().write_bytes(name, first, bytes)?;
        self.unwritten.wrote(name, first, bytes.len());
        Ok(())
    }

    /// Sets the number of updates made.
    pub(crate) fn set_updates(&mut self, updates: u32) {
        self.updates = updates;
    }

    /// The persistent tensors of all ranks.
    fn store(&mut self) -> Store<'_, D> {
        Store { planned: &mut self.planned, ranks: self.ranks.as_deref() }
    }

    fn model_and_store(&mut self) -> Result<(&AnyModel, Store<'_, D>), TrainError> {
        let model = self.model.as_ref().ok_or_else(no_config)?;
        Ok((model, Store { planned: &mut self.planned, ranks: self.ranks.as_deref() }))
    }

    fn seed(&self, step: u32) -> Seed {
        Seed { seed: self.options.seed, step }
    }
}

pub(crate) fn check_rate(learning_rate: f32) -> Result<(), TrainError> {
    if learning_rate >= 0.0 && learning_rate.is_finite() {
        return Ok(());
    }
    let problem = format!("must be a number that is not negative, not {learning_rate}");
    Err(TrainError::Option { option: "learning_rate", problem })
}

fn no_config() -> TrainError {
    let problem = "is a program without a config, which has no Hugging Face form: read and write its \
                   parameters by name, or use checkpoints";
    TrainError::Option { option: "model", problem: problem.to_owned() }
}

/// A graph with one node, which converts a parameter to its f32 master.
fn widening_graph(instance: &ParameterInstance) -> Result<Graph, TrainError> {
    let mut graph = Graph::new();
    let parameter = &instance.parameter;
    let (shape, dtype) = (parameter.shape.clone(), parameter.dtype);
    let x = graph.parameter(&instance.name, shape, dtype, Training::Trainable);
    graph.apply(&format!("{}.master", instance.name), Op::Convert { x, dtype: DType::F32 })?;
    Ok(graph)
}
