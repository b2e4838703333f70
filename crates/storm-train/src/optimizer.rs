//! The optimizer as graphs: one for the norm, one per parameter and layer for the update.

use crate::{Moments, Precision, TrainError, TrainOptions};
use storm_exec::{Schedule, Slots};
use storm_graph::random::SEED_WORDS;
use storm_graph::{
    AdamWParameters, DType, Graph, MomentFormat, Op, ParameterInstance, Program, ProgramParameter,
    Rounding, SgdParameters, Shape, StepScalars, Tensor, TensorClass, TensorId, Training,
};

/// How parameters are updated.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerOptions {
    /// The rule, with its constants.
    pub method: OptimizerMethod,
    /// Which parameters decay.
    pub decay: DecayTargets,
    /// Gradients are scaled down to this global norm; none leaves them.
    pub max_norm: Option<f32>,
    /// How moments are stored.
    pub moments: Moments,
    /// Whether updates of AdamW yield sums from which their cosines and ratios follow, see [`OBSERVED_SUMS`](storm_graph::OBSERVED_SUMS).
    pub observes: bool,
}

impl Default for OptimizerOptions {
    fn default() -> OptimizerOptions {
        OptimizerOptions {
            method: OptimizerMethod::AdamW(AdamWParameters {
                beta1: 0.9,
                beta2: 0.95,
                epsilon: 1e-8,
                weight_decay: 0.1,
            }),
            decay: DecayTargets::Matrices,
            max_norm: Some(1.0),
            moments: Moments::Full,
            observes: false,
        }
    }
}

/// The rule that updates parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerMethod {
    /// AdamW: two moments per parameter.
    AdamW(AdamWParameters),
    /// Stochastic gradient descent: a momentum per parameter, or no state.
    Sgd(SgdParameters),
}

impl OptimizerMethod {
    /// The scalars of update number `update` (the first is 1).
    pub fn scalars(&self, learning_rate: f32, update: u32) -> StepScalars {
        match self {
            OptimizerMethod::AdamW(hyper) => StepScalars::adamw(learning_rate, hyper, update),
            OptimizerMethod::Sgd(_) => StepScalars::sgd(learning_rate),
        }
    }

    /// Suffixes of the names of what it keeps for each parameter, besides a master.
    fn moments(&self) -> &'static [&'static str] {
        match self {
            OptimizerMethod::AdamW(_) => &["first_moment", "second_moment"],
            OptimizerMethod::Sgd(hyper) if hyper.has_momentum() => &["momentum"],
            OptimizerMethod::Sgd(_) => &[],
        }
    }
}

impl OptimizerOptions {
    /// What is kept for a trainable parameter: the suffix of its name, and its format.
    pub(crate) fn state(
        &self,
        precision: Precision,
        parameter: &ProgramParameter,
    ) -> Vec<(&'static str, MomentFormat)> {
        let format = self.moments.format(precision, parameter);
        let mut state: Vec<_> =
            self.method.moments().iter().map(|&suffix| (suffix, format)).collect();
        if precision.of_parameter(parameter.dtype).has_master() {
            state.push(("master", MomentFormat::Elements(DType::F32)));
        }
        if self.observes && matches!(self.method, OptimizerMethod::AdamW(_)) {
            state.push((names::OBSERVED, MomentFormat::Observed));
        }
        state
    }
}

/// Which parameters weight decay applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayTargets {
    /// All of them.
    All,
    /// Those with two or more axes: not biases, not norms.
    Matrices,
}

/// Slot names of the per-step scalars and of what the optimizer reports.
pub(crate) mod names {
    pub(crate) const SCALARS: &str = "step.scalars";
    pub(crate) const RANDOM: &str = "step.random";
    pub(crate) const NORM: &str = "step.gradient_norm";
    pub(crate) const CLIP: &str = "step.clip";
    /// Behind the name of a parameter: sums over its update.
    pub(crate) const OBSERVED: &str = "observed";
    /// Behind the name of a gradient: the sum of its squares.
    pub(crate) const SQUARES_SUFFIX: &str = ".squares";
    /// Behind the name of a gradient: the sum of lanes of a group, and that of groups.
    pub(crate) const GROUP_SUFFIX: &str = ".group";
    pub(crate) const LANES_SUFFIX: &str = ".lanes";
}

fn tensor(name: impl Into<String>, shape: Shape, dtype: DType, class: TensorClass) -> Tensor {
    Tensor { name: name.into(), shape, dtype, class }
}

/// Declares gradients, moments and masters of the trainable parameters, and the step's scalars.
pub(crate) fn declare(
    slots: &mut Slots,
    program: &Program,
    instances: &[ParameterInstance],
    precision: Precision,
    TrainOptions { optimizer: options, lanes, .. }: &TrainOptions,
) -> Result<(), TrainError> {
    use TensorClass::{Activation, Gradient, Input, OptimizerState};
    for tied in program.tied_uses() {
        let Some(parameter) = program.section(tied.user).parameter(&tied.parameter) else {
            continue;
        };
        let precision = precision.of_parameter(parameter.dtype);
        let (name, shape) = (tied.gradient_name(program), parameter.shape.clone());
        slots.declare(tensor(name, shape, precision.gradients(), Gradient))?;
    }
    for instance in trainable(instances) {
        let (name, shape) = (&instance.name, &instance.parameter.shape);
        let state = options.state(precision, &instance.parameter);
        let precision = precision.of_parameter(instance.parameter.dtype);
        let gradient = format!("{name}.grad");
        if lanes.count() > 1 {
            for suffix in [names::GROUP_SUFFIX, names::LANES_SUFFIX] {
                let sum = format!("{gradient}{suffix}");
                slots.declare(tensor(sum, shape.clone(), DType::F32, Gradient))?;
            }
        }
        slots.declare(tensor(gradient, shape.clone(), precision.gradients(), Gradient))?;
        for (suffix, format) in state {
            let name = format!("{name}.{suffix}");
            slots.declare(tensor(name, format.shape(shape), format.dtype(), OptimizerState))?;
        }
    }
    let scalars = Shape::from([StepScalars::LEN]);
    slots.declare(tensor(names::SCALARS, scalars, DType::F32, Input))?;
    slots.declare(tensor(names::RANDOM, Shape::from([SEED_WORDS]), DType::I32, Input))?;
    slots.declare(tensor(names::NORM, Shape::scalar(), DType::F32, Activation))?;
    slots.declare(tensor(names::CLIP, Shape::scalar(), DType::F32, Activation))?;
    Ok(())
}

fn trainable(instances: &[ParameterInstance]) -> impl Iterator<Item = &ParameterInstance> {
    instances.iter().filter(|instance| instance.parameter.training == Training::Trainable)
}

/// Parts of tied gradients added up.
fn add_folds(schedule: &mut Schedule, slots: &Slots, program: &Program) -> Result<(), TrainError> {
    for tied in program.tied_uses() {
        let (whole, part) = (format!("{}.grad", tied.parameter), tied.gradient_name(program));
        let Tensor { shape, dtype, .. } = slots.tensor(slots.get(&part)?).clone();
        let mut graph = Graph::new();
        let mut source =
            |name: String| graph.source(name, shape.clone(), dtype, TensorClass::Gradient);
        let (sum, x) = (source(whole), source(part));
        graph.apply("fold", Op::Accumulate { sum, x })?;
        schedule.add_graph(graph, 0, |tensor| slots.find(&tensor.name))?;
    }
    Ok(())
}

/// What follows lanes of a step: parts of tied gradients are added up; the sum of a group is begun, or added to; the sum of groups is
/// begun, or added to; and it is rounded to the gradient of the step.
pub(crate) fn lane_schedules(
    slots: &Slots,
    program: &Program,
    instances: &[ParameterInstance],
) -> Result<[Schedule; 6], TrainError> {
    let mut schedules = std::array::from_fn(|_| Schedule::default());
    add_folds(&mut schedules[0], slots, program)?;
    for instance in trainable(instances) {
        let gradient = format!("{}.grad", instance.name);
        let dtype = slots.tensor(slots.get(&gradient)?).dtype;
        let [group, sum] =
            [names::GROUP_SUFFIX, names::LANES_SUFFIX].map(|suffix| format!("{gradient}{suffix}"));
        convert(&mut schedules[1], slots, &gradient, &group, DType::F32)?;
        accumulate(&mut schedules[2], slots, &gradient, &group)?;
        convert(&mut schedules[3], slots, &group, &sum, DType::F32)?;
        accumulate(&mut schedules[4], slots, &group, &sum)?;
        convert(&mut schedules[5], slots, &sum, &gradient, dtype)?;
    }
    Ok(schedules)
}

/// One slot in another dtype, into another slot.
fn convert(
    schedule: &mut Schedule,
    slots: &Slots,
    from: &str,
    to: &str,
    dtype: DType,
) -> Result<(), TrainError> {
    let mut graph = Graph::new();
    let x = slot_source(&mut graph, slots, from)?;
    graph.apply(to, Op::Convert { x, dtype })?;
    Ok(schedule.add_graph(graph, 0, |tensor| slots.find(&tensor.name))?)
}

/// One slot added to another.
fn accumulate(
    schedule: &mut Schedule,
    slots: &Slots,
    from: &str,
    to: &str,
) -> Result<(), TrainError> {
    let mut graph = Graph::new();
    let (sum, x) = (slot_source(&mut graph, slots, to)?, slot_source(&mut graph, slots, from)?);
    graph.apply("add", Op::Accumulate { sum, x })?;
    Ok(schedule.add_graph(graph, 0, |tensor| slots.find(&tensor.name))?)
}

fn slot_source(graph: &mut Graph, slots: &Slots, name: &str) -> Result<TensorId, TrainError> {
    let Tensor { shape, dtype, class, .. } = slots.tensor(slots.get(name)?).clone();
    Ok(graph.source(name, shape, dtype, class))
}

/// Parts of tied gradients added up, unless lanes have done that, then global norm and clip scale of all gradients.
pub(crate) fn norm_schedule(
    slots: &Slots,
    program: &Program,
    instances: &[ParameterInstance],
    precision: Precision,
    options: &TrainOptions,
) -> Result<Schedule, TrainError> {
    let mut schedule = Schedule::default();
    if options.lanes.count() == 1 {
        add_folds(&mut schedule, slots, program)?;
    }
    let graph = norm_graph(instances, precision, &options.optimizer)?;
    schedule.add_graph(graph, 0, |tensor| slots.find(&tensor.name))?;
    Ok(schedule)
}

/// The update of every trainable parameter.
pub(crate) fn update_schedule(
    slots: &Slots,
    instances: &[ParameterInstance],
    precision: Precision,
    options: &OptimizerOptions,
) -> Result<Schedule, TrainError> {
    let mut schedule = Schedule::default();
    let slot_of = |tensor: &Tensor| slots.find(&tensor.name);
    for instance in trainable(instances) {
        let graph = update_graph(instance, precision, options)?;
        schedule.add_graph(graph, instance.index, slot_of)?;
    }
    Ok(schedule)
}

pub(crate) fn norm_graph(
    instances: &[ParameterInstance],
    precision: Precision,
    options: &OptimizerOptions,
) -> Result<Graph, TrainError> {
    let mut graph = Graph::new();
    let mut parts = Vec::new();
    for instance in trainable(instances) {
        let (name, shape) = (&instance.name, instance.parameter.shape.clone());
        let precision = precision.of_parameter(instance.parameter.dtype);
        let gradient = format!("{name}.grad");
        let squares = format!("{gradient}{}", names::SQUARES_SUFFIX);
        let x = graph.source(gradient, shape, precision.gradients(), TensorClass::Gradient);
        parts.push(graph.apply_one(&squares, Op::SumOfSquares { x })?);
    }
    let norm = graph.apply_one(names::NORM, Op::GlobalNorm { parts })?;
    let max_norm = options.max_norm.unwrap_or(f32::INFINITY);
    graph.apply(names::CLIP, Op::ClipScale { norm, max_norm })?;
    Ok(graph)
}

pub(crate) fn update_graph(
    instance: &ParameterInstance,
    precision: Precision,
    options: &OptimizerOptions,
) -> Result<Graph, TrainError> {
    let ParameterInstance {
        name, parameter: ProgramParameter { shape, dtype, number, .. }, ..
    } = instance;
    let format = options.moments.format(precision, &instance.parameter);
    let kept = options.state(precision, &instance.parameter);
    let precision = precision.of_parameter(*dtype);
    let mut graph = Graph::new();
    let parameter = graph.parameter(name, shape.clone(), *dtype, Training::Trainable);
    let mut source = |suffix: &str, format: MomentFormat, class| {
        let (name, shape) = (format!("{name}.{suffix}"), format.shape(shape));
        graph.source(name, shape, format.dtype(), class)
    };
    let elements = MomentFormat::Elements;
    let gradient = source("grad", elements(precision.gradients()), TensorClass::Gradient);
    let state: Vec<(&str, TensorId)> = kept
        .into_iter()
        .map(|(suffix, format)| (suffix, source(suffix, format, TensorClass::OptimizerState)))
        .collect();
    let kept = |suffix: &str| state.iter().find(|(known, _)| *known == suffix).map(|&(_, id)| id);
    let scalars = graph.input(names::SCALARS, [StepScalars::LEN], DType::F32);
    let clip = graph.input(names::CLIP, Shape::scalar(), DType::F32);
    let random = graph.input(names::RANDOM, [SEED_WORDS], DType::I32);
    let decays = options.decay == DecayTargets::All || shape.rank() >= 2;
    let decay = |weight_decay: f32| if decays { weight_decay } else { 0.0 };
    let moment_rounding = match format {
        MomentFormat::Elements(DType::F32) => Rounding::Nearest,
        _ => Rounding::Stochastic,
    };
    let (master, rounding, stream) = (kept("master"), precision.rounding(), *number);
    let (clip, random, first_element) = (Some(clip), Some(random), 0);
    let op = match options.method {
        OptimizerMethod::AdamW(hyper) => Op::AdamW {
            parameter,
            gradient,
            first_moment: kept("first_moment").expect("AdamW keeps it"),
            second_moment: kept("second_moment").expect("AdamW keeps it"),
            master,
            scalars,
            clip,
            random,
            observed: kept(names::OBSERVED),
            hyper: AdamWParameters { weight_decay: decay(hyper.weight_decay), ..hyper },
            rounding,
            moment_rounding,
            stream,
            first_element,
        },
        OptimizerMethod::Sgd(hyper) => Op::Sgd {
            parameter,
            gradient,
            momentum: kept("momentum"),
            master,
            scalars,
            clip,
            random,
            hyper: SgdParameters { weight_decay: decay(hyper.weight_decay), ..hyper },
            rounding,
            moment_rounding,
            stream,
            first_element,
        },
    };
    graph.apply(&format!("{name}.update"), op)?;
    Ok(graph)
}

/// Copies every parameter that has a master into it.
pub(crate) fn master_schedule(
    slots: &Slots,
    instances: &[ParameterInstance],
    precision: Precision,
) -> Result<Schedule, TrainError> {
    let mut graph = Graph::new();
    let has_master = |instance: &&ParameterInstance| {
        precision.of_parameter(instance.parameter.dtype).has_master()
    };
    for instance in trainable(instances).filter(has_master) {
        let ParameterInstance { name, parameter: ProgramParameter { shape, dtype, .. }, .. } =
            instance;
        let x = graph.parameter(name, shape.clone(), *dtype, Training::Trainable);
        graph.apply(&format!("{name}.master"), Op::Convert { x, dtype: DType::F32 })?;
    }
    let mut schedule = Schedule::default();
    schedule.add_graph(graph, 0, |tensor| slots.find(&tensor.name))?;
    Ok(schedule)
}
