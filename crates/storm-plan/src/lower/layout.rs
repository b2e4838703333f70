//! Addresses: fixed places for what stays, rings for what comes and goes, one work area for
//! temporaries.

use super::Lowering;
use super::shared::Cut;
use super::slab::{COPY_BYTES_MAX, Slab};
use crate::pack::{ALIGNMENT, aligned};
use crate::plan::{Region, Tier};
use crate::{Decisions, Storage};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use storm_graph::{Op, Tensor, TensorClass};

/// One tier, filled from the bottom.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    tier: Tier,
    pub(crate) size_bytes: usize,
    pub(crate) regions: Vec<Region>,
}

impl Arena {
    fn new(tier: Tier) -> Arena {
        Arena { tier, size_bytes: 0, regions: Vec::new() }
    }

    /// Takes a named range; consecutive ranges of one name are one region.
    fn take(&mut self, name: &str, bytes: usize) -> usize {
        let (start, bytes) = (self.size_bytes, aligned(bytes));
        self.size_bytes = start.saturating_add(bytes);
        match self.regions.last_mut() {
            Some(region) if region.name == name => region.bytes += bytes,
            _ if bytes == 0 => {}
            _ => self.regions.push(Region { name: name.to_owned(), tier: self.tier, start, bytes }),
        }
        start
    }
}

/// Something that the host writes, with its places.
#[derive(Clone, Debug)]
pub(crate) struct InputPlaces {
    pub(crate) tensor: Tensor,
    pub(crate) per_micro_batch: bool,
    /// (device, host), one per micro-batch of a group.
    pub(crate) places: Vec<(usize, usize)>,
}

/// The offloaded tensors of a layer: one slab entry per tensor, unit by unit.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActivationSlab {
    pub(crate) slab: Slab,
    /// Unit, tensor of the layer's graph, in slab order.
    pub(crate) tensors: Vec<(usize, storm_graph::TensorId)>,
}

/// Where everything is.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) device: Arena,
    pub(crate) host: Arena,
    pub(crate) inputs: Vec<InputPlaces>,
    /// The first of the scalars: norm, clip, and the sum of squares of each gradient.
    scalars: usize,
    /// (device, host), one per micro-batch of a group.
    pub(crate) losses: Vec<(usize, usize)>,
    pub(crate) norm_host: usize,
    /// All parameters in pieces.
    pub(super) cut: Arc<Cut>,
    pub(crate) edge_weights: usize,
    pub(crate) edge_gradients: usize,
    /// On the device if resident, in host memory otherwise.
    pub(crate) edge_states: usize,
    pub(crate) weights: ClassPlaces,
    pub(crate) gradients: ClassPlaces,
    pub(crate) states: ClassPlaces,
    /// Pieces of optimizer state on their way through.
    pub(crate) state_ring: Ring,
    /// By layer and micro-batch.
    pub(crate) kept: Vec<Vec<usize>>,
    pub(crate) kept_slabs: Vec<ActivationSlab>,
    pub(crate) prologue_kept: Vec<BTreeMap<storm_graph::TensorId, usize>>,
    /// Offloaded tensors of each layer, and where they wait, by layer and micro-batch.
    pub(crate) offloaded_slabs: Vec<ActivationSlab>,
    pub(crate) offloaded_host: Vec<Vec<usize>>,
    pub(crate) activation_ring: Ring,
    /// Layer inputs: kept ones by layer and micro-batch, offloaded ones in host memory likewise.
    pub(crate) boundary_kept: Vec<Vec<usize>>,
    pub(crate) boundary_host: Vec<Vec<usize>>,
    pub(crate) boundary_slab: Slab,
    pub(crate) boundary_ring: Ring,
    /// Layer inputs that are made again, by place in their stretch of layers and micro-batch.
    pub(crate) replayed: Ring,
    /// Gradients of layer inputs.
    pub(crate) carry_ring: Ring,
    pub(crate) exports: Vec<BTreeMap<String, usize>>,
    pub(crate) work: usize,
}

/// Device slots and host places of a streamed class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClassPlaces {
    pub(crate) device: usize,
    pub(crate) host: usize,
    pub(crate) slot_bytes: usize,
}

/// Equal slots one after another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    pub(crate) start: usize,
    pub(crate) slot_bytes: usize,
    pub(crate) slots: usize,
}

impl Ring {
    fn take(arena: &mut Arena, name: &str, slot_bytes: usize, slots: usize) -> Ring {
        let slot_bytes = aligned(slot_bytes);
        Ring { start: arena.take(name, slot_bytes * slots), slot_bytes, slots }
    }

    pub(crate) fn slot(&self, index: usize) -> usize {
        self.start + index % self.slots.max(1) * self.slot_bytes
    }
}

impl Layout {
    pub(crate) fn new(lowering: &Lowering<'_>, decisions: &Decisions) -> Layout {
        let (group, layers) = (decisions.group, lowering.task.layer_count());
        let mut device = Arena::new(Tier::Device);
        let mut host = Arena::new(Tier::Host);
        let cut = lowering.cut(decisions.piece_elements);
        let Cut { layer, edge, .. } = &*cut;

        let inputs = place_inputs(lowering, group, &mut device, &mut host);
        let scalar_count = lowering.shared.scalars.len();
        let scalars = device.take("inputs and scalars", ALIGNMENT * scalar_count);
        let losses = (0..group)
            .map(|_| (device.take("inputs and scalars", 4), host.take("inputs and results", 4)))
            .collect();
        let norm_host = host.take("inputs and results", 4);

        let edge_weights = device.take("weights of embedding and head", edge.weights.size_bytes);
        let edge_gradients =
            device.take("gradients of embedding and head", edge.gradients.size_bytes);
        let edge_states = match decisions.edge_states_resident {
            true => device.take("optimizer state of embedding and head", edge.states.size_bytes),
            false => host.take("optimizer state of embedding and head", edge.states.size_bytes),
        };
        let mut class = |name: &str, slab: &Slab, slots: usize, pinned: usize| ClassPlaces {
            device: device.take(name, slab.size_bytes * slots),
            host: host.take(name, slab.size_bytes * (layers - pinned)),
            slot_bytes: slab.size_bytes,
        };
        let Decisions { weights, gradients, states, .. } = *decisions;
        let weights = class("weights", &layer.weights, weights.slots(), weights.pinned);
        let gradients = class("gradients", &layer.gradients, gradients.slots(), gradients.pinned);
        let states = class("optimizer state", &layer.states, states.pinned, states.pinned);
        let state_slot = if decisions.states.pinned == layers && decisions.edge_states_resident {
            0
        } else {
            cut.state_slot_bytes
        };
        let state_ring = Ring::take(
            &mut device,
            "optimizer state in transit",
            state_slot,
            decisions.states.ring,
        );

        let slabs = |wanted: Storage| -> Vec<ActivationSlab> {
            decisions.saved.iter().map(|saved| activation_slab(lowering, saved, wanted)).collect()
        };
        let (kept_slabs, offloaded_slabs) = (slabs(Storage::Keep), slabs(Storage::Offload));
        let places = |arena: &mut Arena, name: &str, slabs: &[ActivationSlab]| -> Vec<Vec<usize>> {
            let place = |arena: &mut Arena, slab: &ActivationSlab| {
                (0..group).map(|_| arena.take(name, slab.slab.size_bytes)).collect()
            };
            slabs.iter().map(|slab| place(arena, slab)).collect()
        };
        let kept = places(&mut device, "kept activations", &kept_slabs);
        let prologue_kept = prologue_kept(lowering, group, &mut device);
        let offloaded_host = places(&mut host, "offloaded activations", &offloaded_slabs);
        let slot = offloaded_slabs.iter().map(|slab| slab.slab.size_bytes).max().unwrap_or(0);
        let ring = if slot == 0 { 0 } else { decisions.activation_ring };
        let activation_ring = Ring::take(&mut device, "activations in transit", slot, ring);

        let carried = lowering.task.proceed.layer.carried_in[0];
        let carried_bytes = lowering.task.proceed.layer.graph.tensor(carried).size_bytes();
        let mut boundary_slab = Slab::default();
        boundary_slab.push(carried_bytes, COPY_BYTES_MAX);
        let boundary_places = |arena: &mut Arena, name: &str, wanted: Storage| {
            let bytes = |storage: Storage| if storage == wanted { carried_bytes } else { 0 };
            let layer = |arena: &mut Arena, storage: Storage| -> Vec<usize> {
                (0..group).map(|_| arena.take(name, bytes(storage))).collect()
            };
            decisions.boundary.iter().map(|&storage| layer(arena, storage)).collect::<Vec<_>>()
        };
        let boundary_kept = boundary_places(&mut device, "kept layer inputs", Storage::Keep);
        let boundary_host = boundary_places(&mut host, "offloaded layer inputs", Storage::Offload);
        // The last layer's result always goes through the ring, besides the inputs of a group.
        let all_kept = decisions.boundary.iter().all(|&storage| storage == Storage::Keep);
        let extra = if all_kept { 0 } else { decisions.boundary_ring };
        let boundary_ring =
            Ring::take(&mut device, "layer inputs in transit", carried_bytes, group + 1 + extra);
        let stretch = longest_stretch(&decisions.boundary);
        let replayed = Ring::take(&mut device, "layer inputs made again", carried_bytes, {
            (stretch - 1) * group
        });
        let carry_ring =
            Ring::take(&mut device, "gradients of layer inputs", carried_bytes, group + 1);
        let exports = (0..group)
            .map(|_| {
                let section = &lowering.task.proceed.prologue;
                let export = |(name, id): &(String, storm_graph::TensorId)| {
                    let bytes = section.graph.tensor(*id).size_bytes();
                    (name.clone(), device.take("tables", bytes))
                };
                section.exports.iter().map(export).collect()
            })
            .collect();
        let work = device.take("work area", work_bytes(lowering, decisions));
        Layout {
            device,
            host,
            inputs,
            scalars,
            losses,
            norm_host,
            cut,
            edge_weights,
            edge_gradients,
            edge_states,
            weights,
            gradients,
            states,
            state_ring,
            kept,
            kept_slabs,
            prologue_kept,
            offloaded_slabs,
            offloaded_host,
            activation_ring,
            boundary_kept,
            boundary_host,
            boundary_slab,
            boundary_ring,
            replayed,
            carry_ring,
            exports,
            work,
        }
    }
}

impl Layout {
    /// Where a scalar of the norm lies.
    pub(super) fn scalar(&self, lowering: &Lowering<'_>, name: &str) -> Option<usize> {
        let index = lowering.shared.scalars.get(name)?;
        Some(self.scalars + index * ALIGNMENT)
    }
}

/// The most layers in a row of which only the first has its input at hand.
pub(crate) fn longest_stretch(boundary: &[Storage]) -> usize {
    let mut longest = 1;
    let mut length = 0;
    for &storage in boundary {
        length = if storage == Storage::Recompute { length + 1 } else { 1 };
        longest = longest.max(length);
    }
    longest
}

fn place_inputs(
    lowering: &Lowering<'_>,
    group: usize,
    device: &mut Arena,
    host: &mut Arena,
) -> Vec<InputPlaces> {
    let places = |(tensor, per_micro_batch): &(Tensor, bool)| {
        let copies = if *per_micro_batch { group } else { 1 };
        let bytes = tensor.size_bytes();
        let places = (0..copies).map(|_| {
            let device = device.take("inputs and scalars", bytes);
            (device, host.take("inputs and results", bytes))
        });
        InputPlaces {
            places: places.collect(),
            tensor: tensor.clone(),
            per_micro_batch: *per_micro_batch,
        }
    };
    lowering.shared.inputs.iter().map(places).collect()
}

fn activation_slab(lowering: &Lowering<'_>, saved: &[Storage], wanted: Storage) -> ActivationSlab {
    let graph = &lowering.task.proceed.layer.graph;
    let mut slab = ActivationSlab::default();
    for (unit, storage) in saved.iter().enumerate() {
        if *storage != wanted {
            continue;
        }
        for &id in &lowering.units[unit].tensors {
            slab.slab.push(graph.tensor(id).size_bytes(), COPY_BYTES_MAX);
            slab.tensors.push((unit, id));
        }
    }
    slab
}

fn prologue_kept(
    lowering: &Lowering<'_>,
    group: usize,
    device: &mut Arena,
) -> Vec<BTreeMap<storm_graph::TensorId, usize>> {
    let section = &lowering.task.proceed.prologue;
    let elsewhere: Vec<storm_graph::TensorId> = section
        .carried_out
        .iter()
        .copied()
        .chain(section.exports.iter().map(|&(_, id)| id))
        .collect();
    (0..group)
        .map(|_| {
            let saved = section.graph.saved().into_iter().filter(|id| !elsewhere.contains(id));
            saved
                .map(|id| (id, device.take("tables", section.graph.tensor(id).size_bytes())))
                .collect()
        })
        .collect()
}

/// The largest need of any pass for temporaries.
fn work_bytes(lowering: &Lowering<'_>, decisions: &Decisions) -> usize {
    let mut bytes = 0;
    let edges = [&lowering.prologue, &lowering.epilogue].into_iter().flatten();
    for variant in edges {
        bytes = bytes.max(variant.forward.size_bytes).max(variant.backward.size_bytes);
    }
    let different: BTreeSet<&Vec<Storage>> = decisions.saved.iter().collect();
    for saved in different {
        for variant in lowering.layer(saved) {
            bytes = bytes.max(variant.forward.size_bytes).max(variant.backward.size_bytes);
        }
    }
    if decisions.boundary.contains(&Storage::Recompute) {
        let [_, replayed] = lowering.layer(&vec![Storage::Recompute; lowering.units.len()]);
        bytes = bytes.max(replayed.forward.size_bytes);
    }
    let norm = &lowering.task.norm;
    for node in norm.nodes() {
        let scratch = node.outputs.iter().map(|&id| norm.tensor(id));
        let scratch = scratch.filter(|tensor| tensor.class == TensorClass::Scratch);
        debug_assert!(matches!(
            node.op,
            Op::SumOfSquares { .. } | Op::GlobalNorm { .. } | Op::ClipScale { .. }
        ));
        bytes = bytes.max(scratch.map(|tensor| aligned(tensor.size_bytes())).sum());
    }
    bytes
}
