use crate::feed::{CORRECT, dropout_words, phase_words};
use crate::input_rules::{DENOMINATOR, InputRules, Reading};
use crate::micro_batch::{Entries, MicroBatch};
use crate::optimizer::{self, names};
use crate::task::check_lanes;
use crate::{Found, Moments, OptimizerMethod, OptimizerOptions, Precision, TrainError, weights};
use std::path::Path;
use storm_device::cpu::CpuDevice;
use storm_device::{Device, DeviceError};
use storm_exec::{Resident, Schedule, ScheduleId, SlotId, Slots};
use storm_graph::random::{SEED_WORDS, Seed};
use storm_graph::{
    Accumulation, ActivationCodec, AdamWParameters, DType, Graph, MomentumDirection, Op,
    ParameterInstance, Program, ProgramParameter, QuantizedRow, SgdParameters, Shape, Tensor,
    TensorClass,
};
use storm_model::{
    AnyModel, Augmentation, BuildOptions, DROPOUT_INPUT, IfExists, Initialization, ModelOutput,
    PHASE_INPUT, Packing, ParameterSource, SaveOptions,
};
use storm_plan::Lanes;

/// How a model is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainOptions {
    /// B: samples per micro-batch.
    pub batch: usize,
    /// T: tokens per sequence; 1 where a sample is no sequence.
    pub sequence: usize,
    /// Storage of parameters, gradients and state.
    pub precision: Precision,
    /// Whether batches carry segments.
    pub packing: Packing,
    /// Rows of logits that exist at a time.
    pub chunk_rows: usize,
    /// How the backward pass sees activations.
    pub activation_codec: ActivationCodec,
    /// How parameters are updated.
    pub optimizer: OptimizerOptions,
    /// Share of a target that is spread evenly over all classes.
    pub label_smoothing: f32,
    /// How pictures of a step are changed.
    pub augmentation: Augmentation,
    /// Into what the micro-batches of a step are divided, in order and evenly. The gradient of a lane is accumulated by itself. The
    /// lanes of a group are added in f32 in their order, then the sums of groups in theirs, which is rounded once to the gradient of
    /// the step.
    pub lanes: Lanes,
    /// Of initialization, stochastic rounding, dropout and augmentation.
    pub seed: u64,
}

impl TrainOptions {
    /// Defaults for a batch size.
    pub fn new(batch: usize, sequence: usize, precision: Precision) -> TrainOptions {
        TrainOptions {
            batch,
            sequence,
            precision,
            packing: Packing::Single,
            chunk_rows: storm_model::DEFAULT_CHUNK_ROWS,
            activation_codec: ActivationCodec::None,
            optimizer: OptimizerOptions::default(),
            label_smoothing: 0.0,
            augmentation: Augmentation::default(),
            lanes: Lanes::ONE,
            seed: 0,
        }
    }

    /// How the trainer builds the model.
    pub fn build_options(&self) -> BuildOptions {
        BuildOptions {
            packing: self.packing,
            output: ModelOutput::Loss { chunk_rows: self.chunk_rows },
            label_smoothing: self.label_smoothing,
            augmentation: self.augmentation,
            products: self.precision.products(),
            ..BuildOptions::training(self.batch, self.sequence, self.precision.compute())
        }
    }
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Mean cross-entropy over the targets of the step that count, before the update.
    pub loss: f32,
    /// Share of these that have the highest score, for a model that classifies.
    pub accuracy: Option<f32>,
    /// Norm of all gradients before clipping. If it is not finite, nothing was updated, unless updates are made in the backward pass.
    pub gradient_norm: f32,
}

/// A model in training, all of it in the memory of a device and without a plan: the reference that a
/// [`Trainer`](crate::Trainer) must match bit by bit. For tests, verification and comparisons only.
pub struct ReferenceTrainer<D: Device = CpuDevice> {
    resident: Resident<D>,
    model: AnyModel,
    options: TrainOptions,
    instances: Vec<ParameterInstance>,
    schedules: Schedules,
    inputs: Inputs,
    /// Updates made so far.
    updates: u32,
}

struct Schedules {
    initialize: ScheduleId,
    start: ScheduleId,
    proceed: ScheduleId,
    norm: ScheduleId,
    update: ScheduleId,
    lanes: Option<LaneSchedules>,
    fill_masters: Option<ScheduleId>,
}

/// What happens to the gradients of a lane, in a step of several.
struct LaneSchedules {
    /// Parts of tied gradients are added up.
    fold: ScheduleId,
    /// The sum of a group begins with the lane, or the lane is added to it.
    begin_group: ScheduleId,
    add_to_group: ScheduleId,
    /// The sum of groups begins with that of the first group, or that of another is added to it.
    begin_sum: ScheduleId,
    add_to_sum: ScheduleId,
    /// The sum of groups becomes the gradient of the step.
    round: ScheduleId,
}

/// Slots that the host fills.
struct Inputs {
    /// What is read of a micro-batch, and where it goes.
    readings: Vec<(Reading, SlotId)>,
    rules: InputRules,
    /// Room for a sorted order.
    staging: Vec<i32>,
    denominator: SlotId,
    /// What is dropped, in a program that drops something.
    dropout: Option<SlotId>,
    /// Training or evaluation, in a program that distinguishes them.
    phase: Option<SlotId>,
    scalars: SlotId,
    random: SlotId,
    norm: SlotId,
}

impl ReferenceTrainer<CpuDevice> {
    /// Puts the model and its training on the CPU device. Parameters are initialized from the seed.
    ///
    /// # Errors
    /// The model is not valid for these sizes, or the memory cannot be had.
    pub fn new(
        model: impl Into<AnyModel>,
        options: TrainOptions,
    ) -> Result<ReferenceTrainer, TrainError> {
        let model = model.into();
        let program = model.build(&options.build_options())?;
        ReferenceTrainer::of_program(model, options, program)
    }

    /// [`ReferenceTrainer::new`] over a program that the caller has built or changed, for the same config.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::new`].
    pub fn of_program(
        model: impl Into<AnyModel>,
        options: TrainOptions,
        program: Program,
    ) -> Result<ReferenceTrainer, TrainError> {
        ReferenceTrainer::with_passes(model, options, program, |_| {})
    }

    /// [`ReferenceTrainer::of_program`] with a change to the differentiated program, such as a choice of
    /// what to recompute.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::new`].
    pub fn with_passes(
        model: impl Into<AnyModel>,
        options: TrainOptions,
        program: Program,
        change: impl Fn(&mut Program),
    ) -> Result<ReferenceTrainer, TrainError> {
        ReferenceTrainer::on_device(model, options, program, change, CpuDevice::new)
    }
}

impl<D: Device> ReferenceTrainer<D> {
    /// [`ReferenceTrainer::with_passes`] on the device that `open` makes, given the bytes it must have.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::new`].
    pub fn on_device(
        model: impl Into<AnyModel>,
        options: TrainOptions,
        program: Program,
        change: impl Fn(&mut Program),
        open: impl FnOnce(usize) -> Result<D, DeviceError>,
    ) -> Result<ReferenceTrainer<D>, TrainError> {
        check_options(&options)?;
        let model = model.into();
        let precision = options.precision;
        let differentiated = |accumulation| -> Result<Program, TrainError> {
            let codec = options.activation_codec;
            let dtype = precision.gradients();
            let mut program = program.differentiate_with_codec(accumulation, dtype, codec)?;
            change(&mut program);
            Ok(program)
        };
        let start = differentiated(Accumulation::Start)?;
        let proceed = differentiated(Accumulation::Continue)?;

        let instances = program.parameter_instances();
        let mut slots = Slots::new();
        for ParameterInstance { name, parameter, .. } in &instances {
            let ProgramParameter { shape, dtype, training, .. } = parameter.clone();
            let class = TensorClass::Parameter(training);
            slots.declare(Tensor { name: name.clone(), shape, dtype, class })?;
        }
        check_moments(&options, &instances)?;
        optimizer::declare(&mut slots, &program, &instances, precision, &options)?;
        for input in start.inputs() {
            slots.declare(input)?;
        }

        let mut schedules = vec![
            initialize_schedule(&slots, &model, &program, &instances)?,
            Schedule::of_program(&start, &slots)?,
            Schedule::of_program(&proceed, &slots)?,
            optimizer::norm_schedule(&slots, &program, &instances, precision, &options)?,
            optimizer::update_schedule(&slots, &instances, precision, &options.optimizer)?,
        ];
        if options.lanes.count() > 1 {
            schedules.extend(optimizer::lane_schedules(&slots, &program, &instances)?);
        }
        if precision.has_master() {
            schedules.push(optimizer::master_schedule(&slots, &instances, precision)?);
        }
        let inputs = Inputs::find(&slots, InputRules::of_program(&program))?;
        let count = schedules.len();
        let resident = Resident::new(slots, schedules, open)?;
        let schedules = Schedules {
            initialize: resident.schedule(0),
            start: resident.schedule(1),
            proceed: resident.schedule(2),
            norm: resident.schedule(3),
            update: resident.schedule(4),
            lanes: (options.lanes.count() > 1).then(|| LaneSchedules {
                fold: resident.schedule(5),
                begin_group: resident.schedule(6),
                add_to_group: resident.schedule(7),
                begin_sum: resident.schedule(8),
                add_to_sum: resident.schedule(9),
                round: resident.schedule(10),
            }),
            fill_masters: precision.has_master().then(|| resident.schedule(count - 1)),
        };
        let mut trainer =
            ReferenceTrainer { resident, model, options, instances, schedules, inputs, updates: 0 };
        trainer.write_random(0)?;
        trainer.resident.run(trainer.schedules.initialize)?;
        if let Some(fill_masters) = trainer.schedules.fill_masters {
            trainer.resident.run(fill_masters)?;
        }
        // Afterwards: what is drawn here sets masters before it is rounded.
        let start = |name: &str| trainer.model.initialization(name);
        let seed = trainer.options.seed;
        weights::draw_uniform(&mut trainer.resident, &trainer.instances, seed, start)?;
        Ok(trainer)
    }

    /// One optimizer step over all micro-batches: gradients are summed, normalized by the valid
    /// tokens of the step, clipped, and applied.
    ///
    /// # Errors
    /// A batch that does not fit; nothing was changed.
    pub fn step<B: MicroBatch>(
        &mut self,
        batches: &[B],
        learning_rate: f32,
    ) -> Result<StepReport, TrainError> {
        let Found { loss, accuracy } = self.accumulate(batches)?;
        let gradient_norm = self.update(learning_rate)?;
        Ok(StepReport { loss, accuracy, gradient_norm })
    }

    /// Forward and backward of all micro-batches; afterwards the gradients of the step are in their
    /// slots. With one lane, each use of a tied parameter has one of its own until [`ReferenceTrainer::update`] sums them.
    /// Returns what they came to.
    ///
    /// # Errors
    /// A batch that does not fit; nothing was changed.
    pub fn accumulate(&mut self, batches: &[impl MicroBatch]) -> Result<Found, TrainError> {
        let valid = self.inputs.rules.check(batches, &self.options)?;
        check_lanes(&self.options, batches.len())?;
        let in_lane = batches.len() / self.options.lanes.count();
        self.resident.write(self.inputs.denominator, &[valid as f32])?;
        let seed = Seed { seed: self.options.seed, step: self.updates + 1 };
        if let Some(phase) = self.inputs.phase {
            self.resident.write(phase, &phase_words(Some(seed)))?;
        }
        let classifies = self.resident.has_result(self.schedules.start, CORRECT);
        let (mut loss, mut correct) = (0.0, 0.0);
        for (index, batch) in batches.iter().enumerate() {
            self.write_batch(batch)?;
            if let Some(dropout) = self.inputs.dropout {
                self.resident.write(dropout, &dropout_words(Some(seed), index))?;
            }
            let schedule = match index % in_lane {
                0 => self.schedules.start,
                _ => self.schedules.proceed,
            };
            self.resident.run(schedule)?;
            let mut part = [0.0];
            self.resident.result(schedule, "loss", &mut part)?;
            loss += part[0];
            if classifies {
                self.resident.result(schedule, CORRECT, &mut part)?;
                correct += part[0];
            }
            if (index + 1) % in_lane == 0 {
                self.sum_lane(index / in_lane)?;
            }
        }
        Ok(Found { loss, accuracy: classifies.then_some(correct / valid as f32) })
    }

    /// Adds the gradients of a lane to those of its group, the group to those before it if it is complete, and rounds the sum of
    /// all.
    fn sum_lane(&mut self, lane: usize) -> Result<(), TrainError> {
        let (Some(schedules), lanes) = (&self.schedules.lanes, self.options.lanes) else {
            return Ok(());
        };
        let in_group = lane % lanes.in_group();
        self.resident.run(schedules.fold)?;
        self.resident.run(match in_group {
            0 => schedules.begin_group,
            _ => schedules.add_to_group,
        })?;
        if in_group + 1 == lanes.in_group() {
            self.resident.run(match lane / lanes.in_group() {
                0 => schedules.begin_sum,
                _ => schedules.add_to_sum,
            })?;
        }
        if lane + 1 == lanes.count() {
            self.resident.run(schedules.round)?;
        }
        Ok(())
    }

    /// Applies the gradients in the slots and returns their norm. A norm that is not finite leaves
    /// parameters and state as they are.
    ///
    /// # Errors
    /// From the device.
    pub fn update(&mut self, learning_rate: f32) -> Result<f32, TrainError> {
        if !(learning_rate >= 0.0 && learning_rate.is_finite()) {
            let problem = format!("must be a number that is not negative, not {learning_rate}");
            return Err(TrainError::Option { option: "learning_rate", problem });
        }
        let update = self.updates + 1;
        let scalars = self.options.optimizer.method.scalars(learning_rate, update);
        self.resident.write(self.inputs.scalars, &scalars.to_array())?;
        self.write_random(update)?;
        self.resident.run(self.schedules.norm)?;
        let mut norm = [0.0];
        self.resident.read(self.inputs.norm, &mut norm)?;
        if norm[0].is_finite() {
            self.resident.run(self.schedules.update)?;
            self.updates = update;
        }
        Ok(norm[0])
    }

    /// Loads all parameters of a model of the same config; a head that the source lacks stays as it was initialized.
    ///
    /// # Errors
    /// A tensor is missing, has another shape, or cannot be read.
    pub fn load(&mut self, source: &impl ParameterSource) -> Result<(), TrainError> {
        weights::load_or_start_fresh(&mut self.resident, &self.model, source)
    }

    /// Loads the adapters of a model whose config has some, and what is trained whole beside them.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::load`].
    pub fn load_adapters(&mut self, source: &impl ParameterSource) -> Result<(), TrainError> {
        weights::load_adapters(&mut self.resident, &self.model, source)
    }

    /// Saves the adapters as a directory of PEFT, which is told to load the base from `base`.
    ///
    /// # Errors
    /// As [`ReferenceTrainer::save`]; also if the model has no adapters.
    pub fn save_adapters(&self, output: &Path, base: Option<&str>) -> Result<(), TrainError> {
        let refuse = IfExists::Refuse;
        weights::save_adapters(&mut &self.resident, &self.model, output, base, refuse)
    }

    /// Saves all parameters as a Hugging Face directory.
    ///
    /// # Errors
    /// From the file system; an existing directory is left as it was.
    pub fn save(&self, output: &Path, options: &SaveOptions<'_>) -> Result<(), TrainError> {
        weights::save(&mut &self.resident, &self.model, output, options)
    }

    /// A parameter (`layers.0.attention.qkv.weight`), its gradient (`NAME.grad`) or its state
    /// (`NAME.first_moment`, …), widened to f32.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn read(&self, name: &str) -> Result<Vec<f32>, TrainError> {
        weights::read(&mut &self.resident, name)
    }

    /// Sets a tensor that [`ReferenceTrainer::read`] knows, rounded to its dtype; a parameter's f32 master, where
    /// it has one, gets the values as they are.
    ///
    /// # Errors
    /// There is no such tensor, or it has another number of elements.
    pub fn write(&mut self, name: &str, values: &[f32]) -> Result<(), TrainError> {
        weights::write(&mut self.resident, name, values, self.model.quantized())
    }

    /// Names of all parameters, layer by layer.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> {
        self.instances.iter().map(|instance| instance.name.as_str())
    }

    /// The device memory in use, and how much of it holds the activations of a step.
    pub fn memory_bytes(&self) -> (usize, usize) {
        self.resident.memory_bytes(self.schedules.start)
    }

    /// Forward and backward of one micro-batch with `observe` called before each instruction: its
    /// op's name, and none after the last.
    ///
    /// # Errors
    /// A batch that does not fit.
    pub fn profile(
        &mut self,
        batch: &impl MicroBatch,
        observe: impl FnMut(Option<&'static str>),
    ) -> Result<(), TrainError> {
        let valid = self.inputs.rules.check(std::slice::from_ref(batch), &self.options)?;
        self.resident.write(self.inputs.denominator, &[valid as f32])?;
        self.write_batch(batch)?;
        Ok(self.resident.run_observed(self.schedules.start, observe)?)
    }

    /// Waits until everything is done, for those who measure time.
    ///
    /// # Errors
    /// Of anything that ran before.
    pub fn synchronize(&mut self) -> Result<(), TrainError> {
        Ok(self.resident.synchronize()?)
    }

    /// The device.
    pub fn device(&self) -> &D {
        self.resident.device()
    }

    fn write_random(&mut self, step: u32) -> Result<(), TrainError> {
        let words: [i32; SEED_WORDS] = Seed { seed: self.options.seed, step }.to_words();
        Ok(self.resident.write(self.inputs.random, &words)?)
    }

    fn write_batch(&mut self, batch: &impl MicroBatch) -> Result<(), TrainError> {
        let Inputs { readings, staging, .. } = &mut self.inputs;
        for (reading, slot) in readings {
            match reading.entries(batch, staging) {
                Entries::F32(values) => self.resident.write(*slot, values)?,
                Entries::Bf16(values) => self.resident.write(*slot, values)?,
                Entries::I32(values) => self.resident.write(*slot, values)?,
                Entries::U8(values) => self.resident.write(*slot, values)?,
            }
        }
        Ok(())
    }
}

impl Inputs {
    fn find(slots: &Slots, rules: InputRules) -> Result<Inputs, TrainError> {
        Ok(Inputs {
            staging: vec![0; rules.count_max()],
            readings: rules.slots(slots),
            rules,
            denominator: slots.get(DENOMINATOR)?,
            dropout: slots.find(DROPOUT_INPUT),
            phase: slots.find(PHASE_INPUT),
            scalars: slots.get(names::SCALARS)?,
            random: slots.get(names::RANDOM)?,
            norm: slots.get(names::NORM)?,
        })
    }
}

pub(crate) fn check_options(options: &TrainOptions) -> Result<(), TrainError> {
    let refuse =
        |option, problem: &str| Err(TrainError::Option { option, problem: problem.to_owned() });
    let weight_decay = match options.optimizer.method {
        OptimizerMethod::AdamW(AdamWParameters { beta1, beta2, epsilon, weight_decay }) => {
            if !(0.0..1.0).contains(&beta1) || !(0.0..1.0).contains(&beta2) {
                return refuse("betas", "must be at least 0 and less than 1");
            }
            if !(epsilon > 0.0 && epsilon.is_finite()) {
                return refuse("epsilon", "must be positive");
            }
            weight_decay
        }
        OptimizerMethod::Sgd(SgdParameters { momentum, direction, weight_decay }) => {
            if !(0.0..1.0).contains(&momentum) {
                return refuse("momentum", "must be at least 0 and less than 1");
            }
            if direction == MomentumDirection::Nesterov && momentum == 0.0 {
                return refuse("nesterov", "needs a momentum; set one, or leave nesterov out");
            }
            weight_decay
        }
    };
    if !(weight_decay >= 0.0 && weight_decay.is_finite()) {
        return refuse("weight_decay", "must not be negative");
    }
    match options.optimizer.max_norm {
        Some(max_norm) if max_norm.is_nan() || max_norm <= 0.0 => {
            refuse("max_norm", "must be positive; leave it out to turn clipping off")
        }
        _ => Ok(()),
    }
}

/// Refuses moments in 8 bits for a model that has no parameter for them, and for constants with which an update would
/// have no bound.
pub(crate) fn check_moments(
    options: &TrainOptions,
    instances: &[ParameterInstance],
) -> Result<(), TrainError> {
    let OptimizerOptions { method, moments, .. } = &options.optimizer;
    let refuse = |problem: String| Err(TrainError::Option { option: "moments", problem });
    let adamw = match method {
        OptimizerMethod::AdamW(adamw) => adamw,
        OptimizerMethod::Sgd(_) if *moments == Moments::Full => return Ok(()),
        OptimizerMethod::Sgd(_) => {
            let problem = "int8 is for the moments of AdamW; leave it out with sgd";
            return refuse(problem.to_owned());
        }
    };
    if let Some(problem) = moments.problem(options.precision, instances) {
        return refuse(problem.to_owned());
    }
    match *moments == Moments::Int8 && adamw.first_moment_bound().is_none() {
        true => {
            let AdamWParameters { beta1, beta2, .. } = adamw;
            refuse(format!("int8 needs beta1² to be less than beta2, not {beta1}² and {beta2}"))
        }
        false => Ok(()),
    }
}

/// Fresh values for every parameter.
fn initialize_schedule(
    slots: &Slots,
    model: &AnyModel,
    program: &Program,
    instances: &[ParameterInstance],
) -> Result<Schedule, TrainError> {
    let mut schedule = Schedule::default();
    for instance in instances {
        let start = model.initialization(&instance.parameter.name);
        let quantized = program.quantized_rows(&instance.parameter.name);
        let graph = initial_graph(start, instance, quantized)?;
        schedule.add_graph(graph, instance.index, |tensor| slots.find(&tensor.name))?;
    }
    Ok(schedule)
}

/// The nodes that make a parameter as it starts; `quantized` are the rows of one that is stored in 8 or 4 bits.
pub(crate) fn initial_graph(
    start: Initialization,
    instance: &ParameterInstance,
    quantized: Option<QuantizedRow>,
) -> Result<Graph, TrainError> {
    let ParameterInstance { name, parameter, .. } = instance;
    let ProgramParameter { shape, dtype, number, .. } = parameter.clone();
    let mut graph = Graph::new();
    let random = graph.input(names::RANDOM, [SEED_WORDS], DType::I32);
    let quantized = quantized.filter(|_| dtype == DType::U8);
    let op = match start {
        Initialization::Constant(value) => Op::Fill { shape, dtype, value },
        // Drawn on the host: see `weights::draw_uniform`.
        Initialization::Uniform { .. } | Initialization::UniformByRow => {
            Op::Fill { shape, dtype, value: 0.0 }
        }
        Initialization::Normal { deviation } => {
            let normal =
                |shape, dtype| Op::RandomNormal { random, shape, dtype, deviation, stream: number };
            match quantized {
                None => normal(shape, dtype),
                Some(QuantizedRow { format, columns }) => {
                    let op = normal(Shape::from([shape.rows(), columns]), DType::BF16);
                    let x = graph.apply_one(&format!("{name}.values"), op)?;
                    Op::Quantize { x, format }
                }
            }
        }
    };
    graph.apply(name, op)?;
    Ok(graph)
}
