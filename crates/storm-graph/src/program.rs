//! A model as stages: templates, each repeated any number of times.
//!
//! The cost of planning does not grow with depth: any number of equal layers share one graph.
//! Stages run in order. A *block* is one run of a stage's template. Blocks share *carried* tensors,
//! *exports* that every later block may read, and parameters and inputs of the same name.

use crate::codec::{encode_units, reserve_codes};
use crate::section::SectionRequest;
use crate::{
    ActivationCodec, DType, Graph, GraphError, Op, QuantizedRow, Section, Shape, Tensor,
    TensorClass, TensorId, Training, recompute,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Maximum number of blocks: random streams and plans number them in 16 bits.
const BLOCKS_MAX: usize = u16::MAX as usize;

/// Whether a micro-batch overwrites the gradients of a step or adds to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// The first micro-batch of a step: gradients are written.
    Start,
    /// A later one: gradients are added to.
    Continue,
}

/// A repeated template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Name for messages and for the gradients of tied parameters.
    pub name: String,
    /// Index into [`Program::templates`].
    pub template: usize,
    /// Number of blocks.
    pub repeat: usize,
    /// How the parameters of its blocks are named.
    pub numbering: Numbering,
}

/// How the parameters of a stage are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// As in the template. A parameter of the same name in another such stage is the same, tied
    /// parameter.
    Plain,
    /// Each block has its own: `layers.3.attention.qkv.weight`. Several stages may belong to one
    /// series.
    Numbered {
        /// The name of the series: `layers`.
        series: String,
        /// The number of the first block.
        first: usize,
    },
}

impl Stage {
    /// A template that runs once.
    pub fn once(name: impl Into<String>, template: usize) -> Stage {
        Stage { name: name.into(), template, repeat: 1, numbering: Numbering::Plain }
    }

    /// A template that runs `repeat` times, each time with its own parameters.
    pub fn repeated(name: impl Into<String>, template: usize, repeat: usize) -> Stage {
        let name: String = name.into();
        let numbering = Numbering::Numbered { series: name.clone(), first: 0 };
        Stage { name, template, repeat, numbering }
    }

    /// The blocks `blocks` of a series that several stages share. The stage is named after them.
    pub fn part_of(series: &str, template: usize, blocks: Range<usize>) -> Stage {
        let name = match blocks.len() {
            1 => format!("{series} {}", blocks.start),
            _ => format!("{series} {} to {}", blocks.start, blocks.end.saturating_sub(1)),
        };
        let numbering = Numbering::Numbered { series: series.to_owned(), first: blocks.start };
        Stage { name, template, repeat: blocks.len(), numbering }
    }

    /// The program-wide name of the tensor called `name` in block `index` of the stage.
    pub fn full_name(&self, index: usize, name: &str) -> String {
        match &self.numbering {
            Numbering::Plain => name.to_owned(),
            Numbering::Numbered { series, first } => format!("{series}.{}.{name}", first + index),
        }
    }

    /// The number of block `index` in its series. It is unique across all stages of the series.
    pub fn number(&self, index: usize) -> usize {
        self.numbers().map_or(index, |(_, numbers)| numbers.start + index)
    }

    /// The series and numbers of its blocks.
    fn numbers(&self) -> Option<(&str, Range<usize>)> {
        match &self.numbering {
            Numbering::Plain => None,
            Numbering::Numbered { series, first } => {
                Some((series, *first..first.saturating_add(self.repeat)))
            }
        }
    }
}

/// One run of a template: its stage and its index in the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// Index into [`Program::stages`].
    pub stage: usize,
    /// Less than the stage's `repeat`.
    pub index: usize,
}

/// The origin of a carried tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Index of the block that produced it, among all blocks.
    pub block: usize,
    /// Index among the carried outputs of that block.
    pub output: usize,
}

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    templates: Vec<Section>,
    stages: Vec<Stage>,
    /// By stage: whether gradients reach it. Empty before differentiation.
    reached: Vec<bool>,
}

/// A parameter of a program, listed once for all blocks of its stage.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramParameter {
    /// Name within the template: `attention.qkv.weight`.
    pub name: String,
    /// Extents.
    pub shape: Shape,
    /// Storage.
    pub dtype: DType,
    /// Trainable or frozen.
    pub training: Training,
    /// The stage that owns it: the first one that uses it.
    pub stage: usize,
    /// Its number among the program's parameters, which identifies its random streams.
    pub number: u16,
    /// The kind of its rows.
    pub rows: ParameterRows,
}

/// The kind of a parameter's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterRows {
    /// One for each entry of a vocabulary: embeddings and heads. A step may not touch most of them.
    Vocabulary,
    /// Anything else.
    Other,
}

/// One parameter in one block.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterInstance {
    /// Program-wide name: `layers.3.attention.qkv.weight`.
    pub name: String,
    /// Index of the block in its stage.
    pub index: u16,
    /// The parameter.
    pub parameter: ProgramParameter,
}

/// The part of a tied parameter's gradient from a stage other than its owner. It has its own
/// accumulator, which is added to the owner's at the end of a step, in stage order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TiedUse {
    /// The parameter.
    pub parameter: String,
    /// The stage that owns it.
    pub owner: usize,
    /// The stage that also uses it.
    pub user: usize,
}

impl Program {
    /// Creates a program and checks that the stages match.
    ///
    /// # Errors
    /// A carried tensor that no block produces or takes or whose shape or dtype does not match, a
    /// repeated name, a stage without blocks or without a template.
    pub fn new(templates: Vec<Section>, stages: Vec<Stage>) -> Result<Program, GraphError> {
        let program = Program { templates, stages, reached: Vec::new() };
        program.check_stages()?;
        program.origins()?;
        for section in &program.templates {
            section.check_names()?;
        }
        program.check_parameters()?;
        Ok(program)
    }

    /// The graphs that stages repeat.
    pub fn templates(&self) -> &[Section] {
        &self.templates
    }

    /// The stages, in execution order.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The template of a stage.
    pub fn section(&self, stage: usize) -> &Section {
        &self.templates[self.stages[stage].template]
    }

    /// All blocks, in execution order.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        let stages = self.stages.iter().enumerate();
        stages.flat_map(|(stage, s)| (0..s.repeat).map(move |index| Block { stage, index }))
    }

    /// Number of blocks.
    pub fn block_count(&self) -> usize {
        self.stages.iter().map(|stage| stage.repeat).sum()
    }

    /// Whether the backward pass runs the blocks of a stage. Always false before differentiation.
    pub fn is_reached(&self, stage: usize) -> bool {
        self.reached.get(stage).copied().unwrap_or(false)
    }

    /// The origin of each carried tensor that a block takes, in the order of its template's
    /// `carried_in`.
    ///
    /// # Errors
    /// A carried tensor has no match. Never for an existing program.
    pub fn origins(&self) -> Result<Vec<Vec<Origin>>, GraphError> {
        // Carried tensors that are not taken yet, by name.
        let mut open: BTreeMap<&str, Origin> = BTreeMap::new();
        let mut origins = Vec::new();
        let blocks: Vec<Block> = self.blocks().collect();
        for (number, block) in blocks.iter().enumerate() {
            let section = self.section(block.stage);
            let mut taken = Vec::new();
            for carried in &section.carried_in {
                let name = carried.name.as_str();
                let Some(origin) = open.remove(name) else {
                    let stage = &self.stages[block.stage].name;
                    return section.error(format!(
                        "takes `{name}` in stage `{stage}`, which no block before it passes on, or \
                         another block has taken"
                    ));
                };
                let maker = self.section(blocks[origin.block].stage);
                let made = maker.graph.tensor(maker.carried_out[origin.output].tensor);
                let wanted = section.graph.tensor(carried.tensor);
                if (&made.shape, made.dtype) != (&wanted.shape, wanted.dtype) {
                    return section.error(format!(
                        "takes `{name}` as {} {}, but `{}` passes on {} {}",
                        wanted.dtype, wanted.shape, maker.name, made.dtype, made.shape
                    ));
                }
                taken.push(origin);
            }
            origins.push(taken);
            for (output, carried) in section.carried_out.iter().enumerate() {
                let origin = Origin { block: number, output };
                if open.insert(&carried.name, origin).is_some() {
                    let name = &carried.name;
                    return section.error(format!(
                        "passes on `{name}` before the one that was passed on earlier is taken"
                    ));
                }
            }
        }
        match open.into_iter().next() {
            None => Ok(origins),
            Some((name, origin)) => self
                .section(blocks[origin.block].stage)
                .error(format!("passes on `{name}`, which no later block takes")),
        }
    }

    fn check_stages(&self) -> Result<(), GraphError> {
        let error = |stage: &Stage, problem: String| {
            Err(GraphError::Section { section: stage.name.clone(), problem })
        };
        if self.stages.is_empty() {
            let section = "program".to_owned();
            return Err(GraphError::Section { section, problem: "has no stages".to_owned() });
        }
        let mut names = BTreeSet::new();
        // By series: ranges of used numbers, as a map from first to end.
        let mut taken: BTreeMap<&str, BTreeMap<usize, usize>> = BTreeMap::new();
        for stage in &self.stages {
            if stage.template >= self.templates.len() {
                let count = self.templates.len();
                let number = stage.template;
                return error(stage, format!("has template {number}; there are {count}"));
            }
            if stage.repeat == 0 || self.block_count() > BLOCKS_MAX {
                let repeat = stage.repeat;
                return error(stage, format!("must repeat 1 to {BLOCKS_MAX} times, not {repeat}"));
            }
            if stage.numbering == Numbering::Plain && stage.repeat > 1 {
                return error(stage, "repeats, so its parameters must be numbered".to_owned());
            }
            if !names.insert(&stage.name) {
                return error(stage, "is the name of two stages".to_owned());
            }
            if let Some((series, numbers)) = stage.numbers() {
                let runs = taken.entry(series).or_default();
                let before = runs.range(..numbers.end).next_back();
                if before.is_some_and(|(_, &end)| end > numbers.start) {
                    let Range { start, end } = numbers;
                    let problem = format!("has numbers {start}..{end} of `{series}`, as another");
                    return error(stage, problem);
                }
                runs.insert(numbers.start, numbers.end);
            }
        }
        Ok(())
    }

    /// Checks that a tied parameter has the same shape and dtype in all stages, and that each
    /// result has one producer.
    fn check_parameters(&self) -> Result<(), GraphError> {
        if self.parameters().len() > usize::from(u16::MAX) {
            return self.section(0).error("the program has more than 65535 parameters".to_owned());
        }
        for stage in 0..self.stages.len() {
            let section = self.section(stage);
            for id in section.outside_tensors() {
                let tensor = section.graph.tensor(id);
                if !matches!(tensor.class, TensorClass::Parameter(_)) {
                    continue;
                }
                let owner = self.owner(stage, &tensor.name);
                let owned = self.section(owner).parameter(&tensor.name);
                if owned.is_some_and(|owned| owned != tensor) {
                    let (name, owner) = (&tensor.name, &self.stages[owner].name);
                    return section.error(format!(
                        "`{name}` differs from the one that it shares with `{owner}`"
                    ));
                }
            }
        }
        let mut results = BTreeSet::new();
        for block in self.blocks() {
            for (name, _) in &self.section(block.stage).results {
                let name = self.stages[block.stage].full_name(block.index, name);
                if !results.insert(name.clone()) {
                    return self
                        .section(block.stage)
                        .error(format!("two blocks have a result named `{name}`"));
                }
            }
        }
        Ok(())
    }

    /// The stage that owns the parameter called `name` in `stage`: the first plain stage that uses
    /// it, or `stage` itself if it is numbered.
    pub fn owner(&self, stage: usize, name: &str) -> usize {
        if self.stages[stage].numbering != Numbering::Plain {
            return stage;
        }
        let plain = |&other: &usize| self.stages[other].numbering == Numbering::Plain;
        let uses = |&other: &usize| self.section(other).parameter(name).is_some();
        (0..stage).filter(plain).find(uses).unwrap_or(stage)
    }

    /// All parameters, each once, in the order of first use in the forward pass.
    pub fn parameters(&self) -> Vec<ProgramParameter> {
        let mut parameters: Vec<ProgramParameter> = Vec::new();
        for stage in 0..self.stages.len() {
            let section = self.section(stage);
            for id in section.outside_tensors() {
                let Tensor { name, shape, dtype, class } = section.graph.tensor(id);
                let TensorClass::Parameter(training) = *class else { continue };
                if self.owner(stage, name) == stage {
                    parameters.push(ProgramParameter {
                        name: name.clone(),
                        shape: shape.clone(),
                        dtype: *dtype,
                        training,
                        stage,
                        number: u16::try_from(parameters.len()).unwrap_or(u16::MAX),
                        rows: self.rows_of(name),
                    });
                }
            }
        }
        parameters
    }

    /// The kind of a parameter's rows, by its name in its section.
    fn rows_of(&self, parameter: &str) -> ParameterRows {
        let graphs = self.templates.iter().map(|section| &section.graph);
        let is_vocabulary = |graph: &Graph, op: &Op<TensorId>| match *op {
            Op::Embedding { table: weight, .. }
            | Op::HeadLoss { weight, .. }
            | Op::HeadLossGrad { weight, .. } => graph.tensor(weight).name == parameter,
            _ => false,
        };
        let mut found =
            graphs.map(|graph| graph.nodes().iter().any(|n| is_vocabulary(graph, &n.op)));
        match found.any(|found| found) {
            true => ParameterRows::Vocabulary,
            false => ParameterRows::Other,
        }
    }

    /// Every parameter of every block, ordered by parameter.
    pub fn parameter_instances(&self) -> Vec<ParameterInstance> {
        let mut instances = Vec::new();
        for parameter in self.parameters() {
            let stage = &self.stages[parameter.stage];
            for index in 0..stage.repeat {
                let name = stage.full_name(index, &parameter.name);
                let parameter = parameter.clone();
                instances.push(ParameterInstance { name, index: index as u16, parameter });
            }
        }
        instances
    }

    /// Uses of trainable parameters in stages that do not own them, in stage order.
    pub fn tied_uses(&self) -> Vec<TiedUse> {
        let mut uses = Vec::new();
        for user in 0..self.stages.len() {
            let section = self.section(user);
            for id in section.outside_tensors() {
                let tensor = section.graph.tensor(id);
                let owner = self.owner(user, &tensor.name);
                if tensor.class == TensorClass::Parameter(Training::Trainable) && owner != user {
                    uses.push(TiedUse { parameter: tensor.name.clone(), owner, user });
                }
            }
        }
        uses
    }

    /// The name of the gradient to which a block adds for the parameter that it calls `name`: the
    /// parameter's own, or a separate one if another stage owns the parameter.
    pub fn gradient_name(&self, block: Block, name: &str) -> String {
        let stage = &self.stages[block.stage];
        let full = stage.full_name(block.index, name);
        match self.owner(block.stage, name) == block.stage {
            true => format!("{full}.grad"),
            false => tied_gradient_name(&full, &stage.name),
        }
    }

    /// The row format of a parameter stored in 8 or 4 bits, by its name in its section. `None` if
    /// it is not.
    pub fn quantized_rows(&self, parameter: &str) -> Option<QuantizedRow> {
        let graphs = self.templates.iter().map(|section| &section.graph);
        let nodes = graphs.flat_map(|graph| graph.nodes().iter().map(move |node| (graph, node)));
        nodes.into_iter().find_map(|(graph, node)| match node.op {
            Op::Dequantize { rows, form, .. } => {
                (graph.tensor(rows).name == parameter).then_some(form)
            }
            _ => None,
        })
    }

    /// All batch inputs and scalars by name, each once, without exports.
    pub fn inputs(&self) -> Vec<Tensor> {
        let exported: BTreeSet<&str> =
            self.templates.iter().flat_map(|s| &s.exports).map(|(name, _)| name.as_str()).collect();
        let mut inputs: Vec<Tensor> = Vec::new();
        for stage in 0..self.stages.len() {
            let section = self.section(stage);
            for id in section.outside_tensors() {
                let tensor = section.graph.tensor(id);
                if tensor.class == TensorClass::Input
                    && !exported.contains(tensor.name.as_str())
                    && !inputs.iter().any(|known| known.name == tensor.name)
                {
                    inputs.push(tensor.clone());
                }
            }
        }
        inputs
    }

    /// The caches that blocks keep between runs, with their full names.
    pub fn caches(&self) -> Vec<Tensor> {
        let mut caches = Vec::new();
        for block in self.blocks() {
            let section = self.section(block.stage);
            for id in section.outside_tensors() {
                let tensor = section.graph.tensor(id);
                if tensor.class == TensorClass::Cache {
                    let name = self.stages[block.stage].full_name(block.index, &tensor.name);
                    caches.push(Tensor { name, ..tensor.clone() });
                }
            }
        }
        caches
    }

    /// The same program with its backward pass: the gradient of `loss`, a result of the last stage,
    /// with respect to every trainable parameter, stored as `gradient_dtype`.
    ///
    /// Each use of a parameter has its own gradient, see [`TiedUse`].
    ///
    /// # Errors
    /// The last stage has no result `loss` or repeats, there is no trainable parameter, or an op on
    /// the way has no gradient.
    pub fn differentiate(
        &self,
        accumulation: Accumulation,
        gradient_dtype: DType,
    ) -> Result<Program, GraphError> {
        let mut program = self.clone();
        let last = self.stages.len() - 1;
        if !gradient_dtype.is_float() {
            let problem = format!("gradients are f32 or bf16, not {gradient_dtype}");
            return self.section(last).error(problem);
        }
        let loss = self.section(last).results.iter().find(|(name, _)| name == "loss");
        let Some(&(_, loss)) = loss else {
            return self
                .section(last)
                .error("has no result named `loss` to differentiate".to_owned());
        };
        program.reached = self.reach()?;
        if !program.reached[last] {
            return self.section(last).error("nothing that the loss depends on learns".to_owned());
        }
        let origins = self.origins()?;
        let stage_of: Vec<usize> = self.blocks().map(|block| block.stage).collect();
        for template in 0..self.templates.len() {
            let users: Vec<usize> = (0..stage_of.len())
                .filter(|&b| self.stages[stage_of[b]].template == template)
                .filter(|&b| program.reached[stage_of[b]])
                .collect();
            if users.is_empty() {
                continue;
            }
            let is_last = self.stages[last].template == template;
            if is_last && users.len() > 1 {
                return self.section(last).error(
                    "computes the loss, so no other block may have its template".to_owned(),
                );
            }
            let carried = 0..self.templates[template].carried_in.len();
            let wants = |input: usize| {
                users.iter().any(|&b| program.reached[stage_of[origins[b][input].block]])
            };
            let wants_carried: Vec<bool> = carried.map(wants).collect();
            program.templates[template].differentiate(&SectionRequest {
                accumulation,
                gradient_dtype,
                loss: is_last.then_some(loss),
                wants_carried: &wants_carried,
            })?;
        }
        Ok(program)
    }

    /// [`Program::differentiate`], with a backward pass that reads activations as stored by
    /// `codec`. With [`ActivationCodec::Int8`], the operands of gated units are stored for it in 8
    /// bits. The results of the forward pass are bit-identical to those without a codec.
    ///
    /// # Errors
    /// As [`Program::differentiate`], or the codec does not apply to any tensor that the backward
    /// pass reads.
    pub fn differentiate_with_codec(
        &self,
        accumulation: Accumulation,
        gradient_dtype: DType,
        codec: ActivationCodec,
    ) -> Result<Program, GraphError> {
        if codec == ActivationCodec::None {
            return self.differentiate(accumulation, gradient_dtype);
        }
        let mut forward = self.clone();
        forward.templates.iter_mut().for_each(|section| reserve_codes(&mut section.graph));
        let mut program = forward.differentiate(accumulation, gradient_dtype)?;
        let mut coded = 0;
        for section in program.templates.iter_mut().filter(|section| section.backward.is_some()) {
            let results = section.handed_out();
            coded += encode_units(&mut section.graph, &results);
        }
        match coded {
            0 => self.section(0).error(
                "no gated unit of the program is differentiated, so there is no activation to store in 8 bits: \
                 turn the codec of activations off"
                    .to_owned(),
            ),
            _ => Ok(program),
        }
    }

    /// By stage: whether it needs a gradient, because it has trainable parameters or takes a tensor
    /// that depends on some.
    fn reach(&self) -> Result<Vec<bool>, GraphError> {
        let origins = self.origins()?;
        let stage_of: Vec<usize> = self.blocks().map(|block| block.stage).collect();
        let mut reached: Vec<bool> =
            (0..self.stages.len()).map(|stage| self.section(stage).learns()).collect();
        for (block, origins) in origins.iter().enumerate() {
            if origins.iter().any(|origin| reached[stage_of[origin.block]]) {
                reached[stage_of[block]] = true;
            }
        }
        Ok(reached)
    }

    /// Makes the backward pass of every template recompute the saved tensors for which `is_kept`
    /// returns false. `is_kept` gets the section and the tensor.
    pub fn recompute(&mut self, is_kept: impl Fn(&Section, &Tensor) -> bool) {
        for section in &mut self.templates {
            let before = section.clone();
            // Carried and exported tensors outlive the block, so they are always available.
            let lasting: BTreeSet<TensorId> = before
                .carried_out
                .iter()
                .map(|carried| carried.tensor)
                .chain(before.exports.iter().map(|&(_, id)| id))
                .collect();
            recompute(&mut section.graph, &before.handed_out(), |id| {
                lasting.contains(&id) || is_kept(&before, before.graph.tensor(id))
            });
        }
    }
}

impl TiedUse {
    /// The name of its accumulator.
    pub fn gradient_name(&self, program: &Program) -> String {
        tied_gradient_name(&self.parameter, &program.stages[self.user].name)
    }
}

/// The gradient of a parameter in a stage that does not own it: `embedding.weight.grad@head`.
fn tied_gradient_name(parameter: &str, stage: &str) -> String {
    format!("{parameter}.grad@{stage}")
}

impl Section {
    /// The parameter with this name.
    pub fn parameter(&self, name: &str) -> Option<&Tensor> {
        let mut tensors = self.graph.tensors().iter();
        tensors.find(|t| t.name == name && matches!(t.class, TensorClass::Parameter(_)))
    }
}
