//! Parameters of a program as plans see them: those of a layer, and those at both ends.

use super::slab::Slab;
use crate::{PlanError, Task, UpdateRule};
use storm_graph::{DType, Graph, Op, Section, Shape, Tensor, TensorClass, TensorId, Training};

/// All parameters.
#[derive(Clone, Debug)]
pub(crate) struct Parameters {
    /// Of the repeated layer.
    pub(crate) layer: Set,
    /// Of prologue and epilogue together, each once; those of the prologue first.
    pub(crate) edge: Set,
    /// How many of those in `edge` that learn the prologue uses.
    pub(crate) prologue_trainable: usize,
}

/// Parameters that live and move together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Set {
    pub(crate) parameters: Vec<Parameter>,
}

/// One parameter, and its update if it learns.
#[derive(Clone, Debug)]
pub(crate) struct Parameter {
    pub(crate) tensor: Tensor,
    pub(crate) gradient: Option<DType>,
    /// Position among the task's update rules.
    pub(crate) rule: Option<usize>,
    /// Suffix and dtype of each tensor of optimizer state.
    pub(crate) state: Vec<(String, DType)>,
}

/// Slabs of a set, in pieces of the decided size.
#[derive(Clone, Debug, Default)]
pub(crate) struct SetSlabs {
    pub(crate) weights: Slab,
    /// One entry per trainable parameter.
    pub(crate) gradients: Slab,
    /// One slab per kind of state would scatter them: kinds one after another, in each one entry per
    /// trainable parameter.
    pub(crate) states: Slab,
}

impl Parameters {
    pub(crate) fn new(task: &Task) -> Result<Parameters, PlanError> {
        let program = &task.proceed;
        let layer = Set::of(task, &[&program.layer], true)?;
        let prologue = Set::of(task, &[&program.prologue], false)?;
        let edge = Set::of(task, &[&program.prologue, &program.epilogue], false)?;
        Ok(Parameters { layer, edge, prologue_trainable: prologue.trainable().count() })
    }
}

impl Set {
    fn of(task: &Task, sections: &[&Section], per_layer: bool) -> Result<Set, PlanError> {
        let mut set = Set::default();
        for section in sections {
            for id in section.outside_tensors() {
                let tensor = section.graph.tensor(id);
                let TensorClass::Parameter(training) = tensor.class else { continue };
                if set.position(&tensor.name).is_some() {
                    continue;
                }
                let rule = task.updates.iter().position(|rule| {
                    rule.parameter.per_layer == per_layer && rule.parameter.name == tensor.name
                });
                let problem = || format!("`{}` learns, but has no update", tensor.name);
                if training == Training::Trainable && rule.is_none() {
                    return Err(PlanError::Task { problem: problem() });
                }
                let rule = rule.filter(|_| training == Training::Trainable);
                let described = rule.map(|index| &task.updates[index]);
                set.parameters.push(Parameter {
                    tensor: tensor.clone(),
                    gradient: described.map(|rule| rule.gradient_dtype()),
                    state: described.map(UpdateRule::state).unwrap_or_default(),
                    rule,
                });
            }
        }
        Ok(set)
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.parameters.iter().position(|parameter| parameter.tensor.name == name)
    }

    /// Positions of those that learn.
    pub(crate) fn trainable(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.parameters.len()).filter(|&index| self.parameters[index].rule.is_some())
    }

    /// Kinds of state, in the order of the slab.
    pub(crate) fn kinds(&self) -> Vec<String> {
        let mut kinds: Vec<String> = Vec::new();
        for (kind, _) in self.parameters.iter().flat_map(|parameter| &parameter.state) {
            if !kinds.contains(kind) {
                kinds.push(kind.clone());
            }
        }
        kinds
    }

    pub(crate) fn slabs(&self, piece_elements: usize) -> SetSlabs {
        let mut slabs = SetSlabs::default();
        for parameter in &self.parameters {
            let Tensor { shape, dtype, .. } = &parameter.tensor;
            let push = |slab: &mut Slab, dtype: DType| {
                slab.push(
                    shape.elements() * dtype.size_bytes(),
                    piece_elements * dtype.size_bytes(),
                );
            };
            push(&mut slabs.weights, *dtype);
            if let Some(gradient) = parameter.gradient {
                push(&mut slabs.gradients, gradient);
            }
        }
        for kind in self.kinds() {
            for index in self.trainable() {
                let parameter = &self.parameters[index];
                // A parameter without this kind of state keeps an empty entry: positions stay simple.
                let dtype = parameter.state.iter().find(|(known, _)| *known == kind);
                let size = dtype.map_or(0, |(_, dtype)| dtype.size_bytes());
                let elements = parameter.tensor.shape.elements();
                slabs.states.push(elements * size, piece_elements * size.max(1));
            }
        }
        slabs
    }
}

impl UpdateRule {
    fn gradient_dtype(&self) -> DType {
        let name = format!("{}.grad", self.parameter.name);
        let gradient = self.graph.tensors().iter().find(|tensor| tensor.name == name);
        gradient.map_or(DType::F32, |tensor| tensor.dtype)
    }

    fn state(&self) -> Vec<(String, DType)> {
        let sources = self.graph.ids().filter(|&id| self.graph.producer(id).is_none());
        sources
            .map(|id| self.graph.tensor(id))
            .filter(|tensor| tensor.class == TensorClass::OptimizerState)
            .filter_map(|tensor| {
                let suffix = tensor.name.strip_prefix(&self.parameter.name)?.strip_prefix('.')?;
                Some((suffix.to_owned(), tensor.dtype))
            })
            .collect()
    }

    /// The same update for `elements` elements from `first` on.
    pub(crate) fn piece(&self, first: usize, elements: usize) -> Result<Graph, PlanError> {
        let mut graph = Graph::new();
        let whole = &self.parameter.shape;
        let mut ids: Vec<Option<TensorId>> = vec![None; self.graph.tensors().len()];
        for id in self.graph.ids().filter(|&id| self.graph.producer(id).is_none()) {
            let Tensor { name, shape, dtype, class } = self.graph.tensor(id).clone();
            let is_sliced = shape == *whole && class != TensorClass::Input;
            let shape = if is_sliced { Shape::from([elements]) } else { shape };
            ids[id.index()] = Some(graph.source(name, shape, dtype, class));
        }
        let problem = |problem: String| PlanError::Task { problem };
        let [node] = self.graph.nodes() else {
            return Err(problem(format!("`{}` is not updated by one node", self.parameter.name)));
        };
        let mut op = node.op.clone().map(|_, id| ids[id.index()].expect("all are sources"));
        match &mut op {
            Op::AdamW { first_element, .. } | Op::Sgd { first_element, .. } => {
                *first_element = first;
            }
            _ => return Err(problem(format!("{} is not an update", op.name()))),
        }
        graph.apply(&node.name, op).map_err(|error| problem(error.to_string()))?;
        Ok(graph)
    }
}
