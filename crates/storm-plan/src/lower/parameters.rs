//! The parameters, gradients and state of each stage, as plans lay them out.

use super::shards::Shards;
use super::slab::Slab;
use crate::{PlanError, Task, UpdateRule, UpdateTime};
use storm_graph::{DType, Graph, MomentFormat, Op, Shape, Tensor, TensorClass, TensorId, Training};

/// The parameters a stage owns, and the gradients it computes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Set {
    /// Parameters that the stage owns.
    pub(crate) parameters: Vec<Parameter>,
    /// Gradients that its backward pass computes: first those of its own trainable parameters, in order, then those of
    /// parameters owned by other stages.
    pub(crate) gradients: Vec<GradientUse>,
    /// Tensors that every forward pass changes in place: running statistics and caches. They stay on the device.
    pub(crate) changing: Vec<Tensor>,
}

/// A parameter, and its update if it is trainable.
#[derive(Clone, Debug)]
pub(crate) struct Parameter {
    pub(crate) tensor: Tensor,
    /// Index of its update rule in the task; `None` if it is frozen.
    pub(crate) rule: Option<usize>,
    /// Optimizer state.
    pub(crate) state: Vec<State>,
}

/// A tensor of optimizer state.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// Suffix of its name: `first_moment`.
    pub(crate) kind: String,
    /// Storage format of the elements.
    pub(crate) format: MomentFormat,
}

/// A gradient that a stage computes.
#[derive(Clone, Debug)]
pub(crate) struct GradientUse {
    /// Name of the parameter.
    pub(crate) name: String,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// The stage that owns the parameter.
    pub(crate) owner: usize,
}

/// Slabs of a set, in pieces of the decided size.
#[derive(Clone, Debug, Default)]
pub(crate) struct SetSlabs {
    pub(crate) weights: Slab,
    /// One entry per gradient.
    pub(crate) gradients: Slab,
    /// The same without the pieces that other ranks own: what is still needed once a lane is complete.
    pub(crate) complete_gradients: Slab,
    /// Sums of lanes in f32: one entry per trainable parameter, with the pieces that the rank owns. Takes no memory if
    /// the rank has one lane.
    pub(crate) sums: Slab,
    /// One slab for all kinds of state, one kind after another. Each kind has one entry per trainable parameter, with
    /// the pieces that the rank owns.
    pub(crate) states: Slab,
}

impl Set {
    /// The sets of all stages.
    pub(crate) fn all(task: &Task) -> Result<Vec<Set>, PlanError> {
        (0..task.program().stages().len()).map(|stage| Set::of(task, stage)).collect()
    }

    fn of(task: &Task, stage: usize) -> Result<Set, PlanError> {
        let program = task.program();
        let section = program.section(stage);
        let updates = task.training.as_ref().map_or(&[][..], |training| &training.updates);
        let rule_of = |owner: usize, name: &str| {
            updates
                .iter()
                .position(|rule| rule.parameter.stage == owner && rule.parameter.name == name)
        };
        let (mut parameters, mut own, mut foreign) = (Vec::new(), Vec::new(), Vec::new());
        let mut changing = Vec::new();
        for id in section.outside_tensors() {
            let tensor = section.graph.tensor(id);
            if tensor.class == TensorClass::Cache {
                changing.push(tensor.clone());
            }
            let TensorClass::Parameter(training) = tensor.class else { continue };
            if training == Training::Running {
                if program.owner(stage, &tensor.name) != stage {
                    let (stage, name) = (&program.stages()[stage].name, &tensor.name);
                    let problem = format!("`{stage}` shares the running statistic `{name}`");
                    return Err(PlanError::Task { problem });
                }
                changing.push(tensor.clone());
                continue;
            }
            let owner = program.owner(stage, &tensor.name);
            let learns = training == Training::Trainable && task.training.is_some();
            let rule = rule_of(owner, &tensor.name).filter(|_| learns);
            if learns && rule.is_none() {
                let problem = format!("`{}` learns, but has no update", tensor.name);
                return Err(PlanError::Task { problem });
            }
            if let Some(rule) = rule {
                let gradient = GradientUse {
                    name: tensor.name.clone(),
                    shape: tensor.shape.clone(),
                    dtype: updates[rule].gradient_dtype(),
                    owner,
                };
                if owner == stage { own.push(gradient) } else { foreign.push(gradient) }
            }
            if owner == stage {
                parameters.push(Parameter {
                    tensor: tensor.clone(),
                    state: rule.map(|rule| updates[rule].state()).unwrap_or_default(),
                    rule,
                });
            }
        }
        own.append(&mut foreign);
        Ok(Set { parameters, gradients: own, changing })
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.parameters.iter().position(|parameter| parameter.tensor.name == name)
    }

    /// The index of a parameter's gradient.
    pub(crate) fn gradient(&self, name: &str) -> Option<usize> {
        self.gradients.iter().position(|gradient| gradient.name == name)
    }

    /// Whether the stage computes gradients of parameters that other stages own. They must last until the owner's are
    /// complete.
    pub(crate) fn makes_parts(&self) -> bool {
        self.gradients.len() > self.trainable().count()
    }

    /// Indices of the stage's trainable parameters. The n-th of them has the n-th gradient.
    pub(crate) fn trainable(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.parameters.len()).filter(|&index| self.parameters[index].rule.is_some())
    }

    /// Whether any of the stage's parameters is frozen.
    pub(crate) fn has_frozen(&self) -> bool {
        self.parameters.iter().any(|parameter| parameter.rule.is_none())
    }

    /// Kinds of state, in the order of the slab.
    pub(crate) fn kinds(&self) -> Vec<String> {
        let mut kinds: Vec<String> = Vec::new();
        for State { kind, .. } in self.parameters.iter().flat_map(|p| &p.state) {
            if !kinds.contains(kind) {
                kinds.push(kind.clone());
            }
        }
        kinds
    }

    /// The slabs of a stage's blocks on a rank. Sums of lanes last from one lane to the next, so a rank with one lane
    /// has none.
    pub(super) fn slabs(
        &self,
        stage: usize,
        piece_elements: usize,
        lanes: usize,
        shards: &Shards,
    ) -> SetSlabs {
        let mut slabs = SetSlabs::default();
        let push = |slab: &mut Slab, shape: &Shape, dtype: DType| {
            let size = dtype.size_bytes();
            slab.push(shape.elements() * size, piece_elements * size);
        };
        for Parameter { tensor, .. } in &self.parameters {
            push(&mut slabs.weights, &tensor.shape, tensor.dtype);
        }
        for gradient in &self.gradients {
            push(&mut slabs.gradients, &gradient.shape, gradient.dtype);
        }
        let trainable = self.trainable().count();
        slabs.complete_gradients =
            slabs.gradients.with_some(|t, piece| t >= trainable || shards.is_own(stage, t, piece));
        let sums = lanes > 1 || shards.place.is_shared();
        for (t, gradient) in self.gradients.iter().take(trainable).enumerate().filter(|_| sums) {
            let size = DType::F32.size_bytes();
            let is_own = |piece| shards.is_own(stage, t, piece);
            let bytes = gradient.shape.elements() * size;
            slabs.sums.push_some(bytes, piece_elements * size, is_own);
        }
        if lanes == 1 {
            slabs.sums.size_bytes = 0;
        }
        for kind in self.kinds() {
            for (t, index) in self.trainable().enumerate() {
                let parameter = &self.parameters[index];
                // A parameter without this kind of state gets an empty entry, to keep indices aligned.
                let elements = parameter.tensor.shape.elements();
                let bytes = |elements| match parameter.state_of(&kind) {
                    Some(state) => state.format.size_bytes(elements),
                    None => 0,
                };
                let is_own = |piece| shards.is_own(stage, t, piece);
                slabs.states.push_some(bytes(elements), bytes(piece_elements).max(1), is_own);
            }
        }
        slabs
    }
}

impl Parameter {
    /// Its state of a kind, if it has any.
    pub(crate) fn state_of(&self, kind: &str) -> Option<&State> {
        self.state.iter().find(|state| state.kind == kind)
    }
}

impl UpdateRule {
    fn gradient_dtype(&self) -> DType {
        let name = format!("{}.grad", self.parameter.name);
        let gradient = self.graph.tensors().iter().find(|tensor| tensor.name == name);
        gradient.map_or(DType::F32, |tensor| tensor.dtype)
    }

    fn state(&self) -> Vec<State> {
        let sources = self.graph.ids().filter(|&id| self.graph.producer(id).is_none());
        sources
            .map(|id| self.graph.tensor(id))
            .filter(|tensor| tensor.class == TensorClass::OptimizerState)
            .filter_map(|tensor| {
                let suffix = tensor.name.strip_prefix(&self.parameter.name)?.strip_prefix('.')?;
                Some(State { kind: suffix.to_owned(), format: MomentFormat::of(tensor.dtype) })
            })
            .collect()
    }

    /// The same update for `elements` elements starting at `first`. In the backward pass, the clip scale is not known
    /// yet.
    pub(crate) fn piece(
        &self,
        first: usize,
        elements: usize,
        update: UpdateTime,
    ) -> Result<Graph, PlanError> {
        let mut graph = Graph::new();
        let mut ids: Vec<Option<TensorId>> = vec![None; self.graph.tensors().len()];
        for id in self.graph.ids().filter(|&id| self.graph.producer(id).is_none()) {
            let Tensor { name, shape, dtype, class } = self.graph.tensor(id).clone();
            let piece = Shape::from([elements]);
            let shape = match class {
                TensorClass::Input => shape,
                TensorClass::OptimizerState => MomentFormat::of(dtype).shape(&piece),
                _ => piece,
            };
            ids[id.index()] = Some(graph.source(name, shape, dtype, class));
        }
        let problem = |problem: String| PlanError::Task { problem };
        let [node] = self.graph.nodes() else {
            return Err(problem(format!("`{}` is not updated by one node", self.parameter.name)));
        };
        let mut op = node.op.clone().map(|_, id| ids[id.index()].expect("all are sources"));
        match &mut op {
            Op::AdamW { first_element, clip, .. } | Op::Sgd { first_element, clip, .. } => {
                *first_element = first;
                if update == UpdateTime::InBackward {
                    *clip = None;
                }
            }
            _ => return Err(problem(format!("{} is not an update", op.name()))),
        }
        graph.apply(&node.name, op).map_err(|error| problem(error.to_string()))?;
        Ok(graph)
    }
}
