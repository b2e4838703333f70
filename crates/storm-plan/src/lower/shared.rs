//! What all plans of a task share, so that it is looked up once and not for every plan that is tried.

use super::Lowering;
use super::parameters::SetSlabs;
use super::update::groups;
use crate::Task;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use storm_graph::{DType, Graph, Op, Shape, Tensor, TensorClass};

/// Inputs and scalars of a step.
pub(super) struct Shared {
    /// Each with whether every micro-batch has its own.
    pub(super) inputs: Vec<(Tensor, bool)>,
    /// What the norm graph makes, except for scratch: norm, clip, and the sum of squares of each
    /// gradient. By name, with its position.
    pub(super) scalars: BTreeMap<String, usize>,
    /// The node of the norm graph that sums the squares of a gradient, by the gradient's name.
    pub(super) squares: BTreeMap<String, usize>,
}

/// All parameters, cut into pieces of one size.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) layer: SetSlabs,
    pub(super) edge: SetSlabs,
    /// What a slot of the state ring must hold.
    pub(super) state_slot_bytes: usize,
}

impl Shared {
    pub(super) fn new(task: &Task) -> Shared {
        let scalars = scalars(&task.norm);
        let mut inputs: Vec<(Tensor, bool)> = Vec::new();
        for tensor in task.proceed.inputs() {
            let per_micro_batch = tensor.shape.rank() > 0;
            inputs.push((tensor, per_micro_batch));
        }
        for rule in &task.updates {
            for id in rule.graph.ids().filter(|&id| rule.graph.producer(id).is_none()) {
                let tensor = rule.graph.tensor(id);
                let is_known = inputs.iter().any(|(known, _)| known.name == tensor.name)
                    || scalars.contains_key(&tensor.name);
                if tensor.class == TensorClass::Input && !is_known {
                    inputs.push((tensor.clone(), false));
                }
            }
        }
        Shared { inputs, scalars, squares: squares(&task.norm) }
    }
}

fn squares(norm: &Graph) -> BTreeMap<String, usize> {
    let nodes = norm.nodes().iter().enumerate();
    nodes
        .filter_map(|(index, node)| match node.op {
            Op::SumOfSquares { x } => Some((norm.tensor(x).name.clone(), index)),
            _ => None,
        })
        .collect()
}

fn scalars(norm: &Graph) -> BTreeMap<String, usize> {
    let made = norm.ids().filter(|&id| norm.producer(id).is_some()).map(|id| norm.tensor(id));
    made.filter(|tensor| tensor.class != TensorClass::Scratch)
        .enumerate()
        .map(|(position, tensor)| {
            debug_assert_eq!((&tensor.shape, tensor.dtype), (&Shape::scalar(), DType::F32));
            (tensor.name.clone(), position)
        })
        .collect()
}

impl Lowering<'_> {
    /// All parameters in pieces of that many elements.
    pub(super) fn cut(&self, piece_elements: usize) -> Arc<Cut> {
        // Nothing is left half-done in the map, whoever panicked.
        let known = self.cuts.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(cut) = known.get(&piece_elements) {
            return cut.clone();
        }
        drop(known);
        let [layer, edge] = [&self.parameters.layer, &self.parameters.edge];
        let [layer_slabs, edge_slabs] = [layer, edge].map(|set| set.slabs(piece_elements));
        let all = [(layer, &layer_slabs), (edge, &edge_slabs)];
        let slots = all.into_iter().flat_map(|(set, slabs)| {
            groups(set, slabs, piece_elements, |_| true).into_iter().map(|group| group.slot_bytes)
        });
        let state_slot_bytes = slots.max().unwrap_or(0);
        let cut = Arc::new(Cut { layer: layer_slabs, edge: edge_slabs, state_slot_bytes });
        let mut known = self.cuts.write().unwrap_or_else(PoisonError::into_inner);
        known.entry(piece_elements).or_insert(cut).clone()
    }
}
