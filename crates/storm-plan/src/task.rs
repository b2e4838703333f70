//! What is to be planned: a differentiated model and its optimizer, before any decision.

use storm_graph::{Graph, Phase, Program, ProgramParameter, TensorId};

/// A training step: forward and backward of some micro-batches, norm, clipping, update.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// The first micro-batch of a step: gradients are written.
    pub start: Program,
    /// The others: gradients are added to. The same forward nodes as `start`.
    pub proceed: Program,
    /// How many micro-batches a step has.
    pub micro_batches: usize,
    /// The norm of all gradients (`NAME.grad` with full names, one sum of squares each) and the clip
    /// scale.
    pub norm: Graph,
    /// How each trainable parameter is updated, once for all layers.
    pub updates: Vec<UpdateRule>,
}

/// The update of one parameter as a graph of a single node. Its sources are named after the
/// parameter, without a layer: `NAME`, `NAME.grad`, `NAME.first_moment`, …; scalars have names of
/// their own.
#[derive(Clone, Debug, PartialEq)]
pub struct UpdateRule {
    /// Whose.
    pub parameter: ProgramParameter,
    /// One node, elementwise.
    pub graph: Graph,
}

/// Saved tensors of a layer that are decided about together: what one node makes, except for the
/// fused residual sum, from which the rest of its norm can be made again.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedUnit {
    /// Of its first tensor: `mlp.gate_up`.
    pub name: String,
    /// In the graph of the layer.
    pub tensors: Vec<TensorId>,
    /// Of all of them.
    pub size_bytes: usize,
}

impl Task {
    /// What the backward pass of a layer reads of its forward pass, besides what the layer before
    /// hands over.
    pub fn saved_units(&self) -> Vec<SavedUnit> {
        let graph = &self.proceed.layer.graph;
        let saved = graph.saved();
        let mut units: Vec<SavedUnit> = Vec::new();
        for node in graph.nodes().iter().filter(|node| node.phase == Phase::Forward) {
            let mut made: Vec<TensorId> =
                node.outputs.iter().copied().filter(|id| saved.contains(id)).collect();
            let sum = match node.op {
                storm_graph::Op::Norm { delta: Some(_), .. } => node.outputs.last().copied(),
                _ => None,
            };
            let sum = sum.filter(|sum| made.contains(sum));
            made.retain(|&id| Some(id) != sum);
            for tensors in [made, sum.into_iter().collect()] {
                let Some(&first) = tensors.first() else { continue };
                units.push(SavedUnit {
                    name: graph.tensor(first).name.clone(),
                    size_bytes: tensors.iter().map(|&id| graph.tensor(id).size_bytes()).sum(),
                    tensors,
                });
            }
        }
        units
    }

    /// Whether prologue and epilogue share a parameter: then its gradient is a sum over both, in an
    /// order that grouping micro-batches would change.
    pub fn is_tied(&self) -> bool {
        let names = |section: &storm_graph::Section| -> Vec<String> {
            let backward = section.backward.iter().flat_map(|backward| &backward.parameters);
            backward.map(|p| section.graph.tensor(p.parameter).name.clone()).collect()
        };
        let prologue = names(&self.proceed.prologue);
        names(&self.proceed.epilogue).iter().any(|name| prologue.contains(name))
    }

    /// How many layers there are.
    pub fn layer_count(&self) -> usize {
        self.proceed.layer_count
    }
}
