//! Reverse-mode differentiation: appends backward nodes to the graph of the forward pass.

use crate::graph::{Node, Phase};
use crate::ops;
use crate::overwrite::{copy_what_is_still_needed, sum_in_place};
use crate::{
    Accuracy, DType, Graph, GraphError, Op, ParameterGradients, Tensor, TensorClass, TensorId,
    Training,
};
use std::cell::Cell;
use std::collections::BTreeMap;

/// The dtype of a parameter's gradient in a program that stores gradients as `usual`. A parameter
/// stored in f32 among bf16 weights has an f32 gradient.
pub fn parameter_gradient_dtype(parameter: &Tensor, usual: DType) -> DType {
    if parameter.dtype == DType::F32 { DType::F32 } else { usual }
}

/// What to differentiate.
#[derive(Clone, Debug)]
pub struct GradientRequest {
    /// Results whose gradients are given: (result, gradient). A gradient has the shape and dtype of
    /// its result.
    pub seeds: Vec<(TensorId, TensorId)>,
    /// Tensors, besides trainable parameters, whose gradients are needed.
    pub wanted: Vec<TensorId>,
    /// For a parameter, the tensor to which its gradient is added in place.
    pub accumulators: BTreeMap<TensorId, TensorId>,
    /// The dtype of parameter gradients.
    pub gradient_dtype: DType,
}

/// Adds nodes that compute the requested gradients, in [`Phase::Backward`]. Returns the gradient of
/// each trainable parameter and wanted tensor that the seeds reach.
///
/// Nothing is computed for frozen parameters, or for tensors that depend only on them.
///
/// # Errors
/// A gradient is needed through an op that has none, or a seed does not match its result.
pub fn differentiate(
    graph: &mut Graph,
    request: &GradientRequest,
) -> Result<BTreeMap<TensorId, TensorId>, GraphError> {
    let wants = find_wanted(graph, &request.wanted);
    let mut gradients: Vec<Option<TensorId>> = vec![None; wants.len()];
    for &(result, seed) in &request.seeds {
        let (expected, given) = (graph.tensor(result), graph.tensor(seed));
        if expected.shape != given.shape || expected.dtype != given.dtype {
            return Err(GraphError::Section {
                section: expected.name.clone(),
                problem: format!("the gradient of `{expected}` cannot be `{given}`"),
            });
        }
        gradients[result.index()] = Some(seed);
    }

    graph.set_phase(Phase::Backward);
    let forward_nodes = graph.nodes().len();
    let mut state = State {
        accumulators: request.accumulators.clone(),
        gradient_dtype: request.gradient_dtype,
        wants,
        gradients,
    };
    for index in (0..forward_nodes).rev() {
        let node = &graph.nodes()[index];
        let reached = node.outputs.iter().any(|output| state.gradients[output.index()].is_some());
        let needed = node.op.operands().iter().any(|(_, operand)| state.wants[operand.index()]);
        if reached && needed {
            let node = node.clone();
            let mut ctx = Backward {
                graph,
                name: &node.name,
                op: &node.op,
                outputs: &node.outputs,
                consulted: Cell::new(0),
                state: &mut state,
            };
            ops::backward(&node.op, &mut ctx)?;
            ctx.check_consulted()?;
        }
    }
    share_logits(graph);
    copy_what_is_still_needed(graph, &[]);

    let trainable = |t: &Tensor| t.class == TensorClass::Parameter(Training::Trainable);
    let gradients: BTreeMap<TensorId, TensorId> = graph
        .ids()
        .take(state.gradients.len())
        .filter(|&id| request.wanted.contains(&id) || trainable(graph.tensor(id)))
        .filter_map(|id| Some((id, state.gradients[id.index()]?)))
        .collect();
    sum_in_place(graph, &gradients.values().copied().collect::<Vec<_>>());
    Ok(gradients)
}

/// Which tensors need a gradient: trainable parameters, the wanted ones, and all floats that depend
/// on them. 8-bit float codes count as floats.
pub(crate) fn find_wanted(graph: &Graph, wanted: &[TensorId]) -> Vec<bool> {
    let mut wants: Vec<bool> = graph
        .tensors()
        .iter()
        .map(|t| t.class == TensorClass::Parameter(Training::Trainable))
        .collect();
    for id in wanted {
        wants[id.index()] = true;
    }
    for node in graph.nodes() {
        if node.op.operands().iter().any(|(_, operand)| wants[operand.index()]) {
            for &output in &node.outputs {
                let tensor = graph.tensor(output);
                let is_float = tensor.dtype.is_float() || matches!(node.op, Op::ToFp8 { .. });
                wants[output.index()] |= is_float && tensor.class == TensorClass::Activation;
            }
        }
    }
    wants
}

struct State {
    accumulators: BTreeMap<TensorId, TensorId>,
    gradient_dtype: DType,
    wants: Vec<bool>,
    /// The gradient of each forward tensor, as accumulated so far.
    gradients: Vec<Option<TensorId>>,
}

/// The context of a backward rule: one forward node, and the gradients that have reached it.
pub(crate) struct Backward<'a> {
    graph: &'a mut Graph,
    name: &'a str,
    op: &'a Op<TensorId>,
    outputs: &'a [TensorId],
    /// Bit mask of the outputs whose gradient the rule has read.
    consulted: Cell<u32>,
    state: &'a mut State,
}

/// Where and how to store the gradient of a parameter.
#[derive(Clone, Copy)]
pub(crate) struct ParameterSlot {
    pub(crate) accumulator: Option<TensorId>,
    pub(crate) dtype: DType,
}

impl Backward<'_> {
    pub(crate) fn tensor(&self, id: TensorId) -> &Tensor {
        self.graph.tensor(id)
    }

    /// Outputs of the forward node.
    pub(crate) fn outputs(&self) -> &[TensorId] {
        self.outputs
    }

    /// The op that produces a tensor, and its outputs. `None` for tensors from outside.
    pub(crate) fn producer(&self, id: TensorId) -> Option<(&Op<TensorId>, &[TensorId])> {
        let node = &self.graph.nodes()[self.graph.producer(id)?];
        Some((&node.op, &node.outputs))
    }

    /// The complete gradient of an output. `None` if nothing depends on it.
    pub(crate) fn output_gradient(&self, output: usize) -> Option<TensorId> {
        self.consulted.set(self.consulted.get() | 1 << output);
        self.state.gradients[self.outputs[output].index()]
    }

    /// Whether the gradient of this operand is needed.
    pub(crate) fn wants(&self, id: TensorId) -> bool {
        self.state.wants[id.index()]
    }

    pub(crate) fn apply(
        &mut self,
        suffix: &str,
        op: Op<TensorId>,
    ) -> Result<Vec<TensorId>, GraphError> {
        // Overwritten operands are resolved once all nodes exist.
        self.graph.append(&format!("{}.{suffix}", self.name), op)
    }

    /// Takes the gradient accumulated so far. The rule adds it inside its own kernel and passes the
    /// result to [`Backward::add_gradient`].
    pub(crate) fn take_gradient(&mut self, id: TensorId) -> Option<TensorId> {
        if self.is_parameter(id) { None } else { self.state.gradients[id.index()].take() }
    }

    /// Adds a contribution to an operand's gradient. Does nothing if that gradient is not needed.
    pub(crate) fn add_gradient(
        &mut self,
        id: TensorId,
        contribution: TensorId,
    ) -> Result<(), GraphError> {
        if !self.wants(id) {
            return Ok(());
        }
        if self.is_parameter(id) {
            // A parameter's gradient is accumulated in place, but the contribution may be shared
            // with others.
            return Err(self.misused_parameter(id));
        }
        let sum = match self.state.gradients[id.index()] {
            None => contribution,
            Some(so_far) => self.apply("grad.sum", Op::Add { a: so_far, b: contribution })?[0],
        };
        self.state.gradients[id.index()] = Some(sum);
        Ok(())
    }

    /// The accumulator and dtype for a rule that accumulates into a weight's gradient. For anything
    /// but a parameter there is no accumulator: only a parameter's gradient has its own memory.
    pub(crate) fn parameter_accumulator(&self, id: TensorId) -> (Option<TensorId>, DType) {
        if !self.is_parameter(id) {
            return (None, self.copied_dtype(id));
        }
        let accumulator =
            self.state.gradients[id.index()].or_else(|| self.state.accumulators.get(&id).copied());
        (accumulator, parameter_gradient_dtype(self.tensor(id), self.state.gradient_dtype))
    }

    /// The gradient of a rounded copy of parameters keeps their dtype, to avoid rounding it.
    fn copied_dtype(&self, id: TensorId) -> DType {
        let producer = self.graph.producer(id).map(|node| &self.graph.nodes()[node].op);
        match producer {
            Some(Op::BlockMatrix { parts, .. }) => self.tensor(parts[0]).dtype,
            _ => self.tensor(id).dtype,
        }
    }

    /// [`Backward::parameter_accumulator`] for an op that computes several such gradients at once,
    /// either all or none.
    pub(crate) fn parameter_accumulators<const N: usize>(
        &self,
        ids: [Option<TensorId>; N],
    ) -> Result<(ParameterGradients, [ParameterSlot; N]), GraphError> {
        let wanted = ids.iter().flatten().any(|&id| self.wants(id));
        for (place, id) in ids.iter().enumerate() {
            if let Some(id) = id.filter(|id| self.wants(*id) && ids[..place].contains(&Some(*id))) {
                return Err(self.misused_parameter(id));
            }
        }
        let slots = ids.map(|id| match id {
            Some(id) if wanted => {
                let (accumulator, dtype) = self.parameter_accumulator(id);
                ParameterSlot { accumulator, dtype }
            }
            _ => ParameterSlot { accumulator: None, dtype: self.state.gradient_dtype },
        });
        let gradients = if wanted { ParameterGradients::Compute } else { ParameterGradients::Skip };
        Ok((gradients, slots))
    }

    /// Stores a gradient computed with [`Backward::parameter_accumulator`].
    pub(crate) fn set_parameter_gradient(
        &mut self,
        id: TensorId,
        gradient: TensorId,
    ) -> Result<(), GraphError> {
        if !self.is_parameter(id) {
            return self.add_gradient(id, gradient);
        }
        if self.wants(id) {
            self.state.gradients[id.index()] = Some(gradient);
        }
        Ok(())
    }

    fn misused_parameter(&self, id: TensorId) -> GraphError {
        GraphError::Section {
            section: self.name.to_owned(),
            problem: format!(
                "{} makes no gradient of parameter `{}` as it is used here: use a trainable \
                 parameter as the weight or bias of Linear, Conv2d, Norm, QkNorm, BatchNorm, \
                 GroupNorm, Embedding or HeadLoss, in one role per op",
                self.op.name(),
                self.tensor(id).name
            ),
        }
    }

    /// The input that lists the rows of `ids` in sorted order. The loader provides it.
    pub(crate) fn sorted_order(&mut self, ids: TensorId) -> Result<TensorId, GraphError> {
        let ids = self.tensor(ids).clone();
        if ids.class != TensorClass::Input {
            return Err(self.not_differentiable());
        }
        let name = order_name(&ids.name);
        let known = self.graph.ids().find(|&id| self.graph.tensor(id).name == name);
        Ok(known.unwrap_or_else(|| self.graph.input(&name, ids.shape, DType::I32)))
    }

    pub(crate) fn not_differentiable(&self) -> GraphError {
        let wanted = self.op.operands().into_iter().find(|&(_, operand)| self.wants(operand));
        GraphError::NotDifferentiable {
            op: self.op.name(),
            name: self.name.to_owned(),
            wanted: wanted.map_or(String::new(), |(_, id)| self.tensor(id).name.clone()),
        }
    }

    /// Checks that the rule has read every output gradient, so that none is dropped. Statistics
    /// such as a norm's deviation are only for the backward pass and have no gradient.
    fn check_consulted(&self) -> Result<(), GraphError> {
        let dropped = self.outputs.iter().enumerate().find(|(index, output)| {
            self.state.gradients[output.index()].is_some() && self.consulted.get() >> index & 1 == 0
        });
        match dropped {
            None => Ok(()),
            Some((_, &output)) => Err(GraphError::NotDifferentiable {
                op: self.op.name(),
                name: self.name.to_owned(),
                wanted: self.tensor(output).name.clone(),
            }),
        }
    }

    fn is_parameter(&self, id: TensorId) -> bool {
        matches!(self.tensor(id).class, TensorClass::Parameter(_))
    }
}

/// The name of the input with the sorted order of the IDs named `ids`.
pub fn order_name(ids: &str) -> String {
    format!("{ids}.order")
}

/// Takes the loss of a training step from [`Op::HeadLossGrad`], which computes the logits anyway:
/// drops the forward [`Op::HeadLoss`] and moves its dependents after the gradient, whose node now
/// produces the row losses.
fn share_logits(graph: &mut Graph) {
    // For each pair of nodes: the forward node's outputs, and the gradient's outputs that replace
    // them.
    let pairs: Vec<(Vec<TensorId>, Vec<TensorId>)> = graph
        .nodes()
        .iter()
        .filter_map(|node| {
            let Op::HeadLossGrad {
                hidden, weight, targets, denominator, label_smoothing, accuracy, ..
            } = node.op
            else {
                return None;
            };
            let forward = graph.nodes().iter().find(|node| {
                matches!(node.op, Op::HeadLoss {
                    hidden: h, weight: w, targets: t, denominator: d, label_smoothing: s, accuracy: a, ..
                } if (h, w, t, d, s, a)
                    == (hidden, weight, targets, denominator, label_smoothing, accuracy))
            })?;
            let (made, again) = (&forward.outputs, &node.outputs);
            Some(match accuracy {
                Accuracy::Skip => (vec![made[0]], vec![again[0]]),
                // The correct rows follow the loss, and are the gradient's last output.
                Accuracy::Compute => (made[..2].to_vec(), vec![again[0], again[again.len() - 1]]),
            })
        })
        .collect();
    for (shared, again) in pairs {
        share_logits_of(graph, &shared, &again);
    }
}

fn share_logits_of(graph: &mut Graph, shared: &[TensorId], again: &[TensorId]) {
    let (Some(forward), Some(backward)) = (graph.producer(shared[0]), graph.producer(again[0]))
    else {
        return; // a second gradient of the same loss
    };
    let mut late = vec![false; graph.tensors().len()];
    shared.iter().for_each(|id| late[id.index()] = true);
    let depends = |node: &Node, late: &[bool]| {
        node.op.operands().iter().any(|(_, operand)| late[operand.index()])
    };
    let (mut nodes, mut moved) = (Vec::new(), Vec::new());
    for (index, node) in graph.nodes().iter().enumerate().take(backward) {
        if index == forward {
            continue;
        }
        if depends(node, &late) {
            for output in &node.outputs {
                late[output.index()] = true;
            }
            moved.push(Node { phase: Phase::Backward, ..node.clone() });
        } else {
            nodes.push(node.clone());
        }
    }
    let mut gradient = graph.nodes()[backward].clone();
    if depends(&gradient, &late) {
        return; // the gradient depends on the loss itself: both are needed
    }
    for output in &mut gradient.outputs {
        if let Some(place) = again.iter().position(|id| id == output) {
            *output = shared[place];
        }
    }
    nodes.push(gradient);
    nodes.extend(moved);
    nodes.extend_from_slice(&graph.nodes()[backward + 1..]);
    graph.replace_nodes(nodes);
}
