//! A template: the graph of one block of a model, and its connections to other blocks.

use crate::autodiff::{GradientRequest, differentiate, find_wanted, parameter_gradient_dtype};
use crate::graph::Phase;
use crate::overwrite::copy_what_is_still_needed;
use crate::{
    Accumulation, DType, Graph, GraphError, Op, Shape, Tensor, TensorClass, TensorId, Training,
};
use std::collections::BTreeMap;

/// The graph of a block, which a [`Program`](crate::Program) may repeat any number of times.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// Name for messages: `embedding`, `layer`, `head`.
    pub name: String,
    /// Forward nodes and, once differentiated, backward nodes.
    pub graph: Graph,
    /// Tensors that it takes from earlier blocks. Gradients flow back the same way.
    pub carried_in: Vec<Carried>,
    /// Tensors that it passes to later blocks.
    pub carried_out: Vec<Carried>,
    /// Tensors that any later block may read by name, without a gradient, such as tables.
    pub exports: Vec<(String, TensorId)>,
    /// Results for the host: `loss`, `logits`.
    pub results: Vec<(String, TensorId)>,
    /// Added by [`Program::differentiate`](crate::Program::differentiate). `None` if no gradient
    /// reaches the section.
    pub backward: Option<SectionBackward>,
}

/// A tensor passed from one block to another. A block takes the tensor that the last block before
/// it passed on under the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// `hidden` for the residual stream. A skip connection has its own name.
    pub name: String,
    /// The tensor in the section's graph.
    pub tensor: TensorId,
}

impl Carried {
    /// A tensor with a name.
    pub fn new(name: impl Into<String>, tensor: TensorId) -> Carried {
        Carried { name: name.into(), tensor }
    }
}

/// How the backward nodes of a section connect to the rest of the program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SectionBackward {
    /// The gradient of each tensor of `carried_out`, from the block that took it.
    pub carried_out_gradients: Vec<TensorId>,
    /// The gradient of each tensor of `carried_in`, for the block that produced it. `None` if no
    /// earlier block is trained.
    pub carried_in_gradients: Vec<Option<TensorId>>,
    /// One entry per trainable parameter of the section.
    pub parameters: Vec<ParameterGradient>,
}

/// The gradient of one parameter in one section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterGradient {
    /// The parameter.
    pub parameter: TensorId,
    /// The gradient so far, if the section adds to one. Shares memory with `gradient`.
    pub accumulator: Option<TensorId>,
    /// The gradient including this micro-batch's part.
    pub gradient: TensorId,
}

/// What a section's backward pass must compute.
pub(crate) struct SectionRequest<'a> {
    pub(crate) accumulation: Accumulation,
    pub(crate) gradient_dtype: DType,
    /// A result whose gradient is 1.
    pub(crate) loss: Option<TensorId>,
    /// Whether the gradient of each tensor of `carried_in` is needed.
    pub(crate) wants_carried: &'a [bool],
}

impl Section {
    /// Tensors that other blocks, the optimizer or the host read after the section has run.
    pub fn handed_out(&self) -> Vec<TensorId> {
        let mut ids: Vec<TensorId> =
            self.carried_out.iter().map(|carried| carried.tensor).collect();
        ids.extend(self.exports.iter().chain(&self.results).map(|&(_, id)| id));
        if let Some(backward) = &self.backward {
            ids.extend(backward.carried_in_gradients.iter().flatten());
            ids.extend(backward.parameters.iter().map(|p| p.gradient));
        }
        ids
    }

    /// Tensors that come from outside under their own name: inputs, exports, parameters, caches.
    /// Excludes carried tensors and gradients.
    pub fn outside_tensors(&self) -> Vec<TensorId> {
        self.graph
            .ids()
            .filter(|&id| self.graph.producer(id).is_none())
            .filter(|&id| !self.carried_in.iter().any(|carried| carried.tensor == id))
            .filter(|&id| {
                matches!(
                    self.graph.tensor(id).class,
                    TensorClass::Input | TensorClass::Parameter(_) | TensorClass::Cache
                )
            })
            .collect()
    }

    /// Whether it has a trainable parameter.
    pub fn learns(&self) -> bool {
        let trainable = TensorClass::Parameter(Training::Trainable);
        self.graph.tensors().iter().any(|tensor| tensor.class == trainable)
    }

    /// Index of a tensor in `carried_in`, by name.
    pub fn taken(&self, name: &str) -> Option<usize> {
        self.carried_in.iter().position(|carried| carried.name == name)
    }

    /// Index of a tensor in `carried_out`, by name.
    pub fn handed_on(&self, name: &str) -> Option<usize> {
        self.carried_out.iter().position(|carried| carried.name == name)
    }

    pub(crate) fn error<T>(&self, problem: String) -> Result<T, GraphError> {
        Err(GraphError::Section { section: self.name.clone(), problem })
    }

    /// Checks that names are unique within the section.
    pub(crate) fn check_names(&self) -> Result<(), GraphError> {
        let outside = self.outside_tensors().into_iter().map(|id| &self.graph.tensor(id).name);
        let sets: [(&str, Vec<&String>); 4] = [
            ("outside tensors", outside.collect()),
            ("carried tensors that it takes", self.carried_in.iter().map(|c| &c.name).collect()),
            (
                "carried tensors that it passes on",
                self.carried_out.iter().map(|c| &c.name).collect(),
            ),
            ("results", self.results.iter().map(|(name, _)| name).collect()),
        ];
        for (kind, mut names) in sets {
            names.sort();
            if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
                return self.error(format!("two {kind} are named `{}`", pair[0]));
            }
        }
        Ok(())
    }

    /// Checks that exports need no gradient. Later blocks read them as inputs, and no gradient
    /// flows back.
    fn check_exports(&self) -> Result<(), GraphError> {
        let carried: Vec<TensorId> = self.carried_in.iter().map(|carried| carried.tensor).collect();
        let wanted = find_wanted(&self.graph, &carried);
        match self.exports.iter().find(|(_, id)| wanted[id.index()]) {
            None => Ok(()),
            Some((name, _)) => self.error(format!(
                "export `{name}` depends on a trainable parameter or a carried tensor, and exports have \
                 no gradient: hand it on as a carried tensor"
            )),
        }
    }

    /// Checks that neither the backward pass nor another block reads a tensor that depends on a
    /// running statistic. It cannot be recomputed, because the statistic has changed by then.
    /// Operands that an op reads only in evaluations do not count: an evaluation recomputes nothing
    /// and changes no statistic.
    fn check_running(&self) -> Result<(), GraphError> {
        let graph = &self.graph;
        let is_running =
            |id: TensorId| graph.tensor(id).class == TensorClass::Parameter(Training::Running);
        let mut depends: Vec<bool> = graph.ids().map(is_running).collect();
        for node in graph.nodes().iter().filter(|node| node.phase == Phase::Forward) {
            let exempt = node.op.read_by_evaluations();
            let operands = node.op.operands();
            let mut read = operands.iter().map(|&(_, id)| id).filter(|id| !exempt.contains(id));
            if read.any(|id| depends[id.index()]) {
                node.outputs.iter().for_each(|&id| depends[id.index()] = true);
            }
        }
        let backward = graph.nodes().iter().filter(|node| node.phase != Phase::Forward);
        let read = backward.flat_map(|node| node.op.operands()).map(|(_, id)| id);
        let passed_on = self.carried_out.iter().map(|carried| carried.tensor);
        let exported = self.exports.iter().map(|&(_, id)| id);
        match read.chain(passed_on).chain(exported).find(|id| depends[id.index()]) {
            None => Ok(()),
            Some(id) => self.error(format!(
                "`{}` depends on a running statistic, and the backward pass or another block reads it: a \
                 recomputation would see the statistic as it is later",
                graph.tensor(id).name
            )),
        }
    }

    /// Adds the backward nodes.
    pub(crate) fn differentiate(&mut self, request: &SectionRequest<'_>) -> Result<(), GraphError> {
        let gradient_dtype = request.gradient_dtype;
        self.check_exports()?;
        let graph = &mut self.graph;
        graph.set_phase(Phase::Backward);
        let mut seeds = Vec::new();
        for carried in &self.carried_out {
            let Tensor { name, shape, dtype, .. } = graph.tensor(carried.tensor).clone();
            let name = format!("{name}.grad_in");
            let seed = graph.source(name, shape, dtype, TensorClass::Activation);
            seeds.push((carried.tensor, seed));
        }
        let carried_out_gradients = seeds.iter().map(|&(_, seed)| seed).collect();
        if let Some(loss) = request.loss {
            let one = Op::Fill { shape: Shape::scalar(), dtype: DType::F32, value: 1.0 };
            seeds.push((loss, graph.apply_one("loss.grad", one)?));
        }

        let mut accumulators = BTreeMap::new();
        let parameters: Vec<TensorId> = graph
            .ids()
            .filter(|&id| graph.tensor(id).class == TensorClass::Parameter(Training::Trainable))
            .collect();
        if request.accumulation == Accumulation::Continue {
            for &parameter in &parameters {
                let tensor = graph.tensor(parameter).clone();
                let dtype = parameter_gradient_dtype(&tensor, gradient_dtype);
                let name = format!("{}.grad_so_far", tensor.name);
                let so_far = graph.source(name, tensor.shape, dtype, TensorClass::Gradient);
                accumulators.insert(parameter, so_far);
            }
        }

        let wanted = self.carried_in.iter().zip(request.wants_carried);
        let wanted: Vec<TensorId> =
            wanted.filter(|&(_, &wants)| wants).map(|(carried, _)| carried.tensor).collect();
        let gradient_request = GradientRequest { seeds, wanted, accumulators, gradient_dtype };
        let gradients = differentiate(graph, &gradient_request)?;
        let results: Vec<TensorId> = self.results.iter().map(|&(_, id)| id).collect();
        copy_what_is_still_needed(graph, &results);
        let mut carried_in_gradients = Vec::new();
        for (carried, &wants) in self.carried_in.iter().zip(request.wants_carried) {
            let gradient = gradients.get(&carried.tensor).copied();
            if wants && gradient.is_none() {
                let name = &carried.name;
                return self.error(format!("nothing that it passes on depends on `{name}`"));
            }
            carried_in_gradients.push(gradient.filter(|_| wants));
        }
        let parameters = parameters
            .into_iter()
            .filter_map(|parameter| {
                let accumulator = gradient_request.accumulators.get(&parameter).copied();
                let gradient = *gradients.get(&parameter)?;
                Some(ParameterGradient { parameter, accumulator, gradient })
            })
            .collect();
        self.backward =
            Some(SectionBackward { carried_out_gradients, carried_in_gradients, parameters });
        self.check_running()
    }
}
