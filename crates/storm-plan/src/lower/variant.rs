//! A section's graph for a given set of kept tensors, with the layout of its temporaries.

use crate::HardwareProfile;
use crate::pack::{Lifetime, Packing, pack, pack_within};
use std::sync::Arc;
use storm_graph::{ActivationCodec, Graph, Node, Op, Phase, Section, Tensor, TensorId};

/// A section as it will run: its nodes, and the layout of its temporaries in the work area.
#[derive(Clone, Debug)]
pub(crate) struct Variant {
    pub(crate) section: Section,
    /// The section's graph, for plans to share.
    pub(crate) graph: Arc<Graph>,
    /// By tensor: the one whose memory it has. That is the first that its memory was written as, or
    /// the one among those after it that lies elsewhere.
    pub(crate) storage: Vec<TensorId>,
    pub(crate) forward: Pass,
    pub(crate) backward: Pass,
}

/// The nodes of one pass over a section.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pass {
    pub(crate) nodes: Vec<PassNode>,
    /// By tensor that owns storage: where it lies if it is a temporary.
    pub(crate) temporaries: Vec<Option<Memory>>,
    /// Of the work area.
    pub(crate) size_bytes: usize,
    /// Time of all nodes.
    pub(crate) seconds: f64,
    /// Time of the nodes that recompute, and their matrix arithmetic.
    pub(crate) recompute_seconds: f64,
    pub(crate) recompute_flops: u128,
    pub(crate) flops: u128,
}

/// Memory of a temporary, by the offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Work(usize),
    /// That of a gradient from the block after, which the pass has read by then.
    Gradient(TensorId, usize),
}

/// A node and the tensors it accesses, looked up once.
#[derive(Clone, Debug)]
pub(crate) struct PassNode {
    /// Position in the graph.
    pub(crate) index: u32,
    pub(crate) operands: Vec<TensorId>,
    pub(crate) outputs: Vec<TensorId>,
    pub(crate) seconds: f64,
}

/// Whether the forward and backward pass of a section run separately or as one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passes {
    /// Separately, with the passes of other blocks between them.
    Apart,
    /// As one pass, which is then `backward`: the backward nodes right after the forward nodes.
    Joined,
}

/// Whether nodes that change running statistics run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Running {
    /// In the forward pass of a training step.
    Change,
    /// In an evaluation, and when a forward pass is rerun.
    Leave,
}

impl Variant {
    /// `lies_elsewhere` is true for tensors with an address outside the work area: those that are
    /// not temporaries.
    pub(crate) fn new(
        section: Section,
        passes: Passes,
        running: Running,
        profile: &HardwareProfile,
        lies_elsewhere: impl Fn(TensorId) -> bool,
    ) -> Variant {
        let graph = &section.graph;
        let runs = |node: &Node| running == Running::Change || !graph.changes_running(node);
        let storage = storage(graph, &lies_elsewhere);
        let pass = |wanted: &dyn Fn(Phase) -> bool| {
            let nodes: Vec<usize> = (0..graph.nodes().len())
                .filter(|&index| wanted(graph.nodes()[index].phase) && runs(&graph.nodes()[index]))
                .collect();
            let gradients = section.backward.iter().flat_map(|b| &b.carried_out_gradients);
            let gradients: Vec<TensorId> = gradients.copied().collect();
            Pass::new(graph, &nodes, &storage, profile, &lies_elsewhere, &gradients)
        };
        let (forward, backward) = match passes {
            Passes::Joined => (Pass::default(), pass(&|_| true)),
            Passes::Apart => {
                (pass(&|phase| phase == Phase::Forward), pass(&|phase| phase != Phase::Forward))
            }
        };
        let graph = Arc::new(section.graph.clone());
        Variant { forward, backward, storage, graph, section }
    }
}

impl Pass {
    /// `gradients` come from the block after, and nothing else reads them.
    fn new(
        graph: &Graph,
        indices: &[usize],
        storage: &[TensorId],
        profile: &HardwareProfile,
        lies_elsewhere: &impl Fn(TensorId) -> bool,
        gradients: &[TensorId],
    ) -> Pass {
        let mut lives: Vec<Option<Lifetime>> = vec![None; graph.tensors().len()];
        let mut pass = Pass::default();
        for (position, &index) in indices.iter().enumerate() {
            let node = &graph.nodes()[index];
            let operands: Vec<TensorId> =
                node.op.operands().into_iter().map(|(_, id)| id).collect();
            for &id in operands.iter().chain(&node.outputs) {
                let root = storage[id.index()];
                if lies_elsewhere(root) && !gradients.contains(&root) {
                    continue;
                }
                let size_bytes = graph.tensor(root).size_bytes();
                let life = lives[root.index()].get_or_insert(Lifetime {
                    size_bytes,
                    made: position,
                    last_use: position,
                });
                life.last_use = position;
            }
            let seconds = node_seconds(graph, node, profile);
            let flops = node.op.clone().map(|_, id| graph.tensor(id)).matrix_flops();
            pass.seconds += seconds;
            pass.flops += flops;
            if node.phase == Phase::Recompute {
                pass.recompute_flops += flops;
            }
            pass.recompute_seconds += seconds - seconds_without_recomputing(graph, node, profile);
            let (index, outputs) = (index as u32, node.outputs.clone());
            pass.nodes.push(PassNode { index, operands, outputs, seconds });
        }
        let read = gradients.iter().filter_map(|&id| Some((id, lives[id.index()].take()?)));
        let read: Vec<(TensorId, Lifetime)> = read.collect();
        pass.place(&lives, &read);
        pass
    }

    /// Places all temporaries. Those that begin after a gradient was last read may take its memory, if that makes the work
    /// area smaller.
    fn place(&mut self, lives: &[Option<Lifetime>], read: &[(TensorId, Lifetime)]) {
        let mut places = vec![None; lives.len()];
        for &(gradient, Lifetime { size_bytes, last_use, .. }) in read {
            let free = |index: usize| lives[index].filter(|_| places[index].is_none());
            let later = (0..lives.len()).filter_map(|index| Some((index, free(index)?)));
            let (later, its): (Vec<usize>, Vec<Lifetime>) =
                later.filter(|(_, life)| life.made > last_use).unzip();
            for (index, offset) in later.into_iter().zip(pack_within(&its, size_bytes)) {
                places[index] = offset.map(|offset| Memory::Gradient(gradient, offset));
            }
        }
        let packed = |places: &mut [Option<Memory>]| {
            let rest = (0..lives.len()).filter(|&index| places[index].is_none());
            let (rest, its): (Vec<usize>, Vec<Lifetime>) =
                rest.filter_map(|index| Some((index, lives[index]?))).unzip();
            let Packing { offsets, size_bytes } = pack(&its);
            for (index, offset) in rest.into_iter().zip(offsets) {
                places[index] = Some(Memory::Work(offset));
            }
            size_bytes
        };
        let mut apart = vec![None; lives.len()];
        let (shared_bytes, apart_bytes) = (packed(&mut places), packed(&mut apart));
        (self.temporaries, self.size_bytes) = match shared_bytes < apart_bytes {
            true => (places, shared_bytes),
            false => (apart, apart_bytes),
        };
    }
}

/// Time of a section's backward pass.
pub(super) fn backward_seconds(graph: &Graph, profile: &HardwareProfile) -> f64 {
    let backward = graph.nodes().iter().filter(|node| node.phase != Phase::Forward);
    backward.map(|node| node_seconds(graph, node, profile)).sum()
}

/// Time of a node.
pub(super) fn node_seconds(graph: &Graph, node: &Node, profile: &HardwareProfile) -> f64 {
    let op = node.op.clone().map(|_, id| graph.tensor(id));
    let outputs: Vec<&Tensor> = node.outputs.iter().map(|&id| graph.tensor(id)).collect();
    profile.op_seconds(&op, &outputs)
}

/// Time of a node if nothing had to be recomputed.
fn seconds_without_recomputing(graph: &Graph, node: &Node, profile: &HardwareProfile) -> f64 {
    match node.op {
        _ if node.phase == Phase::Recompute => 0.0,
        // With a codec, the gradient node computes the output whatever is kept.
        Op::SwiGluGradAndOutput { dy, gate_up, function, codec: codec @ ActivationCodec::None } => {
            let outputs = node.outputs[..1].to_vec();
            let op = Op::SwiGluGrad { dy, gate_up, function, codec };
            let alone = Node { op, outputs, ..node.clone() };
            node_seconds(graph, &alone, profile)
        }
        _ => node_seconds(graph, node, profile),
    }
}

/// The tensor whose memory each tensor has. If what overwrites a temporary has a place outside the
/// work area, the temporary has that place, too.
fn storage(graph: &Graph, lies_elsewhere: &impl Fn(TensorId) -> bool) -> Vec<TensorId> {
    let mut storage: Vec<TensorId> = graph.ids().map(|id| storage_of(graph, id)).collect();
    for id in graph.ids().filter(|&id| lies_elsewhere(id)) {
        let root = storage[id.index()];
        if root != id && !lies_elsewhere(root) {
            storage.iter_mut().filter(|known| **known == root).for_each(|known| *known = id);
        }
    }
    storage
}

/// The tensor whose memory `id` overwrites, through any number of in-place nodes; `id` itself if
/// it has separate memory.
fn storage_of(graph: &Graph, mut id: TensorId) -> TensorId {
    while let Some(under) = overwritten_by(graph, id) {
        id = under;
    }
    id
}

fn overwritten_by(graph: &Graph, id: TensorId) -> Option<TensorId> {
    let node = &graph.nodes()[graph.producer(id)?];
    let place = node.outputs.iter().position(|&output| output == id)?;
    node.op.in_place().into_iter().find(|&(_, index)| index == place).map(|(operand, _)| operand)
}
