//! Reverse-mode differentiation: appends the backward nodes to the graph of the forward pass.

use crate::graph::Phase;
use crate::ops;
use crate::{
    DType, Graph, GraphError, Op, ParameterGradients, Tensor, TensorClass, TensorId, Training,
};
use std::collections::BTreeMap;

/// What to differentiate.
#[derive(Clone, Debug)]
pub struct GradientRequest {
    /// Results whose gradients are given: (result, gradient). A gradient is like its result.
    pub seeds: Vec<(TensorId, TensorId)>,
    /// Tensors, besides trainable parameters, whose gradients are wanted.
    pub wanted: Vec<TensorId>,
    /// For a parameter, the tensor that its gradient is added to, in place.
    pub accumulators: BTreeMap<TensorId, TensorId>,
    /// How gradients of parameters are stored.
    pub gradient_dtype: DType,
}

/// Adds the nodes that compute the requested gradients, in [`Phase::Backward`], and returns the
/// gradient of each trainable parameter and wanted tensor that the seeds reach.
///
/// Nothing is computed for frozen parameters or for anything that only they depend on.
///
/// # Errors
/// A gradient is needed through an op that has none, or a seed is unlike its result.
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
                state: &mut state,
            };
            ops::backward(&node.op, &mut ctx)?;
        }
    }
    share_logits(graph);

    let trainable = |t: &Tensor| t.class == TensorClass::Parameter(Training::Trainable);
    Ok(graph
        .ids()
        .take(state.gradients.len())
        .filter(|&id| request.wanted.contains(&id) || trainable(graph.tensor(id)))
        .filter_map(|id| Some((id, state.gradients[id.index()]?)))
        .collect())
}

/// Which tensors need a gradient: trainable parameters, those asked for, and all floats that depend
/// on them.
fn find_wanted(graph: &Graph, wanted: &[TensorId]) -> Vec<bool> {
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
                wants[output.index()] |=
                    tensor.dtype.is_float() && tensor.class == TensorClass::Activation;
            }
        }
    }
    wants
}

struct State {
    accumulators: BTreeMap<TensorId, TensorId>,
    gradient_dtype: DType,
    wants: Vec<bool>,
    /// The gradient of each forward tensor, as far as it is summed up.
    gradients: Vec<Option<TensorId>>,
}

/// Where a backward rule stands: one forward node, and the gradients that have reached it.
pub(crate) struct Backward<'a> {
    graph: &'a mut Graph,
    name: &'a str,
    op: &'a Op<TensorId>,
    outputs: &'a [TensorId],
    state: &'a mut State,
}

/// Where and how the gradient of a parameter is to be stored.
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

    /// The whole gradient of an output; none if nothing depends on it.
    pub(crate) fn output_gradient(&self, output: usize) -> Option<TensorId> {
        self.state.gradients[self.outputs[output].index()]
    }

    /// Whether anybody needs the gradient of this operand.
    pub(crate) fn wants(&self, id: TensorId) -> bool {
        self.state.wants[id.index()]
    }

    pub(crate) fn apply(
        &mut self,
        suffix: &str,
        op: Op<TensorId>,
    ) -> Result<Vec<TensorId>, GraphError> {
        self.graph.apply(&format!("{}.{suffix}", self.name), op)
    }

    /// The gradient summed so far, handed over: the rule adds it inside its own kernel and passes
    /// the result to [`Backward::add_gradient`].
    pub(crate) fn take_gradient(&mut self, id: TensorId) -> Option<TensorId> {
        if self.is_parameter(id) { None } else { self.state.gradients[id.index()].take() }
    }

    /// Adds a contribution to an operand's gradient; ignored if nobody wants it.
    pub(crate) fn add_gradient(
        &mut self,
        id: TensorId,
        contribution: TensorId,
    ) -> Result<(), GraphError> {
        if !self.wants(id) {
            return Ok(());
        }
        if self.is_parameter(id) && self.state.accumulators.contains_key(&id) {
            return Err(GraphError::Section {
                section: self.name.to_owned(),
                problem: format!(
                    "the gradient of parameter `{}` cannot be accumulated through {}: use it as a \
                     weight or bias of Linear, Norm, Embedding or HeadLoss",
                    self.tensor(id).name,
                    self.op.name()
                ),
            });
        }
        let sum = match self.state.gradients[id.index()] {
            None => contribution,
            Some(so_far) => self.apply("grad.sum", Op::Add { a: so_far, b: contribution })?[0],
        };
        self.state.gradients[id.index()] = Some(sum);
        Ok(())
    }

    /// Where a rule that sums into a weight's gradient puts it. For anything but a parameter it is
    /// a fresh tensor: only a parameter's gradient has memory that is its own.
    pub(crate) fn parameter_accumulator(&self, id: TensorId) -> (Option<TensorId>, DType) {
        if !self.is_parameter(id) {
            return (None, self.tensor(id).dtype);
        }
        let accumulator =
            self.state.gradients[id.index()].or_else(|| self.state.accumulators.get(&id).copied());
        (accumulator, self.state.gradient_dtype)
    }

    /// [`Backward::parameter_accumulator`] for an op that makes several such gradients at once,
    /// all or none of them.
    pub(crate) fn parameter_accumulators<const N: usize>(
        &self,
        ids: [Option<TensorId>; N],
    ) -> (ParameterGradients, [ParameterSlot; N]) {
        let wanted = ids.iter().flatten().any(|&id| self.wants(id));
        let slots = ids.map(|id| match id {
            Some(id) if wanted => {
                let (accumulator, dtype) = self.parameter_accumulator(id);
                ParameterSlot { accumulator, dtype }
            }
            _ => ParameterSlot { accumulator: None, dtype: self.state.gradient_dtype },
        });
        let gradients = if wanted { ParameterGradients::Compute } else { ParameterGradients::Skip };
        (gradients, slots)
    }

    /// Stores what a rule made from [`Backward::parameter_accumulator`].
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

    /// The input that lists the rows of `ids` in sorted order; the loader provides it.
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

    fn is_parameter(&self, id: TensorId) -> bool {
        matches!(self.tensor(id).class, TensorClass::Parameter(_))
    }
}

/// The name of the input with the sorted order of the ids named `ids`.
pub fn order_name(ids: &str) -> String {
    format!("{ids}.order")
}

/// Lets the loss of a training step come from [`Op::HeadLossGrad`], which makes the logits anyway:
/// the forward [`Op::HeadLoss`] is dropped and what depends on it moves behind the gradient.
fn share_logits(graph: &mut Graph) {
    let pair = graph.nodes().iter().enumerate().find_map(|(at, node)| {
        let Op::HeadLossGrad { hidden, weight, targets, denominator, .. } = node.op else {
            return None;
        };
        let forward = graph.nodes()[..at].iter().position(|node| {
            matches!(node.op, Op::HeadLoss { hidden: h, weight: w, targets: t, denominator: d, .. }
                if (h, w, t, d) == (hidden, weight, targets, denominator))
        })?;
        Some((forward, at))
    });
    let Some((forward, backward)) = pair else { return };

    let row_loss = graph.nodes()[forward].outputs[0];
    let shared = graph.nodes()[backward].outputs[0];
    let mut late = vec![false; graph.tensors().len()];
    late[row_loss.index()] = true;
    let (mut before, mut moved) = (Vec::new(), Vec::new());
    for (index, node) in graph.nodes().iter().enumerate().take(backward) {
        if index == forward {
            continue;
        }
        if node.op.operands().iter().any(|(_, operand)| late[operand.index()]) {
            for output in &node.outputs {
                late[output.index()] = true;
            }
            let mut node = node.clone();
            node.op = node.op.map(|_, id| if id == row_loss { shared } else { id });
            node.phase = Phase::Backward;
            moved.push(node);
        } else {
            before.push(node.clone());
        }
    }
    let gradient = graph.nodes()[backward].clone();
    if gradient.op.operands().iter().any(|(_, operand)| late[operand.index()]) {
        return; // the gradient depends on the loss itself: both are needed
    }
    let mut after: Vec<_> = graph.nodes()[backward + 1..].to_vec();
    for node in &mut after {
        node.op = node.op.clone().map(|_, id| if id == row_loss { shared } else { id });
    }
    before.push(gradient);
    before.extend(moved);
    before.extend(after);
    graph.replace_nodes(before);
}
