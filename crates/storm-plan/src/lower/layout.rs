//! Addresses: fixed places for what stays, rings for what comes and goes, one work area for
//! temporaries.

use super::Lowering;
use super::frozen::is_frozen_on_disk;
use super::homes::Homes;
use super::norm::scratch_bytes;
use super::shards::partials_bytes;
use super::shared::{BlockResult, Cut};
use super::slab::{COPY_BYTES_MAX, Slab};
use crate::decisions::{RingMemory, SeamMemory, Streaming};
use crate::pack::{ALIGNMENT, aligned};
use crate::plan::Region;
use crate::tier::{PerTier, Tier};
use crate::{Decisions, GroupDecisions, Storage, TensorKind, UpdateTime};
use std::sync::{Arc, PoisonError};
use storm_graph::{DType, Tensor, TensorClass, TensorId};

/// One tier, filled from the bottom.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    tier: Tier,
    pub(crate) size_bytes: usize,
    pub(crate) regions: Vec<Region>,
    names: Names,
}

/// Whether a layout says what lies where, for people: a search asks for thousands of layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Given,
    Left,
}

impl Arena {
    fn new(tier: Tier, names: Names) -> Arena {
        Arena { tier, size_bytes: 0, regions: Vec::new(), names }
    }

    /// Takes a named range; consecutive ranges of one name are one region.
    fn take(&mut self, kind: TensorKind, name: &str, bytes: usize) -> usize {
        let (start, bytes) = (self.size_bytes, aligned(bytes));
        self.size_bytes = start.saturating_add(bytes);
        if self.names == Names::Left {
            return start;
        }
        match self.regions.last_mut() {
            Some(region) if region.name == name => region.bytes += bytes,
            _ if bytes == 0 => {}
            _ => {
                let (name, tier) = (name.to_owned(), self.tier);
                self.regions.push(Region { name, kind, tier, start, bytes });
            }
        }
        start
    }
}

/// Something that the host writes, with its places.
#[derive(Clone, Debug)]
pub(crate) struct InputPlaces {
    pub(crate) tensor: Arc<Tensor>,
    pub(crate) per_micro_batch: bool,
    /// Whether a step fetches it.
    pub(crate) is_fetched: bool,
    /// How many places it has: one per micro-batch of a group, or only one.
    pub(crate) count: usize,
    pub(crate) device: GroupPlaces,
    pub(crate) host: GroupPlaces,
}

/// Saved tensors of a block: one slab entry per tensor, unit by unit.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActivationSlab {
    pub(crate) slab: Slab,
    /// Unit, tensor of the template's graph, in slab order.
    pub(crate) tensors: Vec<(usize, TensorId)>,
}

/// Where everything is.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) device: Arena,
    pub(crate) host: Arena,
    pub(crate) disk: Arena,
    pub(crate) inputs: Vec<InputPlaces>,
    /// The first of the scalars: norm, clip, and the sum of squares of each gradient.
    scalars: usize,
    /// (device, host), by result.
    pub(crate) results: Vec<(GroupPlaces, GroupPlaces)>,
    pub(crate) norm_host: usize,
    /// All parameters in pieces.
    pub(super) cut: Arc<Cut>,
    /// By stage.
    pub(crate) weights: Vec<ClassPlaces>,
    pub(crate) gradients: Vec<ClassPlaces>,
    pub(crate) states: Vec<ClassPlaces>,
    /// Where streamed weights are, by stage and block.
    pub(crate) weight_homes: Vec<Vec<WeightHome>>,
    /// In pinned host memory: frozen weights on their way from the disk.
    pub(crate) frozen_ring: Ring,
    /// Sums of lanes, on the device for blocks whose gradients are pinned.
    pub(crate) sums: Vec<ClassPlaces>,
    /// Sums of groups of lanes that last from lane to lane, likewise.
    pub(crate) group_sums: Vec<ClassPlaces>,
    /// Where streamed state is, by stage and block.
    pub(crate) state_homes: Vec<Vec<StateHome>>,
    /// In pinned host memory: state on its way from and to the disk.
    pub(crate) disk_ring: Ring,
    /// By block, and by position among what it changes in place.
    pub(crate) changing: Vec<Vec<usize>>,
    /// Pieces of optimizer state on their way through.
    pub(crate) state_ring: Ring,
    /// One for each of the decided groups. They take turns, so they lie over each other.
    pub(crate) groups: Vec<GroupLayout>,
    pub(crate) work: usize,
    pub(crate) work_bytes: usize,
    /// What other ranks send of the gradients of a block, the sums of this machine, and what others send of theirs: see
    /// [`Received`](super::shards::Received).
    pub(super) received: [usize; 3],
    /// Partial sums of squares, by block and trainable parameter; empty if one rank makes the step.
    pub(super) squares: Vec<Vec<SquarePlaces>>,
}

/// Where the partial sums of squares of a gradient are.
#[derive(Clone, Debug)]
pub(super) struct SquarePlaces {
    /// Of all pieces, one after another.
    pub(super) whole: usize,
    /// Of each piece, as its owner makes them.
    pub(super) pieces: Vec<usize>,
}

/// What a group of micro-batches makes and takes.
#[derive(Clone, Debug)]
pub(crate) struct GroupLayout {
    /// By block.
    pub(crate) kept: Vec<GroupPlaces>,
    pub(crate) kept_slabs: Vec<Arc<ActivationSlab>>,
    /// Offloaded tensors of each block, and where they wait.
    pub(crate) offloaded_slabs: Vec<Arc<ActivationSlab>>,
    pub(crate) offloaded_host: Vec<GroupPlaces>,
    pub(crate) activation_ring: Ring,
    /// Inputs of blocks: kept ones by block, offloaded ones in host memory likewise.
    pub(crate) inputs_kept: Vec<GroupPlaces>,
    pub(crate) inputs_host: Vec<GroupPlaces>,
    pub(crate) input_ring: Ring,
    /// The slots of it that the backward pass does not use, from the first, because gradients do.
    pub(crate) input_slots_taken: usize,
    /// Inputs of blocks that are recomputed, by place in their stretch of blocks and micro-batch.
    pub(crate) replayed: Ring,
    /// Gradients of the inputs of blocks.
    pub(crate) carry_ring: Ring,
    /// Tensors that go around blocks and their gradients, by skip and micro-batch.
    pub(crate) skips: Vec<Vec<(usize, usize)>>,
    /// All exports of a micro-batch, see [`Exports`](super::shared::Exports).
    pub(crate) exports: GroupPlaces,
}

/// Equal places for the micro-batches of a group, one after another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupPlaces {
    start: usize,
    stride: usize,
}

impl GroupPlaces {
    fn take(arena: &mut Arena, kind: TensorKind, name: &str, bytes: usize, group: usize) -> Self {
        let stride = aligned(bytes);
        GroupPlaces { start: arena.take(kind, name, stride.saturating_mul(group)), stride }
    }

    /// The place of a micro-batch.
    pub(crate) fn of(&self, micro_batch: usize) -> usize {
        self.start + micro_batch * self.stride
    }
}

/// Device slots and host places of a class of a stage's tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClassPlaces {
    pub(crate) streaming: Streaming,
    /// Where the slots of pinned blocks begin.
    pinned: usize,
    /// Where the ring begins.
    ring: usize,
    host: usize,
    pub(crate) slot_bytes: usize,
    /// Of a block in host memory.
    host_bytes: usize,
}

impl ClassPlaces {
    /// Where a slot begins on the device.
    pub(crate) fn slot(&self, slot: usize) -> usize {
        match slot.checked_sub(self.streaming.pinned) {
            None => self.pinned + slot * self.slot_bytes,
            Some(beyond) => self.ring + beyond * self.slot_bytes,
        }
    }

    /// Where a block's tensors are on the device, while they are.
    pub(crate) fn device(&self, index: usize) -> usize {
        self.slot(self.streaming.slot(index))
    }

    /// Where the gradients of a block that is not pinned wait.
    pub(crate) fn host(&self, index: usize) -> usize {
        self.host + (index - self.streaming.pinned) * self.host_bytes
    }

    fn ring_bytes(&self) -> usize {
        self.streaming.ring * self.slot_bytes
    }
}

/// Where the streamed weights of a block are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightHome {
    pub(crate) host: usize,
    /// The frozen ones; none if they are in host memory with the others. See
    /// [`FrozenHomes`](super::frozen::FrozenHomes).
    pub(crate) disk: Option<usize>,
}

/// Where the streamed optimizer state of a block is: see [`Homes`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StateHome {
    pub(crate) host: usize,
    pub(crate) disk: usize,
    /// How many kinds of it are on disk.
    pub(crate) kinds_on_disk: usize,
}

/// Equal slots one after another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    pub(crate) start: usize,
    pub(crate) slot_bytes: usize,
    pub(crate) slots: usize,
}

impl Ring {
    fn take(
        arena: &mut Arena,
        kind: TensorKind,
        name: &str,
        slot_bytes: usize,
        slots: usize,
    ) -> Ring {
        let slot_bytes = aligned(slot_bytes);
        Ring { start: arena.take(kind, name, slot_bytes * slots), slot_bytes, slots }
    }

    pub(crate) fn slot(&self, index: usize) -> usize {
        self.start + index % self.slots.max(1) * self.slot_bytes
    }

    /// The slot that a place belongs to.
    pub(crate) fn slot_of(&self, place: usize) -> Option<usize> {
        let end = self.start + self.slots * self.slot_bytes;
        let is_inside = place >= self.start && place < end;
        is_inside.then(|| (place - self.start) / self.slot_bytes)
    }
}

impl Layout {
    /// How much memory there is.
    pub(crate) fn bytes(&self) -> PerTier<usize> {
        let memory = PerTier::new(self.device.size_bytes, self.host.size_bytes);
        memory.with(Tier::DISK, self.disk.size_bytes)
    }

    /// What lies where in each tier.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Region> {
        [&self.device, &self.host, &self.disk].into_iter().flat_map(|arena| &arena.regions)
    }

    /// Where the state of a stage's block lives.
    pub(super) fn homes(&self, stage: usize, index: usize) -> &Homes {
        &self.cut.homes[stage][self.state_homes[stage][index].kinds_on_disk]
    }

    pub(crate) fn new(lowering: &Lowering<'_>, decisions: &Decisions) -> Layout {
        Layout::named(lowering, decisions, Names::Given)
    }

    /// The same addresses, without regions.
    pub(crate) fn without_names(lowering: &Lowering<'_>, decisions: &Decisions) -> Layout {
        Layout::named(lowering, decisions, Names::Left)
    }

    fn named(lowering: &Lowering<'_>, decisions: &Decisions, names: Names) -> Layout {
        let group = decisions.group_max();
        let mut device = Arena::new(Tier::DEVICE, names);
        let mut host = Arena::new(Tier::HOST, names);
        let mut disk = Arena::new(Tier::DISK, names);
        let cut = lowering.cut(decisions.piece_elements);
        // First, where they are aligned to the blocks of a disk.
        let disk_ring = place_disk_ring(lowering, decisions, &cut, &mut host);
        let frozen_ring = place_frozen_ring(lowering, decisions, &cut, &mut host);

        let inputs = place_inputs(lowering, group, &mut device, &mut host);
        let scalar_count = lowering.shared.scalars.len();
        let kind = TensorKind::Inputs;
        let scalars = device.take(kind, "inputs and scalars", ALIGNMENT * scalar_count);
        let place_result = |result: &BlockResult| {
            let bytes = result.tensor.size_bytes();
            let place = GroupPlaces::take(&mut device, kind, "inputs and scalars", bytes, group);
            (place, GroupPlaces::take(&mut host, kind, "inputs and results", bytes, group))
        };
        let results = lowering.shared.results.iter().map(place_result).collect();
        let norm_host = host.take(kind, "inputs and results", 4);

        let Parameters { weights, gradients, states, sums, group_sums } =
            place_parameters(lowering, decisions, &cut, &mut device, &mut host);
        let weight_homes = place_weights(lowering, decisions, &cut, &mut host, &mut disk);
        let state_homes = place_states(lowering, decisions, &cut, &mut host, &mut disk);
        let changing = (0..lowering.blocks.count())
            .map(|block| {
                let tensors = &lowering.sets[lowering.blocks.get(block).stage].changing;
                let mut take = |tensor: &Tensor| {
                    let (kind, name) = match tensor.class {
                        TensorClass::Cache => (TensorKind::Activations, "keys and values"),
                        _ => (TensorKind::Weights, "running statistics"),
                    };
                    device.take(kind, name, tensor.size_bytes())
                };
                tensors.iter().map(&mut take).collect()
            })
            .collect();
        let kind = TensorKind::OptimizerState;
        let (slots, slot) = (decisions.state_ring, cut.state_slot_bytes);
        let slot = if lowering.needs_state_ring(decisions) { slot } else { 0 };
        let state_ring = Ring::take(&mut device, kind, "optimizer state in transit", slot, slots);

        let received = cut
            .received_bytes
            .map(|bytes| device.take(TensorKind::Gradients, "gradients of other ranks", bytes));
        let squares = place_squares(lowering, decisions, &cut, &mut device);
        let work_bytes = work_bytes(lowering, decisions);
        let work = device.take(TensorKind::WorkArea, "work area", work_bytes);
        let mut groups = Vec::new();
        let [mut device_most, mut host_most] = [device.clone(), host.clone()];
        for group in &decisions.groups {
            let [mut device, mut host] = [device.clone(), host.clone()];
            groups.push(GroupLayout::new(lowering, group, &mut device, &mut host));
            for (most, arena) in [(&mut device_most, device), (&mut host_most, host)] {
                if arena.size_bytes > most.size_bytes {
                    *most = arena;
                }
            }
        }
        Layout {
            device: device_most,
            host: host_most,
            disk,
            inputs,
            scalars,
            results,
            norm_host,
            cut,
            weights,
            gradients,
            states,
            weight_homes,
            frozen_ring,
            sums,
            group_sums,
            state_homes,
            disk_ring,
            changing,
            state_ring,
            groups,
            work,
            work_bytes,
            received,
            squares,
        }
    }

    /// Where a scalar of the norm lies.
    pub(super) fn scalar(&self, lowering: &Lowering<'_>, name: &str) -> Option<usize> {
        let index = lowering.shared.scalars.get(name)?;
        Some(self.scalars + index * ALIGNMENT)
    }
}

impl GroupLayout {
    fn new(
        lowering: &Lowering<'_>,
        decided: &GroupDecisions,
        device: &mut Arena,
        host: &mut Arena,
    ) -> GroupLayout {
        let group = decided.micro_batches;
        let (kept_slabs, offloaded_slabs) = (
            activation_slabs(lowering, decided, Storage::Keep),
            activation_slabs(lowering, decided, Storage::Offload),
        );
        let kind = TensorKind::Activations;
        let places = |arena: &mut Arena, name: &str, slabs: &[Arc<ActivationSlab>]| -> Vec<_> {
            let place = |slab: &Arc<ActivationSlab>| {
                GroupPlaces::take(arena, kind, name, slab.slab.size_bytes, group)
            };
            slabs.iter().map(place).collect()
        };
        let kept = places(device, "kept activations", &kept_slabs);
        let offloaded_host = places(host, "offloaded activations", &offloaded_slabs);
        let slot = offloaded_slabs.iter().map(|slab| slab.slab.size_bytes).max().unwrap_or(0);
        let ring = if slot == 0 { 0 } else { decided.activation_ring };
        let activation_ring = Ring::take(device, kind, "activations in transit", slot, ring);

        let kind = TensorKind::LayerInputs;
        let blocks = &lowering.blocks;
        let storages: Vec<Option<Storage>> =
            (0..blocks.count()).map(|block| lowering.input_storage(decided, block)).collect();
        let input_places = |arena: &mut Arena, name: &str, wanted: Storage| {
            let place = |(block, storage): (usize, &Option<Storage>)| {
                let bytes = blocks.seams[block].slab.size_bytes;
                let bytes = if *storage == Some(wanted) { bytes } else { 0 };
                GroupPlaces::take(arena, kind, name, bytes, group)
            };
            storages.iter().enumerate().map(place).collect::<Vec<_>>()
        };
        let inputs_kept = input_places(device, "kept layer inputs", Storage::Keep);
        let inputs_host = input_places(host, "offloaded layer inputs", Storage::Offload);
        // Inputs that are not kept go through the ring, besides the inputs of a group; in an evaluation
        // all do.
        let comes_back = |block: usize| storages[block] == Some(Storage::Offload);
        let any_comes_back = (0..blocks.count()).any(comes_back);
        let extra = if any_comes_back { decided.input_ring } else { 0 };
        let gradient_name = "gradients of layer inputs";
        let slot = blocks.seam_bytes_max(|_| true);
        // The gradient of the last block's input has a slot of its own, since that input is still read. The next one takes
        // the first slot of the ring, and so on in turn.
        let shared = (decided.seams == SeamMemory::Shared).then_some(device.size_bytes);
        if shared.is_some() {
            Ring::take(device, kind, gradient_name, slot, 1);
        }
        let input_slots_taken = usize::from(shared.is_some());
        let input_ring =
            Ring::take(device, kind, "layer inputs in transit", slot, group + 1 + extra);
        let storages: Vec<Storage> = storages.iter().map(|s| s.unwrap_or(Storage::Keep)).collect();
        let stretch = longest_stretch(&storages);
        let slot = blocks.seam_bytes_max(|block| storages[block] == Storage::Recompute);
        let slots = (stretch - 1) * group;
        let replayed = Ring::take(device, kind, "recomputed layer inputs", slot, slots);
        let carry_ring = match shared {
            Some(start) => Ring { start, slots: 2, ..input_ring },
            None => {
                let slot = blocks.seam_bytes_max(|block| blocks.is_reached(block));
                Ring::take(device, kind, gradient_name, slot, group + 1)
            }
        };
        let skips = (blocks.skips.iter())
            .map(|skip| {
                let bytes = skip.tensor.size_bytes();
                let gradient = if blocks.is_reached(skip.to.0) { bytes } else { 0 };
                let mut take = |bytes| device.take(kind, "skip connections", bytes);
                (0..group).map(|_| (take(bytes), take(gradient))).collect()
            })
            .collect();
        let bytes = lowering.shared.exports.bytes;
        let exports = GroupPlaces::take(device, TensorKind::Inputs, "tables", bytes, group);
        GroupLayout {
            kept,
            kept_slabs,
            offloaded_slabs,
            offloaded_host,
            activation_ring,
            inputs_kept,
            inputs_host,
            input_ring,
            input_slots_taken,
            replayed,
            carry_ring,
            skips,
            exports,
        }
    }
}

/// The most blocks in a row of which only the first has its input at hand.
pub(crate) fn longest_stretch(inputs: &[Storage]) -> usize {
    let mut longest = 1;
    let mut length = 0;
    for &storage in inputs {
        length = if storage == Storage::Recompute { length + 1 } else { 1 };
        longest = longest.max(length);
    }
    longest
}

/// Places of all parameters, their gradients and their state, by stage.
struct Parameters {
    weights: Vec<ClassPlaces>,
    gradients: Vec<ClassPlaces>,
    states: Vec<ClassPlaces>,
    sums: Vec<ClassPlaces>,
    group_sums: Vec<ClassPlaces>,
}

fn place_parameters(
    lowering: &Lowering<'_>,
    decisions: &Decisions,
    cut: &Cut,
    device: &mut Arena,
    host: &mut Arena,
) -> Parameters {
    let shares = decisions.rings == RingMemory::Shared;
    let mut places = Parameters {
        weights: Vec::new(),
        gradients: Vec::new(),
        states: Vec::new(),
        sums: Vec::new(),
        group_sums: Vec::new(),
    };
    for (stage, s) in lowering.task.program().stages().iter().enumerate() {
        let (slabs, decided) = (&cut.stages[stage], &decisions.stages[stage]);
        let gradients_last =
            decisions.update != UpdateTime::InBackward || lowering.sets[stage].makes_parts();
        // Bytes of a block's slot, and of its place in host memory.
        let mut class = |kind: TensorKind, sizes: (usize, usize), streaming: Streaming, apart| {
            let name = match device.names {
                Names::Given => format!("{} of {}", kind.name(), s.name),
                Names::Left => String::new(),
            };
            let (slot_bytes, host_bytes) = sizes;
            let pinned = device.take(kind, &name, slot_bytes * streaming.pinned);
            let ring = match apart {
                true => 0,
                false => device.take(kind, &name, slot_bytes * streaming.ring),
            };
            let away = match kind {
                TensorKind::Gradients if !gradients_last => 0,
                // Their blocks may differ, see `place_weights` and `place_states`.
                TensorKind::Weights | TensorKind::OptimizerState => 0,
                _ => s.repeat - streaming.pinned,
            };
            let host = host.take(kind, &name, host_bytes * away);
            ClassPlaces { streaming, pinned, ring, host, slot_bytes, host_bytes }
        };
        let alike = |slab: &Slab| (slab.size_bytes, slab.size_bytes);
        let (kind, sizes) = (TensorKind::Weights, alike(&slabs.weights));
        places.weights.push(class(kind, sizes, decided.weights, shares));
        let on_host = lowering.gradients_on_host(decisions, slabs).size_bytes;
        let (kind, sizes) = (TensorKind::Gradients, (slabs.gradients.size_bytes, on_host));
        places.gradients.push(class(kind, sizes, decided.gradients, shares));
        let (kind, sizes) = (TensorKind::OptimizerState, alike(&slabs.states));
        let streaming = Streaming { pinned: decided.states_pinned, ring: 0 };
        places.states.push(class(kind, sizes, streaming, true));
        let (kind, sizes) = (TensorKind::Gradients, alike(&slabs.sums));
        let streaming = Streaming { pinned: decided.gradients.pinned, ring: 0 };
        places.sums.push(class(kind, sizes, streaming, true));
        let sizes = if lowering.task.keeps_group_sums() { sizes } else { (0, 0) };
        places.group_sums.push(class(kind, sizes, streaming, true));
    }
    if shares {
        // Rings lie over each other, except for those that a block needs at once: its weights, its
        // gradients, and the weights of other stages that it reads.
        let mut end = 0;
        let base = device.size_bytes;
        for stage in 0..places.weights.len() {
            let others =
                lowering.blocks.weight_owners[stage].iter().filter(|&&other| other != stage);
            let taken = others.map(|&other| {
                let owned = &places.weights[other];
                if owned.streaming.ring > 0 { owned.ring + owned.ring_bytes() } else { base }
            });
            let start = taken.max().unwrap_or(base);
            places.weights[stage].ring = start;
            let gradients = start + places.weights[stage].ring_bytes();
            places.gradients[stage].ring = gradients;
            end = end.max(gradients + places.gradients[stage].ring_bytes() - base);
        }
        device.take(TensorKind::Weights, "shared rings of weights and gradients", end);
    }
    places
}

/// The partial sums of squares of the gradients of all blocks.
fn place_squares(
    lowering: &Lowering<'_>,
    decisions: &Decisions,
    cut: &Cut,
    device: &mut Arena,
) -> Vec<Vec<SquarePlaces>> {
    if !lowering.task.rank.is_shared() {
        return Vec::new();
    }
    let (kind, name) = (TensorKind::Inputs, "inputs and scalars");
    let mut blocks = Vec::new();
    for block in 0..lowering.blocks.count() {
        let stage = lowering.blocks.get(block).stage;
        let set = &lowering.sets[stage];
        let mut places = Vec::new();
        for (t, parameter) in set.trainable().enumerate() {
            let elements = set.parameters[parameter].tensor.shape.elements();
            let whole = device.take(kind, name, partials_bytes(elements));
            let pieces = (0..cut.stages[stage].gradients.entries[t].pieces.len()).map(|piece| {
                let first = piece * decisions.piece_elements;
                let size = decisions.piece_elements.min(elements - first);
                device.take(kind, name, partials_bytes(size))
            });
            places.push(SquarePlaces { whole, pieces: pieces.collect() });
        }
        blocks.push(places);
    }
    blocks
}

/// How many kinds of a block's state are on disk.
pub(super) fn kinds_on_disk(
    lowering: &Lowering<'_>,
    decisions: &Decisions,
    stage: usize,
    index: usize,
) -> usize {
    let decided = &decisions.stages[stage];
    let wanted = decided.on_disk.get(index).copied().unwrap_or(0);
    match index < decided.states_pinned {
        true => 0,
        false => wanted.min(lowering.sets[stage].kinds().len()),
    }
}

/// The slots that state on disk passes through: at most one for every two updates with such state. With more, the disk
/// would save little memory.
fn place_disk_ring(
    lowering: &Lowering<'_>,
    decisions: &Decisions,
    cut: &Cut,
    host: &mut Arena,
) -> Ring {
    let (mut slot_bytes, mut updates) = (0, 0);
    for (stage, decided) in decisions.stages.iter().enumerate() {
        for index in 0..decided.on_disk.len() {
            let kinds = kinds_on_disk(lowering, decisions, stage, index);
            let homes = &cut.homes[stage][kinds];
            slot_bytes = slot_bytes.max(homes.slot_bytes);
            updates += (0..homes.groups.len()).filter(|&group| homes.reads_disk(group)).count();
        }
    }
    let slots = decisions.disk_ring.min(updates.div_ceil(2));
    Ring::take(
        host,
        TensorKind::OptimizerState,
        "optimizer state on its way to disk",
        slot_bytes,
        slots,
    )
}

/// The slots that frozen weights on disk pass through: at most one for every two of their copies.
fn place_frozen_ring(
    lowering: &Lowering<'_>,
    decisions: &Decisions,
    cut: &Cut,
    host: &mut Arena,
) -> Ring {
    let (mut slot_bytes, mut copies) = (0, 0);
    for (stage, decided) in decisions.stages.iter().enumerate() {
        let blocks = 0..decided.frozen_on_disk.len();
        let there = |&index: &usize| is_frozen_on_disk(lowering, decisions, stage, index);
        let count = blocks.filter(there).count();
        if count > 0 {
            slot_bytes = slot_bytes.max(cut.frozen[stage].slot_bytes);
            copies += count * cut.frozen[stage].on_disk.len();
        }
    }
    let slots = decisions.frozen_ring.min(copies.div_ceil(2));
    Ring::take(
        host,
        TensorKind::Weights,
        "frozen weights on their way from disk",
        slot_bytes,
        slots,
    )
}

/// Where the weights of blocks that are not pinned are.
fn place_weights(
    lowering: &Lowering<'_>,
    decisions: &Decisions,
    cut: &Cut,
    host: &mut Arena,
    disk: &mut Arena,
) -> Vec<Vec<WeightHome>> {
    let kind = TensorKind::Weights;
    let mut stages = Vec::new();
    for (stage, s) in lowering.task.program().stages().iter().enumerate() {
        let name = match host.names {
            Names::Given => format!("{} of {}", kind.name(), s.name),
            Names::Left => String::new(),
        };
        let mut homes = vec![WeightHome::default(); s.repeat];
        let pinned = decisions.stages[stage].weights.pinned;
        for (index, home) in homes.iter_mut().enumerate().skip(pinned) {
            let bytes = cut.stages[stage].weights.size_bytes;
            *home = match is_frozen_on_disk(lowering, decisions, stage, index) {
                true => WeightHome {
                    host: host.take(kind, &name, cut.frozen[stage].host_bytes),
                    disk: Some(disk.take(kind, &name, cut.frozen[stage].disk_bytes)),
                },
                false => WeightHome { host: host.take(kind, &name, bytes), disk: None },
            };
        }
        stages.push(homes);
    }
    stages
}

/// Where the state of blocks that are not pinned is.
fn place_states(
    lowering: &Lowering<'_>,
    decisions: &Decisions,
    cut: &Cut,
    host: &mut Arena,
    disk: &mut Arena,
) -> Vec<Vec<StateHome>> {
    let mut stages = Vec::new();
    for (stage, s) in lowering.task.program().stages().iter().enumerate() {
        let name = match host.names {
            Names::Given => format!("{} of {}", TensorKind::OptimizerState.name(), s.name),
            Names::Left => String::new(),
        };
        let mut homes = vec![StateHome::default(); s.repeat];
        let pinned = decisions.stages[stage].states_pinned;
        for (index, home) in homes.iter_mut().enumerate().skip(pinned) {
            let kinds_on_disk = kinds_on_disk(lowering, decisions, stage, index);
            let Homes { host_bytes, disk_bytes, .. } = cut.homes[stage][kinds_on_disk];
            let kind = TensorKind::OptimizerState;
            *home = StateHome {
                host: host.take(kind, &name, host_bytes),
                disk: disk.take(kind, &name, disk_bytes),
                kinds_on_disk,
            };
        }
        stages.push(homes);
    }
    stages
}

fn place_inputs(
    lowering: &Lowering<'_>,
    group: usize,
    device: &mut Arena,
    host: &mut Arena,
) -> Vec<InputPlaces> {
    let kind = TensorKind::Inputs;
    let places = |input: &(Arc<Tensor>, bool)| {
        let (tensor, per_micro_batch) = input;
        let count = if *per_micro_batch { group } else { 1 };
        let bytes = tensor.size_bytes();
        InputPlaces {
            count,
            device: GroupPlaces::take(device, kind, "inputs and scalars", bytes, count),
            host: GroupPlaces::take(host, kind, "inputs and results", bytes, count),
            tensor: Arc::clone(tensor),
            per_micro_batch: *per_micro_batch,
            is_fetched: lowering.is_fetched(input),
        }
    };
    lowering.shared.inputs.iter().map(places).collect()
}

/// The tensors of each block that are stored in this way. Blocks that store the same share a slab.
fn activation_slabs(
    lowering: &Lowering<'_>,
    group: &GroupDecisions,
    wanted: Storage,
) -> Vec<Arc<ActivationSlab>> {
    let mut slabs: Vec<Arc<ActivationSlab>> = Vec::new();
    let mut last = None;
    for (stage, saved) in lowering.each_block(group) {
        let slab = match slabs.last() {
            Some(slab) if last == Some((stage, saved)) => Arc::clone(slab),
            _ => activation_slab(lowering, stage, saved, wanted),
        };
        slabs.push(slab);
        last = Some((stage, saved));
    }
    slabs
}

fn activation_slab(
    lowering: &Lowering<'_>,
    stage: usize,
    saved: &[Storage],
    wanted: Storage,
) -> Arc<ActivationSlab> {
    let key = (stage, saved.iter().map(|&storage| storage == wanted).collect::<Vec<bool>>());
    // The map is whole even if a thread panicked while it held the lock.
    let known = lowering.slabs.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(slab) = known.get(&key) {
        return Arc::clone(slab);
    }
    drop(known);
    let graph = &lowering.task.program().section(stage).graph;
    let mut slab = ActivationSlab::default();
    for (unit, _) in key.1.iter().enumerate().filter(|&(_, &is_wanted)| is_wanted) {
        for &id in &lowering.units[stage][unit].tensors {
            slab.slab.push(graph.tensor(id).size_bytes(), COPY_BYTES_MAX);
            slab.tensors.push((unit, id));
        }
    }
    let mut known = lowering.slabs.write().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(known.entry(key).or_insert_with(|| Arc::new(slab)))
}

/// The largest need of any pass for temporaries.
fn work_bytes(lowering: &Lowering<'_>, decisions: &Decisions) -> usize {
    let mut bytes = 0;
    let mut last = None;
    for stage in 0..decisions.stages.len() {
        for variant in [lowering.forward_variant(stage), lowering.unreached_variant(stage)] {
            bytes = bytes.max(variant.forward.size_bytes);
        }
    }
    for (stage, saved) in decisions.groups.iter().flat_map(|group| lowering.each_block(group)) {
        // Neighbors mostly store the same.
        if lowering.task.training.is_none() || last == Some((stage, saved)) {
            continue;
        }
        last = Some((stage, saved));
        for variant in lowering.training_variants(stage, saved) {
            bytes = bytes.max(variant.forward.size_bytes).max(variant.backward.size_bytes);
        }
    }
    let Some(training) = &lowering.task.training else { return bytes };
    if lowering.task.rank.is_shared() {
        // The sum of a piece that does not last until another lane, that of its group, and the sum of squares of a piece.
        let sums = 1 + usize::from(lowering.task.lane_groups > 1);
        bytes = bytes.max(sums * aligned(decisions.piece_elements * DType::F32.size_bytes()));
    }
    let nodes = 0..training.norm.nodes().len();
    nodes.map(|node| scratch_bytes(&training.norm, node)).fold(bytes, usize::max)
}
