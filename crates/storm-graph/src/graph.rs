use crate::error::OperandList;
use crate::{DType, GraphError, Op, Shape, Tensor, TensorClass, TensorId, Training, ops, work};
use std::fmt;

/// When a node runs in a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// In the micro-batch's forward pass.
    Forward,
    /// In its backward pass: added by autodiff.
    Backward,
    /// In its backward pass, to recompute a forward tensor that was not kept.
    Recompute,
}

/// One operation of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Name for messages.
    pub name: String,
    /// The op and its operands.
    pub op: Op<TensorId>,
    /// Its outputs, in the order that the op documents.
    pub outputs: Vec<TensorId>,
    /// When it runs.
    pub phase: Phase,
}

/// A typed program in single-assignment form: nodes in execution order, each with new output
/// tensors.
///
/// A graph is built only through [`Graph::apply`], which checks shapes and dtypes, so every graph
/// is well-typed. Forward and backward are in the same graph, so tensors that the forward pass
/// produces and the backward pass reads are explicit (see [`Graph::saved`]).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    tensors: Vec<Tensor>,
    nodes: Vec<Node>,
    /// The node that produces a tensor. `None` for tensors from outside.
    producers: Vec<Option<usize>>,
    /// The node whose output overwrites a tensor.
    overwriters: Vec<Option<usize>>,
    phase: Option<Phase>,
}

/// An output, as inferred by a shape rule.
#[derive(Clone)]
pub(crate) struct Output {
    pub(crate) suffix: &'static str,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) class: TensorClass,
}

impl Output {
    pub(crate) fn activation(suffix: &'static str, shape: Shape, dtype: DType) -> Output {
        Output { suffix, shape, dtype, class: TensorClass::Activation }
    }

    pub(crate) fn scratch(suffix: &'static str, shape: Shape, dtype: DType) -> Output {
        Output { suffix, shape, dtype, class: TensorClass::Scratch }
    }

    pub(crate) fn gradient(suffix: &'static str, shape: Shape, dtype: DType) -> Output {
        Output { suffix, shape, dtype, class: TensorClass::Gradient }
    }

    pub(crate) fn cache(suffix: &'static str, shape: Shape, dtype: DType) -> Output {
        Output { suffix, shape, dtype, class: TensorClass::Cache }
    }
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// Adds a tensor that comes from outside.
    pub fn source(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Shape>,
        dtype: DType,
        class: TensorClass,
    ) -> TensorId {
        self.push(Tensor { name: name.into(), shape: shape.into(), dtype, class }, None)
    }

    /// Adds a batch input or scalar from the host.
    pub fn input(&mut self, name: &str, shape: impl Into<Shape>, dtype: DType) -> TensorId {
        self.source(name, shape, dtype, TensorClass::Input)
    }

    /// Adds a weight.
    pub fn parameter(
        &mut self,
        name: &str,
        shape: impl Into<Shape>,
        dtype: DType,
        training: Training,
    ) -> TensorId {
        self.source(name, shape, dtype, TensorClass::Parameter(training))
    }

    /// Adds a node after checking its operands. Returns its outputs.
    ///
    /// # Errors
    /// The op does not accept the operands' shapes or dtypes, or another node has overwritten one
    /// of them (see [`Op::in_place`]). The error names them.
    pub fn apply(&mut self, name: &str, op: Op<TensorId>) -> Result<Vec<TensorId>, GraphError> {
        let gone = op.operands().into_iter().find_map(|(role, id)| {
            self.overwriters[id.index()].map(|node| (role, &self.nodes[node].name))
        });
        if let Some((role, overwriter)) = gone {
            let problem = format!(
                "`{role}` is gone: `{overwriter}` overwrote it; apply this node before that one, or \
                 read what that one made"
            );
            return Err(self.refusal(name, &op, problem));
        }
        self.append(name, op)
    }

    /// [`Graph::apply`] for a caller that handles overwritten operands once all nodes exist.
    pub(crate) fn append(
        &mut self,
        name: &str,
        op: Op<TensorId>,
    ) -> Result<Vec<TensorId>, GraphError> {
        let described = op.clone().map(|_, id| self.tensor(id));
        let outputs = ops::infer(&described).map_err(|problem| self.refusal(name, &op, problem))?;
        let node = self.nodes.len();
        let outputs: Vec<TensorId> = outputs
            .into_iter()
            .map(|output| {
                let name = match output.suffix {
                    "" => name.to_owned(),
                    suffix => format!("{name}.{suffix}"),
                };
                let Output { shape, dtype, class, .. } = output;
                self.push(Tensor { name, shape, dtype, class }, Some(node))
            })
            .collect();
        for (operand, _) in op.in_place() {
            self.overwriters[operand.index()] = Some(node);
        }
        let phase = self.phase.unwrap_or(Phase::Forward);
        self.nodes.push(Node { name: name.to_owned(), op, outputs: outputs.clone(), phase });
        Ok(outputs)
    }

    fn refusal(&self, name: &str, op: &Op<TensorId>, problem: String) -> GraphError {
        let operands = op.operands().into_iter();
        let described = operands.map(|(role, id)| (role, self.tensor(id).to_string())).collect();
        GraphError::Operands {
            op: op.name(),
            name: name.to_owned(),
            problem,
            operands: OperandList(described),
        }
    }

    /// [`Graph::apply`], returning only the first output.
    ///
    /// # Errors
    /// As [`Graph::apply`].
    pub fn apply_one(&mut self, name: &str, op: Op<TensorId>) -> Result<TensorId, GraphError> {
        Ok(self.apply(name, op)?[0])
    }

    /// All tensors. A [`TensorId`] is an index into them.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// One tensor.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        work::count(1);
        &self.tensors[id.index()]
    }

    /// The IDs of all tensors.
    pub fn ids(&self) -> impl Iterator<Item = TensorId> + use<> {
        (0..self.tensors.len() as u32).map(TensorId)
    }

    /// All nodes in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Whether a node changes a parameter of [`Training::Running`]. Only the forward pass of a
    /// training step may run such a node.
    pub fn changes_running(&self, node: &Node) -> bool {
        let changed = node.op.in_place().into_iter().map(|(operand, _)| self.tensor(operand).class);
        changed.into_iter().any(|class| class == TensorClass::Parameter(Training::Running))
    }

    /// The node that produces `id`, as an index into [`Graph::nodes`]. `None` for tensors from
    /// outside.
    pub fn producer(&self, id: TensorId) -> Option<usize> {
        self.producers[id.index()]
    }

    /// Whether a forward node produces the tensor.
    pub fn is_made_forward(&self, id: TensorId) -> bool {
        self.producer(id).is_some_and(|node| self.nodes[node].phase == Phase::Forward)
    }

    /// Tensors that the forward pass computes and the backward pass reads, in the order of
    /// computation. Memory planning is mostly about these.
    pub fn saved(&self) -> Vec<TensorId> {
        let mut read = vec![false; self.tensors.len()];
        for node in self.nodes.iter().filter(|n| n.phase != Phase::Forward) {
            for (_, operand) in node.op.operands() {
                read[operand.index()] = true;
            }
        }
        self.ids().filter(|&id| read[id.index()] && self.is_made_forward(id)).collect()
    }

    /// Whether a tensor is computed only from parameters, such as the values of a weight stored in
    /// 8 bits.
    pub fn is_of_parameters(&self, id: TensorId) -> bool {
        match self.producer(id) {
            None => matches!(self.tensor(id).class, TensorClass::Parameter(_)),
            Some(node) => {
                self.nodes[node].op.operands().into_iter().all(|(_, id)| self.is_of_parameters(id))
            }
        }
    }

    /// Sets the phase of nodes added from now on.
    pub(crate) fn set_phase(&mut self, phase: Phase) {
        self.phase = Some(phase);
    }

    /// Replaces the node list with another order or selection over the same tensors. The caller
    /// must ensure that every operand is produced before it is read.
    pub(crate) fn replace_nodes(&mut self, nodes: Vec<Node>) {
        self.producers.fill(None);
        self.overwriters.fill(None);
        for (index, node) in nodes.iter().enumerate() {
            for output in &node.outputs {
                self.producers[output.index()] = Some(index);
            }
            debug_assert!(node.op.operands().iter().all(|(_, operand)| {
                self.producers[operand.index()].is_none_or(|producer| producer < index)
            }));
            for (operand, _) in node.op.in_place() {
                self.overwriters[operand.index()] = Some(index);
            }
        }
        self.nodes = nodes;
    }

    /// Adds a new tensor with the properties of `id`.
    pub(crate) fn duplicate(&mut self, id: TensorId, name: String) -> TensorId {
        let tensor = Tensor { name, ..self.tensor(id).clone() };
        self.push(tensor, None)
    }

    fn push(&mut self, tensor: Tensor, producer: Option<usize>) -> TensorId {
        let id = TensorId(u32::try_from(self.tensors.len()).expect("fewer than 2^32 tensors"));
        self.tensors.push(tensor);
        self.producers.push(producer);
        self.overwriters.push(None);
        id
    }
}

/// One line per node: `%7 y bf16 (2, 8) = Linear(x = %1, weight = %2)`.
impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for id in self.ids().filter(|&id| self.producer(id).is_none()) {
            let tensor = self.tensor(id);
            writeln!(f, "{id} {tensor} = {:?}", tensor.class)?;
        }
        let mut phase = Phase::Forward;
        for node in &self.nodes {
            if node.phase != phase {
                phase = node.phase;
                writeln!(f, "-- {phase:?}")?;
            }
            for (i, &output) in node.outputs.iter().enumerate() {
                let separator = if i == 0 { "" } else { ", " };
                write!(f, "{separator}{output} {}", self.tensor(output))?;
            }
            write!(f, " = {}(", node.op.name())?;
            for (i, (role, operand)) in node.op.operands().into_iter().enumerate() {
                let separator = if i == 0 { "" } else { ", " };
                write!(f, "{separator}{role} = {operand}")?;
            }
            writeln!(f, ")")?;
        }
        Ok(())
    }
}
