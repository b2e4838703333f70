//! A model as stages: templates, each repeated some number of times.
//!
//! Planning does not grow with the depth: a model of any number of equal layers has one graph for them.
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

/// Blocks of a program at most: random streams and plans number them in 16 bits.
const BLOCKS_MAX: usize = u16::MAX as usize;

/// Whether a micro-batch starts the gradients of a step or adds to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// The first micro-batch of a step: gradients are written.
    Start,
    /// A later one: gradients are added to.
    Continue,
}

/// A template, repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// For people, and before the names of numbered parameters: `layers`.
    pub name: String,
    /// Position in [`Program::templates`].
    pub template: usize,
    /// How many blocks it has.
    pub repeat: usize,
    /// How the parameters of its blocks are named.
    pub numbering: Numbering,
}

/// How the parameters of a stage are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// As in the template. A parameter of the same name in another such stage is the same parameter: it
    /// is tied.
    Plain,
    /// Each block has its own: `layers.3.attention.qkv.weight`. Several stages may be parts of one series.
    Numbered {
        /// What the numbers count: `layers`.
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

    /// A template that runs `repeat` times, each with parameters of its own.
    pub fn repeated(name: impl Into<String>, template: usize, repeat: usize) -> Stage {
        let name: String = name.into();
        let numbering = Numbering::Numbered { series: name.clone(), first: 0 };
        Stage { name, template, repeat, numbering }
    }

    /// Blocks `blocks` of a series that several stages share, named after them.
    pub fn part_of(series: &str, template: usize, blocks: Range<usize>) -> Stage {
        let name = match blocks.len() {
            1 => format!("{series} {}", blocks.start),
            _ => format!("{series} {} to {}", blocks.start, blocks.end.saturating_sub(1)),
        };
        let numbering = Numbering::Numbered { series: series.to_owned(), first: blocks.start };
        Stage { name, template, repeat: blocks.len(), numbering }
    }

    /// The program-wide name of what block `index` of the stage calls `name`.
    pub fn full_name(&self, index: usize, name: &str) -> String {
        match &self.numbering {
            Numbering::Plain => name.to_owned(),
            Numbering::Numbered { series, first } => format!("{series}.{}.{name}", first + index),
        }
    }

    /// The number of block `index` in its series: blocks of a series never share one, whatever stage they are in.
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

/// One run of a template: its stage, and its position in the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// Position in [`Program::stages`].
    pub stage: usize,
    /// From 0 to the stage's repeat.
    pub index: usize,
}

/// Where a block gets a carried tensor from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Position of the block that made it, among all blocks.
    pub block: usize,
    /// Position among what that block passes on.
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

/// A parameter of a program, once for all blocks of its stage.
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
    /// The stage that owns it: of several that share it, the first.
    pub stage: usize,
    /// Its number among the program's parameters; identifies its random streams.
    pub number: u16,
    /// What its rows are.
    pub rows: ParameterRows,
}

/// What the rows of a parameter are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterRows {
    /// One for each entry of a vocabulary, looked up or scored: embeddings and heads. A step may not touch most of them.
    Vocabulary,
    /// Anything else.
    Other,
}

/// One parameter in one block.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterInstance {
    /// Program-wide name: `layers.3.attention.qkv.weight`.
    pub name: String,
    /// Position of the block in its stage.
    pub index: u16,
    /// What it is an instance of.
    pub parameter: ProgramParameter,
}

/// The part of a tied parameter's gradient that comes from a stage other than its owner. It has an
/// accumulator of its own, added to the owner's at the end of a step, in the order of the stages.
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
    /// Checks that the stages fit together.
    ///
    /// # Errors
    /// A carried tensor that no block produces or takes or whose form does not match, a repeated
    /// name, a stage without blocks or without a template.
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

    /// The stages, in the order in which they run.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The template of a stage.
    pub fn section(&self, stage: usize) -> &Section {
        &self.templates[self.stages[stage].template]
    }

    /// All blocks in the order in which they run.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        let stages = self.stages.iter().enumerate();
        stages.flat_map(|(stage, s)| (0..s.repeat).map(move |index| Block { stage, index }))
    }

    /// How many blocks there are.
    pub fn block_count(&self) -> usize {
        self.stages.iter().map(|stage| stage.repeat).sum()
    }

    /// Whether the backward pass runs the blocks of a stage. False for all before differentiation.
    pub fn is_reached(&self, stage: usize) -> bool {
        self.reached.get(stage).copied().unwrap_or(false)
    }

    /// Where each block gets what it takes, in the order of its template's `carried_in`.
    ///
    /// # Errors
    /// Carried tensors without a match; never for a program that exists.
    pub fn origins(&self) -> Result<Vec<Vec<Origin>>, GraphError> {
        // What was passed on and not taken yet, by name.
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
        // By series, the end of each run of numbers by its first.
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

    /// Checks that tied parameters have one form wherever they are used, and that each result has one producer.
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

    /// The stage that owns what `stage` calls `name`: the first plain stage that uses it, or the stage
    /// itself if it is numbered.
    pub fn owner(&self, stage: usize, name: &str) -> usize {
        if self.stages[stage].numbering != Numbering::Plain {
            return stage;
        }
        let plain = |&other: &usize| self.stages[other].numbering == Numbering::Plain;
        let uses = |&other: &usize| self.section(other).parameter(name).is_some();
        (0..stage).filter(plain).find(uses).unwrap_or(stage)
    }

    /// All parameters, each once, in forward order of first use.
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

    /// What the rows of a parameter are, by its name in its section.
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

    /// Every parameter of every block, parameter by parameter.
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

    /// Uses of trainable parameters in stages that do not own them, in the order of the stages.
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

    /// The name of the gradient that block `index` of a stage adds to for what it calls `name`: that of
    /// the parameter, or one of its own where another stage owns the parameter.
    pub fn gradient_name(&self, block: Block, name: &str) -> String {
        let stage = &self.stages[block.stage];
        let full = stage.full_name(block.index, name);
        match self.owner(block.stage, name) == block.stage {
            true => format!("{full}.grad"),
            false => tied_gradient_name(&full, &stage.name),
        }
    }

    /// The rows of a parameter that is stored in 8 or 4 bits; none if it is not. By its name in its section.
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

    /// All batch inputs and scalars by name, each once. Exports are not among them.
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

    /// What blocks keep from one run to the next, under their full names.
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

    /// The same program with its backward pass: the gradient of `loss`, a result of the last stage, by
    /// every trainable parameter, stored as `gradient_dtype`.
    ///
    /// Each use of a parameter has a gradient of its own: see [`TiedUse`].
    ///
    /// # Errors
    /// The last stage has no result `loss` or repeats, nothing learns, or an op on the way has no
    /// gradient.
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

    /// [`Program::differentiate`], with a backward pass that sees activations as `codec` stores them. With
    /// [`ActivationCodec::Int8`] the operands of gated units wait for it in 8 bits; the forward pass gives the bits that it gives
    /// without.
    ///
    /// # Errors
    /// As [`Program::differentiate`], or nothing that the backward pass reads can be stored like that.
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

    /// By stage: whether a gradient is needed in it, because it learns or something that it takes
    /// depends on what learns.
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

    /// Makes the backward pass of every template recompute the saved tensors for which `is_kept` does
    /// not hold; it gets the section and the tensor.
    pub fn recompute(&mut self, is_kept: impl Fn(&Section, &Tensor) -> bool) {
        for section in &mut self.templates {
            let before = section.clone();
            // Carried and exported tensors outlive the block, so they are available in any case.
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
    /// The parameter of that name.
    pub fn parameter(&self, name: &str) -> Option<&Tensor> {
        let mut tensors = self.graph.tensors().iter();
        tensors.find(|t| t.name == name && matches!(t.class, TensorClass::Parameter(_)))
    }
}
