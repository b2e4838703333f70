//! What all plans of a task share, computed once instead of for every plan that is tried.

use super::Lowering;
use super::blocks::Blocks;
use super::frozen::FrozenHomes;
use super::homes::Homes;
use super::parameters::{Set, SetSlabs};
use super::shards::{Received, Shards};
use super::update::{UpdateGroup, groups};
use crate::Task;
use crate::pack::aligned;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use storm_graph::{Block, DType, Graph, Shape, Tensor, TensorClass};

/// Inputs, results and scalars of a step.
pub(super) struct Shared {
    /// Each with whether every micro-batch has a separate one.
    pub(super) inputs: Vec<(Arc<Tensor>, bool)>,
    /// The outputs of the norm graph except scratch: norm, clip, and the sum of squares of each
    /// gradient. By name, with its index.
    pub(super) scalars: BTreeMap<String, usize>,
    /// What each micro-batch yields for the host, with the block that computes it.
    pub(super) results: Vec<BlockResult>,
    pub(super) exports: Exports,
}

/// The tensors that sections export to others, one after another. Each micro-batch has its own.
#[derive(Debug, Default)]
pub(super) struct Exports {
    /// From the start of a micro-batch's exports, by name.
    pub(super) offsets: BTreeMap<String, usize>,
    pub(super) bytes: usize,
}

impl Exports {
    fn new(task: &Task) -> Exports {
        let mut exports = Exports::default();
        for section in task.program().templates() {
            for (name, id) in &section.exports {
                exports.offsets.insert(name.clone(), exports.bytes);
                exports.bytes += aligned(section.graph.tensor(*id).size_bytes());
            }
        }
        exports
    }
}

/// A result of a block.
#[derive(Clone, Debug)]
pub(super) struct BlockResult {
    pub(super) block: usize,
    /// Position among the results of its section.
    pub(super) position: usize,
    /// Under its name in the whole program.
    pub(super) tensor: Tensor,
}

/// All parameters, divided into pieces of one size.
#[derive(Debug)]
pub(super) struct Cut {
    /// One for each stage.
    pub(super) stages: Vec<SetSlabs>,
    /// What is updated together, by stage.
    pub(super) updates: Vec<Vec<UpdateGroup>>,
    /// Where state lives, by stage and by how many of its kinds are on disk.
    pub(super) homes: Vec<Vec<Homes>>,
    /// Where weights live if the frozen ones are on disk, by stage.
    pub(super) frozen: Vec<FrozenHomes>,
    /// The capacity of a slot of the state ring: the state of a group, its sums of lanes, or a piece of a
    /// gradient that is added to another.
    pub(super) state_slot_bytes: usize,
    pub(super) shards: Shards,
    /// What a rank receives of the gradients of a block, by stage.
    pub(super) received: Vec<Received>,
    /// The most that any rank has of each part of that.
    pub(super) received_bytes: [usize; 3],
}

impl Shared {
    pub(super) fn new(task: &Task, blocks: &Blocks) -> Shared {
        let training = task.training.as_ref();
        let scalars = training.map(|training| scalars(&training.norm)).unwrap_or_default();
        let mut inputs: Vec<(Arc<Tensor>, bool)> = Vec::new();
        for tensor in task.program().inputs() {
            let per_micro_batch = tensor.shape.rank() > 0;
            inputs.push((Arc::new(tensor), per_micro_batch));
        }
        for rule in training.map_or(&[][..], |training| &training.updates) {
            for id in rule.graph.ids().filter(|&id| rule.graph.producer(id).is_none()) {
                let tensor = rule.graph.tensor(id);
                let is_known = inputs.iter().any(|(known, _)| known.name == tensor.name)
                    || scalars.contains_key(&tensor.name);
                if tensor.class == TensorClass::Input && !is_known {
                    inputs.push((Arc::new(tensor.clone()), false));
                }
            }
        }
        let mut results = Vec::new();
        for block in 0..blocks.count() {
            let Block { stage, index } = blocks.get(block);
            let section = task.program().section(stage);
            for (position, (name, id)) in section.results.iter().enumerate() {
                let name = task.program().stages()[stage].full_name(index, name);
                let tensor = Tensor { name, ..section.graph.tensor(*id).clone() };
                results.push(BlockResult { block, position, tensor });
            }
        }
        Shared { inputs, scalars, results, exports: Exports::new(task) }
    }
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
    /// All parameters in pieces of this many elements.
    pub(super) fn cut(&self, piece_elements: usize) -> Arc<Cut> {
        // The map is consistent even if a thread panicked while holding the lock.
        let known = self.cuts.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(cut) = known.get(&piece_elements) {
            return cut.clone();
        }
        drop(known);
        let shards = Shards::new(self.task, &self.sets, piece_elements);
        let mut stages = Vec::new();
        let (mut received, mut received_bytes) = (Vec::new(), [0; 3]);
        let (mut updates, mut homes, mut frozen) = (Vec::new(), Vec::new(), Vec::new());
        let mut state_slot_bytes = 0;
        for (stage, set) in self.sets.iter().enumerate() {
            let OfStage { mut slabs, groups, received: own } =
                self.cut_stage(stage, set, piece_elements, &shards);
            let sums = 1 + usize::from(self.task.keeps_group_sums());
            let slot_bytes = |group: &UpdateGroup| group.slot_bytes.max(sums * group.sums_bytes);
            let mut receive = |of_rank: &Received| {
                for (most, bytes) in received_bytes.iter_mut().zip(of_rank.bytes()) {
                    *most = bytes.max(*most);
                }
            };
            let mut state = groups.iter().map(slot_bytes).max().unwrap_or(0);
            receive(&own);
            // What fits on one rank fits on all: each takes as much memory as the one with the largest shard.
            for other in shards.place.others() {
                let others = self.cut_stage(stage, set, piece_elements, &shards.of_rank(other));
                for (own, other) in [
                    (&mut slabs.states, &others.slabs.states),
                    (&mut slabs.sums, &others.slabs.sums),
                    (&mut slabs.complete_gradients, &others.slabs.complete_gradients),
                ] {
                    own.size_bytes = own.size_bytes.max(other.size_bytes);
                }
                state = others.groups.iter().map(slot_bytes).fold(state, usize::max);
                receive(&others.received);
            }
            received.push(own);
            let foreign = set.gradients.iter().zip(&slabs.gradients.entries);
            let foreign = foreign.filter(|(gradient, _)| gradient.owner != stage);
            let partial = foreign.map(|(_, entry)| entry.pieces[0]).max().unwrap_or(0);
            state_slot_bytes = state_slot_bytes.max(state).max(partial);
            let on_disk = 0..=set.kinds().len();
            homes.push(on_disk.map(|kinds| Homes::new(set, &slabs, &groups, kinds)).collect());
            frozen.push(FrozenHomes::new(set, &slabs));
            stages.push(slabs);
            updates.push(groups);
        }
        let cut = Arc::new(Cut {
            stages,
            updates,
            homes,
            frozen,
            state_slot_bytes,
            shards,
            received,
            received_bytes,
        });
        let mut known = self.cuts.write().unwrap_or_else(PoisonError::into_inner);
        known.entry(piece_elements).or_insert(cut).clone()
    }

    /// A stage as one rank has it.
    fn cut_stage(
        &self,
        stage: usize,
        set: &Set,
        piece_elements: usize,
        shards: &Shards,
    ) -> OfStage {
        let slabs = set.slabs(stage, piece_elements, self.task.lanes, shards);
        let groups = groups(stage, set, &slabs, piece_elements, shards);
        let own = slabs.gradients.entries.iter().take(set.trainable().count());
        let sizes: Vec<Vec<usize>> = own.map(|entry| entry.pieces.clone()).collect();
        let f32s = |(t, pieces): (usize, &Vec<usize>)| -> Vec<usize> {
            let size = set.gradients[t].dtype.size_bytes();
            pieces.iter().map(|bytes| bytes / size * DType::F32.size_bytes()).collect()
        };
        let sum_sizes: Vec<Vec<usize>> = sizes.iter().enumerate().map(f32s).collect();
        let received = Received::new(shards, stage, &sizes, &sum_sizes);
        OfStage { slabs, groups, received }
    }
}

/// The parameters of a stage in pieces, and what a rank does with its own.
struct OfStage {
    slabs: SetSlabs,
    groups: Vec<UpdateGroup>,
    received: Received,
}
