//! The passes of a block as a few parts. A part is a run of kernels; a new one starts where a streamed tensor is
//! first used.

use super::super::Lowering;
use super::super::variant::{Pass, PassNode, Variant};
use super::tables::{Kernels, Tables};
use crate::{SavedStorage, Storage};
use std::ops::Range;
use std::sync::Arc;
use storm_graph::{ParameterGradient, TensorClass, TensorId, Training};

/// Consecutive kernels, and the data they touch that may be copied.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    pub(super) kernels: Kernels,
    /// The stage that owns the weights, as an index among those whose weights the block reads; and their cells.
    pub(super) weights: Vec<(usize, Range<u32>)>,
    pub(super) gradients: Vec<Range<u32>>,
    /// Saved units.
    pub(super) units: Vec<usize>,
    /// Inputs of the program.
    pub(super) inputs: Vec<usize>,
}

/// All passes of a block.
#[derive(Debug)]
pub(super) struct BlockParts {
    pub(super) forward: Vec<Part>,
    /// The same with each kernel separate, so updates can go in between.
    pub(super) forward_kernels: Vec<Part>,
    /// In the first micro-batch of a step, and in the others.
    pub(super) backward: [Vec<Part>; 2],
}

/// What may be copied of a block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Streams {
    pub(super) stage: usize,
    pub(super) saved: SavedStorage,
    pub(super) weights: bool,
    pub(super) gradients: bool,
}

#[derive(Clone, Copy)]
enum Direction {
    Forward,
    Backward,
}

/// The role of each tensor of a variant's graph.
struct Uses {
    weights: Vec<Option<(usize, Range<u32>)>>,
    gradients: Vec<Option<Range<u32>>>,
    units: Vec<Option<usize>>,
    inputs: Vec<Option<usize>>,
}

impl Uses {
    fn new(lowering: &Lowering<'_>, tables: &Tables, streams: &Streams, variant: &Variant) -> Uses {
        let (section, stage) = (&variant.section, streams.stage);
        let (graph, program) = (&section.graph, lowering.task.program());
        let count = graph.tensors().len();
        let mut uses = Uses {
            weights: vec![None; count],
            gradients: vec![None; count],
            units: vec![None; count],
            inputs: vec![None; count],
        };
        for id in section.outside_tensors() {
            let tensor = graph.tensor(id);
            let mut inputs = lowering.shared.inputs.iter();
            uses.inputs[id.index()] = inputs.position(|(input, _)| input.name == tensor.name);
            let is_weight =
                matches!(tensor.class, TensorClass::Parameter(t) if t != Training::Running);
            if !is_weight || !streams.weights {
                continue;
            }
            let owner = program.owner(stage, &tensor.name);
            let entry = lowering.sets[owner].position(&tensor.name).expect("its owner has it");
            let owners = &lowering.blocks.weight_owners[stage];
            let position = owners.iter().position(|&known| known == owner).expect("listed");
            let cells = tables.stages[owner].weights.entries[entry].clone();
            uses.weights[id.index()] = Some((position, cells));
        }
        let parameters = section.backward.iter().flat_map(|backward| &backward.parameters);
        for &ParameterGradient { parameter, gradient, .. } in parameters {
            let entry = lowering.sets[stage].gradient(&graph.tensor(parameter).name);
            let cells = &tables.stages[stage].gradients.entries[entry.expect("collected")];
            let root = variant.storage[gradient.index()];
            let over = graph.ids().filter(|id| variant.storage[id.index()] == root);
            for id in over.filter(|_| streams.gradients) {
                uses.gradients[id.index()] = Some(cells.clone());
            }
        }
        for (unit, storage) in streams.saved.iter().enumerate() {
            if *storage == Storage::Offload {
                for id in &lowering.units[stage][unit].tensors {
                    uses.units[id.index()] = Some(unit);
                }
            }
        }
        uses
    }

    /// What a node touches, each once.
    fn of(&self, node: &PassNode, direction: Direction) -> Part {
        let mut part = Part::default();
        part.kernels.add(node.seconds);
        for id in node.operands.iter().chain(&node.outputs).map(|id: &TensorId| id.index()) {
            push_new(&mut part.weights, &self.weights[id]);
            push_new(&mut part.gradients, &self.gradients[id]);
            push_new(&mut part.inputs, &self.inputs[id]);
        }
        // A forward pass offloads what it writes; a backward pass needs what it reads.
        let ids = match direction {
            Direction::Forward => &node.outputs,
            Direction::Backward => &node.operands,
        };
        ids.iter().for_each(|id| push_new(&mut part.units, &self.units[id.index()]));
        part
    }
}

fn push_new<T: PartialEq + Clone>(known: &mut Vec<T>, item: &Option<T>) {
    if let Some(item) = item
        && !known.contains(item)
    {
        known.push(item.clone());
    }
}

impl BlockParts {
    pub(super) fn new(lowering: &Lowering<'_>, tables: &Tables, streams: &Streams) -> BlockParts {
        let [first, others] = lowering.training_variants(streams.stage, &streams.saved);
        let kernels = |variant: &Variant, pass: &Pass, direction: Direction| -> Vec<Part> {
            let uses = Uses::new(lowering, tables, streams, variant);
            pass.nodes.iter().map(|node| uses.of(node, direction)).collect()
        };
        let forward_kernels = kernels(&others, &others.forward, Direction::Forward);
        let backward = |variant: &Arc<Variant>| {
            joined(&kernels(variant, &variant.backward, Direction::Backward))
        };
        BlockParts {
            forward: joined(&forward_kernels),
            forward_kernels,
            backward: [&first, &others].map(backward),
        }
    }
}

/// The parts of a forward pass that saves nothing.
pub(super) fn forward_parts(
    lowering: &Lowering<'_>,
    tables: &Tables,
    stage: usize,
    variant: &Arc<Variant>,
) -> Vec<Part> {
    let streams = Streams { stage, saved: SavedStorage::new(), weights: true, gradients: false };
    let uses = Uses::new(lowering, tables, &streams, variant);
    joined(
        &variant
            .forward
            .nodes
            .iter()
            .map(|node| uses.of(node, Direction::Forward))
            .collect::<Vec<_>>(),
    )
}

/// Joins kernels into one part, up to the next that touches something for the first time. Offloaded data ends a
/// part, because it leaves as soon as it is computed.
fn joined(kernels: &[Part]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut seen = Part::default();
    for kernel in kernels {
        let is_new = kernel.weights.iter().any(|use_| !seen.weights.contains(use_))
            || kernel.gradients.iter().any(|use_| !seen.gradients.contains(use_))
            || kernel.units.iter().any(|unit| !seen.units.contains(unit));
        let ends_before = parts.last().is_none_or(|part| !part.units.is_empty());
        if is_new || ends_before {
            parts.push(Part::default());
        }
        let part = parts.last_mut().expect("just pushed");
        part.kernels.seconds += kernel.kernels.seconds;
        part.kernels.count += kernel.kernels.count;
        for part in [part, &mut seen] {
            kernel.weights.iter().for_each(|item| push_new(&mut part.weights, &Some(item.clone())));
            let gradients = &mut part.gradients;
            kernel.gradients.iter().for_each(|item| push_new(gradients, &Some(item.clone())));
            kernel.units.iter().for_each(|unit| push_new(&mut part.units, &Some(*unit)));
            kernel.inputs.iter().for_each(|input| push_new(&mut part.inputs, &Some(*input)));
        }
    }
    parts
}
