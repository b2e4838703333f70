//! From decisions to instructions: which node runs when, at which addresses, and what moves when.
//!
//! Nothing is decided here. The order of compute is fixed by the group size; copies are given out as
//! early as the memory they go to is free; who waits for whom follows from the bytes they touch.

mod emit;
mod flow;
mod layout;
mod parameters;
mod shared;
mod slab;
mod update;
mod variant;
mod waits;

use crate::plan::Plan;
use crate::{Decisions, HardwareProfile, PlanError, SavedUnit, Storage, Task};
use parameters::Parameters;
use shared::{Cut, Shared};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock};
use storm_graph::{Section, TensorId, recompute};
use variant::Variant;

/// A section for the first micro-batch of a step, and for the others.
type Pair = [Arc<Variant>; 2];

/// The smallest pieces that a planner chooses by itself.
const PIECE_ELEMENTS_MIN: usize = 1 << 16;

/// Bytes of one layer, of one micro-batch's layer input, and of the ends.
pub(crate) struct Sizes {
    pub(crate) boundary: usize,
    pub(crate) layer_weights: usize,
    pub(crate) layer_gradients: usize,
    pub(crate) layer_states: usize,
    pub(crate) edge_states: usize,
}

/// A task, with what all of its plans share.
pub struct Lowering<'a> {
    pub(crate) task: &'a Task,
    pub(crate) profile: &'a HardwareProfile,
    pub(crate) units: Vec<SavedUnit>,
    parameters: Parameters,
    shared: Shared,
    /// By elements of a piece.
    cuts: RwLock<BTreeMap<usize, Arc<Cut>>>,
    prologue: Pair,
    epilogue: Pair,
    /// By which units the backward pass does not make again.
    layers: RwLock<BTreeMap<Vec<bool>, Pair>>,
}

impl<'a> Lowering<'a> {
    /// Looks at the task once.
    ///
    /// # Errors
    /// A program whose sections do not meet in the way that plans need.
    pub fn new(task: &'a Task, profile: &'a HardwareProfile) -> Result<Lowering<'a>, PlanError> {
        check_task(task)?;
        let both = |pick: fn(&storm_graph::Program) -> &Section, joined: bool| -> Pair {
            [&task.start, &task.proceed].map(|program| {
                let section = pick(program).clone();
                let elsewhere = places_of_their_own(&section, section.graph.saved());
                let elsewhere = if joined { places_of_their_own(&section, []) } else { elsewhere };
                Arc::new(Variant::new(section, joined, profile, |id| elsewhere.contains(&id)))
            })
        };
        Ok(Lowering {
            task,
            profile,
            units: task.saved_units(),
            parameters: Parameters::new(task)?,
            shared: Shared::new(task),
            cuts: RwLock::default(),
            prologue: both(|program| &program.prologue, false),
            epilogue: both(|program| &program.epilogue, true),
            layers: RwLock::default(),
        })
    }

    /// The plan that follows from the decisions, not yet checked.
    ///
    /// # Errors
    /// Decisions that contradict each other.
    pub fn lower(&self, decisions: &Decisions) -> Result<Plan, PlanError> {
        self.check(decisions)?;
        let mut plan = flow::emit(self, decisions);
        waits::add_waits(&mut plan);
        Ok(plan)
    }

    /// Bytes of device and host memory that the plan of these decisions takes.
    ///
    /// # Errors
    /// As [`Lowering::lower`].
    pub fn memory(&self, decisions: &Decisions) -> Result<(usize, usize), PlanError> {
        self.check(decisions)?;
        let layout = layout::Layout::new(self, decisions);
        Ok((layout.device.size_bytes, layout.host.size_bytes))
    }

    /// The layer for a choice of what its backward pass finds at hand.
    pub(crate) fn layer(&self, storage: &[Storage]) -> Pair {
        let at_hand: Vec<bool> = storage.iter().map(|&s| s != Storage::Recompute).collect();
        // Nothing is left half-done in the map, whoever panicked.
        let known = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(pair) = known.get(&at_hand) {
            return pair.clone();
        }
        drop(known);
        let kept: BTreeSet<TensorId> = (self.units.iter().zip(&at_hand))
            .filter(|&(_, &at_hand)| at_hand)
            .flat_map(|(unit, _)| unit.tensors.iter().copied())
            .collect();
        let pair = [&self.task.start, &self.task.proceed].map(|program| {
            let mut section = program.layer.clone();
            let lasting = section.carried_out.clone();
            recompute(&mut section.graph, |id| kept.contains(&id) || lasting.contains(&id));
            let elsewhere = places_of_their_own(&section, kept.iter().copied());
            Arc::new(Variant::new(section, false, self.profile, |id| elsewhere.contains(&id)))
        });
        // Two may have made it at the same time: plans tell variants apart by address.
        let mut known = self.layers.write().unwrap_or_else(PoisonError::into_inner);
        known.entry(at_hand).or_insert(pair).clone()
    }

    /// What lies where under these decisions.
    pub(crate) fn regions(&self, decisions: &Decisions) -> Vec<crate::Region> {
        let layout = layout::Layout::new(self, decisions);
        layout.device.regions.into_iter().chain(layout.host.regions).collect()
    }

    /// Sizes that all plans share.
    pub(crate) fn sizes(&self) -> Sizes {
        let cut = self.cut(crate::PIECE_ELEMENTS);
        let Cut { layer, edge, .. } = &*cut;
        let section = &self.task.proceed.layer;
        Sizes {
            boundary: section.graph.tensor(section.carried_in[0]).size_bytes(),
            layer_weights: layer.weights.size_bytes,
            layer_gradients: layer.gradients.size_bytes,
            layer_states: layer.states.size_bytes,
            edge_states: edge.states.size_bytes,
        }
    }

    /// A size of pieces that cuts a layer into several, so that copies and updates of a layer
    /// overlap, and is not so small that copies are slow: a power of two.
    pub(crate) fn piece_elements(&self) -> usize {
        let layer = &self.parameters.layer.parameters;
        let elements: usize = layer.iter().map(|p| p.tensor.shape.elements()).sum();
        (elements / 8).next_power_of_two().clamp(PIECE_ELEMENTS_MIN, crate::PIECE_ELEMENTS)
    }

    /// Prologue and epilogue of one micro-batch.
    pub(crate) fn edge_seconds(&self) -> f64 {
        let [_, prologue] = &self.prologue;
        let [_, epilogue] = &self.epilogue;
        prologue.forward.seconds + prologue.backward.seconds + epilogue.backward.seconds
    }

    /// Seconds and matrix arithmetic of what a step makes again.
    pub(crate) fn made_again(&self, decisions: &Decisions) -> (f64, f64) {
        let (mut seconds, mut flops) = (0.0, 0.0);
        let times = self.task.micro_batches as f64;
        let mut end = decisions.boundary.len();
        for (layer, saved) in decisions.saved.iter().enumerate().rev() {
            let [_, variant] = self.layer(saved);
            seconds += times * variant.backward.again_seconds;
            flops += times * variant.backward.again_flops as f64;
            if decisions.boundary[layer] != Storage::Recompute {
                // All but the last layer of the stretch run again for the inputs of the next.
                let again = (end - layer - 1) as f64 * times;
                seconds += again * variant.forward.seconds;
                flops += again * variant.forward.flops as f64;
                end = layer;
            }
        }
        (seconds, flops)
    }

    /// What a layer's backward pass makes again if only these units are at hand.
    pub(crate) fn again_seconds(&self, at_hand: &[bool]) -> f64 {
        let kept: BTreeSet<TensorId> = (self.units.iter().zip(at_hand))
            .filter(|&(_, &at_hand)| at_hand)
            .flat_map(|(unit, _)| unit.tensors.iter().copied())
            .collect();
        let mut graph = self.task.proceed.layer.graph.clone();
        let nodes = graph.nodes().len();
        recompute(&mut graph, |id| kept.contains(&id));
        if graph.nodes().len() == nodes {
            return 0.0;
        }
        let again = graph.nodes().iter().filter(|node| node.name.ends_with(".again"));
        let seconds = |node: &storm_graph::Node| {
            let op = node.op.clone().map(|_, id| graph.tensor(id));
            let outputs: Vec<_> = node.outputs.iter().map(|&id| graph.tensor(id)).collect();
            self.profile.op_seconds(&op, &outputs)
        };
        again.map(seconds).sum()
    }

    fn check(&self, decisions: &Decisions) -> Result<(), PlanError> {
        let refuse = |problem: String| Err(PlanError::Decisions { problem });
        let (layers, group) = (self.task.layer_count(), decisions.group);
        if group == 0 || !self.task.micro_batches.is_multiple_of(group) {
            return refuse(format!(
                "groups of {group} do not divide {} micro-batches",
                self.task.micro_batches
            ));
        }
        if group > 1 && self.task.is_tied() {
            return refuse(
                "micro-batches cannot be grouped where embedding and head share a parameter: the \
                 order of its gradient's sum would change"
                    .to_owned(),
            );
        }
        let units = self.units.len();
        if decisions.saved.len() != layers
            || decisions.boundary.len() != layers
            || decisions.saved.iter().any(|saved| saved.len() != units)
        {
            return refuse(format!("{layers} layers of {units} saved tensors need one each"));
        }
        if decisions.boundary.first() == Some(&Storage::Recompute) {
            return refuse("the input of the first layer cannot be made again".to_owned());
        }
        for (class, streaming) in
            [("weights", decisions.weights), ("gradients", decisions.gradients)]
        {
            if streaming.pinned > layers || (streaming.pinned < layers && streaming.ring == 0) {
                return refuse(format!("streamed {class} need a ring of at least one layer"));
            }
        }
        let states = decisions.states;
        let all_pinned = states.pinned == layers && decisions.edge_states_resident;
        if states.pinned > layers || (!all_pinned && states.ring == 0) {
            return refuse(
                "streamed optimizer state needs a ring of at least one piece".to_owned(),
            );
        }
        let offloads = |saved: &Vec<Storage>| saved.contains(&Storage::Offload);
        if decisions.activation_ring == 0 && decisions.saved.iter().any(offloads) {
            return refuse("offloaded activations need a ring of at least one layer".to_owned());
        }
        if !decisions.piece_elements.is_multiple_of(1024) || decisions.piece_elements == 0 {
            return refuse("pieces must be a multiple of 1024 elements".to_owned());
        }
        Ok(())
    }
}

/// Tensors of a section that are not temporaries: what comes from outside, what is handed on, and
/// what waits for the backward pass.
fn places_of_their_own(
    section: &Section,
    kept: impl IntoIterator<Item = TensorId>,
) -> BTreeSet<TensorId> {
    let graph = &section.graph;
    let mut own: BTreeSet<TensorId> =
        graph.ids().filter(|&id| graph.producer(id).is_none()).collect();
    own.extend(&section.carried_out);
    own.extend(section.exports.iter().map(|&(_, id)| id));
    own.extend(section.results.iter().map(|&(_, id)| id));
    if let Some(backward) = &section.backward {
        own.extend(&backward.carried_in_gradients);
        own.extend(backward.parameters.iter().map(|p| p.gradient));
    }
    own.extend(kept);
    own
}

/// What lowering relies on.
fn check_task(task: &Task) -> Result<(), PlanError> {
    let refuse = |problem: String| Err(PlanError::Task { problem });
    if task.micro_batches == 0 {
        return refuse("a step needs at least one micro-batch".to_owned());
    }
    for program in [&task.start, &task.proceed] {
        for section in program.sections() {
            let Some(backward) = &section.backward else {
                return refuse(format!("`{}` has no backward pass to plan", section.name));
            };
            let graph = &section.graph;
            let reads = |id: TensorId| {
                graph.nodes().iter().any(|node| {
                    node.phase == storm_graph::Phase::Backward
                        && node.op.operands().iter().any(|&(_, operand)| operand == id)
                })
            };
            if let Some(&id) = section.carried_out.iter().find(|&&id| reads(id)) {
                let name = &graph.tensor(id).name;
                return refuse(format!("`{}` reads what it handed on, `{name}`", section.name));
            }
            let made = |id: &TensorId| graph.producer(*id).is_some();
            if !backward.carried_in_gradients.iter().all(made) {
                return refuse(format!("`{}` passes a gradient through unchanged", section.name));
            }
        }
        if program.layer.carried_in.len() != 1 {
            return refuse("layers must hand on exactly one tensor".to_owned());
        }
    }
    Ok(())
}
