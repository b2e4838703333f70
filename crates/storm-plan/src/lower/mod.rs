//! Lowers decisions to instructions: which node runs when, at which addresses, and what is copied when.
//!
//! Nothing is decided here. The group size fixes the order of compute, copies are issued as soon as
//! their destination is free, and waits follow from the bytes that instructions touch.

mod activations;
mod bind;
mod blocks;
mod communication;
mod disk;
mod emit;
mod exchange;
mod flow;
mod frozen;
mod homes;
mod lanes;
mod layout;
mod norm;
mod parameters;
mod persistent;
mod residency;
mod shards;
mod shared;
mod sketch;
mod slab;
mod streams;
mod update;
mod values;
mod variant;
mod waits;

use crate::decisions::SeamMemory;
use crate::plan::Plan;
use crate::{
    Decisions, GroupDecisions, HardwareProfile, Link, Links, PerTier, PlanError, SavedStorage,
    SavedUnit, Storage, Task, UpdateTime,
};
use blocks::Blocks;
pub(crate) use communication::Communication;
pub use homes::DISK_BLOCK_BYTES;
use layout::ActivationSlab;
use parameters::{Set, SetSlabs};
use shared::{Cut, Shared};
pub(crate) use sketch::{Estimate, Sketch};
use slab::Slab;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use storm_graph::{Block, Graph, Op, Phase, SUM_BLOCK, Section, Tensor, TensorId, recompute};
use variant::Variant;

/// A block in the first micro-batch of a step, and in the others.
type Pair = [Arc<Variant>; 2];

/// Slabs of saved tensors, by stage and by the units they contain.
type Slabs = HashMap<(usize, Vec<bool>), Arc<ActivationSlab>>;

/// The smallest pieces that the planner chooses.
const PIECE_ELEMENTS_MIN: usize = 1 << 16;

/// Bytes of one block of a stage, and of its input in one micro-batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) input: usize,
    pub(crate) weights: usize,
    pub(crate) gradients: usize,
    pub(crate) states: usize,
    /// Of the weights, those that do not learn.
    pub(crate) frozen: usize,
    /// Of lanes, if a step has several.
    pub(crate) sums: usize,
}

/// Graphs of updates by rule, first element, size and time of the update.
type UpdateGraphs = HashMap<(usize, usize, usize, UpdateTime), Arc<Graph>>;

/// A task, with everything that all of its plans share.
pub struct Lowering<'a> {
    pub(crate) task: &'a Task,
    pub(crate) profile: &'a HardwareProfile,
    pub(crate) blocks: Blocks,
    /// By stage.
    pub(crate) units: Vec<Vec<SavedUnit>>,
    sets: Vec<Set>,
    shared: Shared,
    /// For plans to share.
    norm: Option<Arc<Graph>>,
    /// Updates of pieces, by rule, first element, size and time.
    update_graphs: RwLock<UpdateGraphs>,
    /// Nodes of the norm graph, by the gradient whose squares they sum.
    squares: HashMap<String, usize>,
    /// By elements of a piece.
    cuts: RwLock<BTreeMap<usize, Arc<Cut>>>,
    /// By stage, and by which units the backward pass need not recompute.
    training_variants: RwLock<BTreeMap<(usize, Vec<bool>), Pair>>,
    /// For plans to share.
    slabs: RwLock<Slabs>,
    /// Seconds that a block of a stage recomputes, by the units that are available.
    recompute_times: RwLock<BTreeMap<(usize, Vec<bool>), f64>>,
    /// By stage: with running statistics left unchanged, and updated.
    forward_variants: Vec<[OnceLock<Arc<Variant>>; 2]>,
}

impl<'a> Lowering<'a> {
    /// Looks at the task once.
    ///
    /// # Errors
    /// A program whose blocks do not connect as plans require, or hardware without a link between host
    /// and device.
    pub fn new(task: &'a Task, profile: &'a HardwareProfile) -> Result<Lowering<'a>, PlanError> {
        check_task(task)?;
        for link in Links::default().iter() {
            if profile.find_link(link).is_none() {
                return Err(PlanError::NoLink { hardware: profile.name.clone(), link });
            }
        }
        let blocks = Blocks::new(task)?;
        let stages = task.program().stages().len();
        Ok(Lowering {
            task,
            profile,
            units: (0..stages).map(|stage| task.saved_units(stage)).collect(),
            sets: Set::all(task)?,
            shared: Shared::new(task, &blocks),
            norm: task.training.as_ref().map(|training| Arc::new(training.norm.clone())),
            update_graphs: RwLock::default(),
            squares: task.training.as_ref().map(|t| squares(&t.norm)).unwrap_or_default(),
            cuts: RwLock::default(),
            training_variants: RwLock::default(),
            slabs: RwLock::default(),
            recompute_times: RwLock::default(),
            forward_variants: vec![[const { OnceLock::new() }; 2]; stages],
            blocks,
        })
    }

    /// The plan that follows from the decisions, not yet checked.
    ///
    /// # Errors
    /// Decisions that contradict each other.
    pub fn lower(&self, decisions: &Decisions) -> Result<Plan, PlanError> {
        self.lowered(decisions, flow::Besides::Flush)
    }

    /// [`Lowering::lower`], with a segment that evaluates the model between steps.
    ///
    /// # Errors
    /// As [`Lowering::lower`].
    pub fn lower_with_evaluation(&self, decisions: &Decisions) -> Result<Plan, PlanError> {
        self.lowered(decisions, flow::Besides::FlushAndEvaluation)
    }

    /// The step alone, to find out how long it takes.
    pub(crate) fn lower_step(&self, decisions: &Decisions) -> Result<Plan, PlanError> {
        self.lowered(decisions, flow::Besides::Nothing)
    }

    fn lowered(&self, decisions: &Decisions, besides: flow::Besides) -> Result<Plan, PlanError> {
        self.check(decisions)?;
        let mut plan = flow::emit(self, decisions, besides);
        waits::add_waits(&mut plan);
        Ok(plan)
    }

    /// Whether other ranks take part in the steps.
    pub(crate) fn shares_step(&self) -> bool {
        self.task.training.is_some() && self.task.rank.is_shared()
    }

    /// Whether steps fetch data.
    pub(crate) fn fetches(&self) -> bool {
        self.shared.inputs.iter().any(|input| self.is_fetched(input))
    }

    /// Whether a step fetches an input; otherwise the host writes it.
    fn is_fetched(&self, (tensor, per_micro_batch): &(Arc<Tensor>, bool)) -> bool {
        let trains = self.task.training.is_some();
        trains && *per_micro_batch && self.task.data.contains(&tensor.name)
    }

    /// About how long a step of these decisions takes, without building its plan.
    ///
    /// # Errors
    /// As [`Lowering::lower`].
    pub fn estimate_seconds(&self, decisions: &Decisions) -> Result<f64, PlanError> {
        self.check(decisions)?;
        let sketch = Sketch::new(self, decisions.piece_elements);
        Ok(sketch.step_seconds(decisions, &layout::Layout::new(self, decisions)).seconds)
    }

    /// Bytes that the plan of these decisions takes.
    ///
    /// # Errors
    /// As [`Lowering::lower`].
    pub fn memory(&self, decisions: &Decisions) -> Result<PerTier<usize>, PlanError> {
        self.check(decisions)?;
        Ok(layout::Layout::without_names(self, decisions).bytes())
    }

    /// Where everything lies under these decisions.
    ///
    /// # Errors
    /// As [`Lowering::lower`].
    pub(crate) fn layout(&self, decisions: &Decisions) -> Result<layout::Layout, PlanError> {
        self.check(decisions)?;
        Ok(layout::Layout::without_names(self, decisions))
    }

    /// What lies where under these decisions.
    pub(crate) fn regions(&self, decisions: &Decisions) -> Vec<crate::Region> {
        let layout = layout::Layout::new(self, decisions);
        layout.regions().cloned().collect()
    }

    /// A block of a training step, for a set of units available to its backward pass. In the last stage
    /// the forward and backward pass are one.
    pub(crate) fn training_variants(&self, stage: usize, storage: &[Storage]) -> Pair {
        let at_hand: Vec<bool> = storage.iter().map(|&s| s != Storage::Recompute).collect();
        let key = (stage, at_hand);
        // The map is consistent even if a thread panicked while holding the lock.
        let known = self.training_variants.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(pair) = known.get(&key) {
            return pair.clone();
        }
        drop(known);
        let kept = self.tensors_at_hand(stage, &key.1);
        let training = self.training();
        let is_last = stage + 1 == self.units.len();
        let pair = [&training.start, &training.proceed].map(|program| {
            let mut section = program.section(stage).clone();
            if !is_last {
                recompute_without(&mut section, &kept);
            }
            let elsewhere = places_of_their_own(&section, kept.iter().copied());
            let pass = if is_last { variant::Passes::Joined } else { variant::Passes::Apart };
            let running = variant::Running::Change;
            let elsewhere = |id| elsewhere.contains(&id);
            Arc::new(Variant::new(section, pass, running, self.profile, elsewhere))
        });
        // Two threads may have built it at the same time; keep one, since plans tell variants apart by
        // address.
        let mut known = self.training_variants.write().unwrap_or_else(PoisonError::into_inner);
        known.entry(key).or_insert(pair).clone()
    }

    /// The forward pass of a block that saves nothing, as in an evaluation.
    pub(crate) fn forward_variant(&self, stage: usize) -> Arc<Variant> {
        self.forward_only(stage, variant::Running::Leave)
    }

    /// The forward pass in a training step of a block that the backward pass does not reach.
    pub(crate) fn unreached_variant(&self, stage: usize) -> Arc<Variant> {
        match self.sets[stage].changing.is_empty() {
            true => self.forward_variant(stage),
            false => self.forward_only(stage, variant::Running::Change),
        }
    }

    fn forward_only(&self, stage: usize, running: variant::Running) -> Arc<Variant> {
        let make = || {
            let section = self.task.forward.section(stage).clone();
            let elsewhere = places_of_their_own(&section, []);
            let (passes, elsewhere) = (variant::Passes::Apart, |id| elsewhere.contains(&id));
            Arc::new(Variant::new(section, passes, running, self.profile, elsewhere))
        };
        let position = usize::from(running == variant::Running::Change);
        self.forward_variants[stage][position].get_or_init(make).clone()
    }

    fn tensors_at_hand(&self, stage: usize, at_hand: &[bool]) -> BTreeSet<TensorId> {
        let units = self.units[stage].iter().zip(at_hand).filter(|&(_, &at_hand)| at_hand);
        units.flat_map(|(unit, _)| unit.tensors.iter().copied()).collect()
    }

    /// Stage and saved units of each block.
    pub(crate) fn each_block<'d>(
        &'d self,
        group: &'d GroupDecisions,
    ) -> impl Iterator<Item = (usize, &'d SavedStorage)> + 'd {
        (0..self.blocks.count()).map(|block| {
            let Block { stage, index } = self.blocks.get(block);
            (stage, &group.stages[stage].saved[index])
        })
    }

    /// What happens to a block's input between its forward and its backward pass; none if the two are
    /// one, or there is no backward pass.
    pub(crate) fn input_storage(&self, group: &GroupDecisions, block: usize) -> Option<Storage> {
        let Block { stage, index } = self.blocks.get(block);
        let is_stored = self.blocks.is_reached(block) && block != self.blocks.last();
        is_stored.then(|| group.stages[stage].inputs[index])
    }

    /// The graphs of a training step.
    fn training(&self) -> &'a crate::TrainingGraphs {
        self.task.training.as_ref().expect("asked for by a training step")
    }

    /// The graph that updates a piece of a parameter.
    fn update_graph(
        &self,
        rule: usize,
        (first, size): (usize, usize),
        update: UpdateTime,
    ) -> Arc<Graph> {
        let key = (rule, first, size, update);
        let known = self.update_graphs.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(graph) = known.get(&key) {
            return Arc::clone(graph);
        }
        drop(known);
        let graph = self.training().updates[rule].piece(first, size, update);
        let graph = Arc::new(graph.expect("checked when the lowering was made"));
        let mut known = self.update_graphs.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(key).or_insert(graph))
    }

    /// The node of the norm that sums the squares of a gradient.
    fn squares_node(&self, gradient: &str) -> usize {
        let node = self.squares.get(gradient);
        *node.unwrap_or_else(|| unreachable!("the norm misses `{gradient}`"))
    }

    /// Whether anything goes through the ring of optimizer state.
    fn needs_state_ring(&self, decisions: &Decisions) -> bool {
        let mut stages = self.task.program().stages().iter().zip(&decisions.stages).zip(&self.sets);
        stages.any(|((stage, decided), set)| {
            let adds = set.makes_parts() || (self.task.lanes > 1 && set.trainable().count() > 0);
            let streams = decided.states_pinned < stage.repeat && !set.kinds().is_empty();
            streams || (adds && decided.gradients.pinned < stage.repeat)
        })
    }

    /// The gradients of a stage's block as host memory has them. Between the groups of a lane they are sums so far of all pieces.
    /// If a lane is one group, only what a complete lane leaves there is needed.
    fn gradients_on_host<'s>(&self, decisions: &Decisions, slabs: &'s SetSlabs) -> &'s Slab {
        let groups: usize = decisions.groups.iter().map(|group| group.times).sum();
        match groups > 1 {
            true => &slabs.gradients,
            false => &slabs.complete_gradients,
        }
    }

    /// Whether any optimizer state is on disk.
    fn has_state_on_disk(&self, decisions: &Decisions) -> bool {
        let mut stages = decisions.stages.iter().enumerate();
        stages.any(|(stage, decided)| {
            let mut blocks = 0..decided.on_disk.len();
            blocks.any(|index| layout::kinds_on_disk(self, decisions, stage, index) > 0)
        })
    }

    /// Whether any frozen weights are.
    fn has_frozen_on_disk(&self, decisions: &Decisions) -> bool {
        let mut stages = decisions.stages.iter().enumerate();
        stages.any(|(stage, decided)| {
            let mut blocks = 0..decided.frozen_on_disk.len();
            blocks.any(|index| frozen::is_frozen_on_disk(self, decisions, stage, index))
        })
    }

    /// Whether any weights do not learn.
    pub(crate) fn has_frozen(&self) -> bool {
        self.sets.iter().any(Set::has_frozen)
    }

    /// What a copy of frozen weights has in a slot on its way from the disk, at most.
    pub(crate) fn frozen_slot_bytes(&self) -> usize {
        let cut = self.cut(self.piece_elements());
        cut.frozen.iter().map(|homes| homes.slot_bytes).max().unwrap_or(0)
    }

    /// How many kinds of optimizer state there are.
    pub(crate) fn state_kinds(&self) -> usize {
        self.sets.iter().map(|set| set.kinds().len()).max().unwrap_or(0)
    }

    /// What an update has in a slot on its way from the disk, at most, if this many kinds of its state are there.
    pub(crate) fn disk_slot_bytes(&self, kinds_on_disk: usize) -> usize {
        let cut = self.cut(self.piece_elements());
        let of_stage =
            |homes: &Vec<homes::Homes>| homes[kinds_on_disk.min(homes.len() - 1)].slot_bytes;
        cut.homes.iter().map(of_stage).max().unwrap_or(0)
    }

    /// Sizes of a stage's blocks that all plans share.
    pub(crate) fn sizes(&self, stage: usize) -> Sizes {
        let cut = self.cut(crate::PIECE_ELEMENTS);
        let slabs = &cut.stages[stage];
        let blocks = 0..self.task.program().stages()[stage].repeat;
        let seams = blocks.map(|index| self.blocks.number(stage, index));
        let input = seams.map(|block| self.blocks.seams[block].slab.size_bytes).max();
        Sizes {
            input: input.unwrap_or(0),
            weights: slabs.weights.size_bytes,
            gradients: slabs.gradients.size_bytes,
            states: slabs.states.size_bytes,
            frozen: cut.frozen[stage].disk_bytes,
            sums: slabs.sums.size_bytes,
        }
    }

    /// A piece size, a power of two. It divides a block of the largest repeated stage into several
    /// pieces, so copies and updates of a block overlap, but it is not so small that copies are slow.
    pub(crate) fn piece_elements(&self) -> usize {
        let stages = self.task.program().stages().iter().zip(&self.sets);
        let elements =
            |set: &Set| -> usize { set.parameters.iter().map(|p| p.tensor.shape.elements()).sum() };
        let largest = stages.max_by_key(|(stage, set)| stage.repeat * elements(set));
        let elements = largest.map_or(0, |(_, set)| elements(set));
        let elements = elements / self.task.rank.ranks as usize;
        (elements / 8).next_power_of_two().clamp(PIECE_ELEMENTS_MIN, crate::PIECE_ELEMENTS)
    }

    /// Seconds and matrix FLOPs of recomputation in a step.
    pub(crate) fn recomputed(&self, decisions: &Decisions) -> (f64, f64) {
        let (mut seconds, mut flops) = (0.0, 0.0);
        if self.task.training.is_none() {
            return (seconds, flops);
        }
        for group in &decisions.groups {
            let times = (group.micro_batches * group.times * self.task.lanes) as f64;
            let mut end = self.blocks.last();
            for block in (0..self.blocks.last()).rev() {
                let Block { stage, index } = self.blocks.get(block);
                let [_, variant] = self.training_variants(stage, &group.stages[stage].saved[index]);
                seconds += times * variant.backward.recompute_seconds;
                flops += times * variant.backward.recompute_flops as f64;
                if block + 1 < end {
                    // All but the last block of a stretch are rerun for the inputs of the next.
                    let forward = &self.forward_variant(stage).forward;
                    seconds += times * forward.seconds;
                    flops += times * forward.flops as f64;
                }
                if self.input_storage(group, block) != Some(Storage::Recompute) {
                    end = block;
                }
            }
        }
        (seconds, flops)
    }

    /// Seconds of recomputation in the backward pass of a stage's block if only these units are
    /// available.
    pub(crate) fn recompute_seconds(&self, stage: usize, at_hand: &[bool]) -> f64 {
        let known = self.recompute_times.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&seconds) = known.get(&(stage, at_hand.to_vec())) {
            return seconds;
        }
        drop(known);
        let seconds = self.timed_recompute(stage, at_hand);
        let mut known = self.recompute_times.write().unwrap_or_else(PoisonError::into_inner);
        *known.entry((stage, at_hand.to_vec())).or_insert(seconds)
    }

    fn timed_recompute(&self, stage: usize, at_hand: &[bool]) -> f64 {
        if self.units[stage].is_empty() {
            return 0.0;
        }
        let mut section = self.task.program().section(stage).clone();
        let with_all = variant::backward_seconds(&section.graph, self.profile);
        recompute_without(&mut section, &self.tensors_at_hand(stage, at_hand));
        variant::backward_seconds(&section.graph, self.profile) - with_all
    }

    fn check(&self, decisions: &Decisions) -> Result<(), PlanError> {
        let refuse = |problem: String| Err(PlanError::Decisions { problem });
        let mut micro_batches = 0usize;
        for group in &decisions.groups {
            if group.micro_batches == 0 || group.times == 0 {
                return refuse("a group needs at least one micro-batch".to_owned());
            }
            let some = group.micro_batches.saturating_mul(group.times);
            micro_batches = micro_batches.saturating_add(some);
        }
        let wanted = self.task.lane_micro_batches();
        if micro_batches != wanted {
            let whole = if self.task.lanes > 1 { "a lane" } else { "the step" };
            return refuse(format!(
                "the groups have {micro_batches} micro-batches, {whole} has {wanted}"
            ));
        }
        let stages = self.task.program().stages();
        if decisions.stages.len() != stages.len() {
            let count = decisions.stages.len();
            return refuse(format!("{count} stages are decided, of {}", stages.len()));
        }
        for (stage, decided) in stages.iter().zip(&decisions.stages) {
            let (name, blocks) = (&stage.name, stage.repeat);
            let classes = [("weights", decided.weights), ("gradients", decided.gradients)];
            for (class, streaming) in classes {
                if streaming.pinned > blocks || (streaming.pinned < blocks && streaming.ring == 0) {
                    return refuse(format!(
                        "streamed {class} of `{name}` need a ring of at least one block"
                    ));
                }
            }
            if decided.states_pinned > blocks {
                return refuse(format!("`{name}` has only {blocks} blocks to keep state of"));
            }
        }
        let on_disk = [
            ("state", self.has_state_on_disk(decisions), decisions.disk_ring),
            ("frozen weights", self.has_frozen_on_disk(decisions), decisions.frozen_ring),
        ];
        for (what, _, ring) in on_disk.into_iter().filter(|&(_, is_there, _)| is_there) {
            if self.profile.find_link(Link::DISK_TO_HOST).is_none() {
                let (hardware, link) = (self.profile.name.clone(), Link::DISK_TO_HOST);
                return Err(PlanError::NoLink { hardware, link });
            }
            if ring == 0 {
                return refuse(format!("{what} on disk: a ring of at least one slot is needed"));
            }
        }
        if decisions.state_ring == 0 && self.needs_state_ring(decisions) {
            return refuse(
                "streamed optimizer state needs a ring of at least one piece".to_owned(),
            );
        }
        decisions.groups.iter().try_for_each(|group| self.check_group(group))?;
        if decisions.update == UpdateTime::InBackward
            && let Some(problem) = self.task.in_backward_problem(decisions.groups[0].micro_batches)
        {
            return refuse(problem);
        }
        let pieces = decisions.piece_elements;
        let alignment = self.task.piece_alignment();
        if !pieces.is_multiple_of(alignment) || pieces == 0 {
            return refuse(format!("pieces must be a multiple of {alignment} elements"));
        }
        if self.shares_step() {
            if !pieces.is_multiple_of(SUM_BLOCK) {
                return refuse(format!(
                    "pieces that ranks own must be a multiple of {SUM_BLOCK} elements, so that sums of squares do not depend on the ranks"
                ));
            }
            if self.has_state_on_disk(decisions) {
                return refuse("ranks that share a step keep no state on disk".to_owned());
            }
        }
        Ok(())
    }

    fn check_group(&self, group: &GroupDecisions) -> Result<(), PlanError> {
        let refuse = |problem: String| Err(PlanError::Decisions { problem });
        let stages = self.task.program().stages();
        if group.stages.len() != stages.len() {
            let count = group.stages.len();
            return refuse(format!("a group decides {count} stages, of {}", stages.len()));
        }
        for (number, (stage, decided)) in stages.iter().zip(&group.stages).enumerate() {
            let (name, blocks, units) = (&stage.name, stage.repeat, self.units[number].len());
            if decided.saved.len() != blocks
                || decided.inputs.len() != blocks
                || decided.saved.iter().any(|saved| saved.len() != units)
            {
                return refuse(format!(
                    "the {blocks} blocks of `{name}` need an input and {units} saved tensors each"
                ));
            }
        }
        if group.seams == SeamMemory::Shared && group.micro_batches > 1 {
            return refuse("gradients share memory with inputs in groups of one".to_owned());
        }
        let saved = group.stages.iter().flat_map(|stage| stage.saved.iter().flatten());
        if group.activation_ring == 0 && saved.copied().any(|s| s == Storage::Offload) {
            return refuse("offloaded activations need a ring of at least one block".to_owned());
        }
        let reached = (0..self.blocks.count()).find(|&block| self.blocks.is_reached(block));
        if let Some(first) = reached
            && first > 0
            && self.input_storage(group, first) == Some(Storage::Recompute)
        {
            return refuse("the input of the first block that learns must be stored".to_owned());
        }
        if self.input_storage(group, 0) == Some(Storage::Recompute) {
            return refuse("the first block has no input to recompute".to_owned());
        }
        Ok(())
    }
}

/// The nodes that sum squares, by the name of what they sum.
fn squares(norm: &Graph) -> HashMap<String, usize> {
    let mut found = HashMap::new();
    for (index, node) in norm.nodes().iter().enumerate() {
        if let Op::SumOfSquares { x } = node.op {
            found.insert(norm.tensor(x).name.clone(), index);
        }
    }
    found
}

/// What a block computes that outlives it whatever is decided.
fn lasting(section: &Section) -> Vec<TensorId> {
    let carried = section.carried_out.iter().map(|carried| carried.tensor);
    carried.chain(section.exports.iter().map(|&(_, id)| id)).collect()
}

/// Makes the backward pass of a block recompute whatever is neither kept nor outlives the block.
fn recompute_without(section: &mut Section, kept: &BTreeSet<TensorId>) {
    let (lasting, results) = (lasting(section), section.handed_out());
    recompute(&mut section.graph, &results, |id| kept.contains(&id) || lasting.contains(&id));
}

/// Tensors of a section that are not temporaries: what comes from outside, what is passed on, and what
/// is stored for the backward pass.
fn places_of_their_own(
    section: &Section,
    kept: impl IntoIterator<Item = TensorId>,
) -> BTreeSet<TensorId> {
    let graph = &section.graph;
    let mut own: BTreeSet<TensorId> =
        graph.ids().filter(|&id| graph.producer(id).is_none()).collect();
    own.extend(section.handed_out());
    own.extend(kept);
    own
}

/// Checks what lowering assumes.
fn check_task(task: &Task) -> Result<(), PlanError> {
    let refuse = |problem: String| Err(PlanError::Task { problem });
    if task.micro_batches == 0 {
        return refuse("a step needs at least one micro-batch".to_owned());
    }
    if task.lanes == 0 || !task.micro_batches.is_multiple_of(task.lanes) {
        let (count, lanes) = (task.micro_batches, task.lanes);
        return refuse(format!("{count} micro-batches cannot be divided into {lanes} lanes"));
    }
    let rank = task.rank;
    if rank.rank >= rank.ranks {
        return refuse(format!("there is no rank {} of {}", rank.rank, rank.ranks));
    }
    let (lanes, groups) = (task.lanes * rank.ranks as usize, task.lane_groups);
    if groups == 0 || !lanes.is_multiple_of(groups) {
        return refuse(format!("{lanes} lanes cannot be divided into {groups} groups"));
    }
    let machine = rank.machine as usize;
    for on_one in [rank.machine, rank.relay] {
        if on_one == 0 || !rank.ranks.is_multiple_of(on_one) {
            let ranks = rank.ranks;
            return refuse(format!("{ranks} ranks cannot be spread over machines of {on_one}"));
        }
    }
    if rank.has_levels() && task.group_lanes() != machine {
        return refuse(format!(
            "machines of {machine} ranks cannot add up groups of {} lanes by themselves",
            task.group_lanes()
        ));
    }
    let stages = task.forward.stages();
    let exports = |stage: usize| !task.forward.section(stage).exports.is_empty();
    if let Some(stage) = (0..stages.len()).find(|&s| stages[s].repeat > 1 && exports(s)) {
        return refuse(format!("`{}` repeats, so it cannot export", stages[stage].name));
    }
    let Some(training) = &task.training else { return Ok(()) };
    if let Some(cache) = task.forward.caches().first() {
        let name = &cache.name;
        return refuse(format!(
            "`{name}` is kept from one run to the next, and a training step may run a block again"
        ));
    }
    for program in [&training.start, &training.proceed] {
        if program.stages().last().is_some_and(|stage| stage.repeat != 1) {
            return refuse("the last stage makes the loss and must not repeat".to_owned());
        }
        for section in program.templates() {
            let Some(backward) = &section.backward else { continue };
            let graph = &section.graph;
            let reads = |id: TensorId| {
                graph.nodes().iter().any(|node| {
                    node.phase != Phase::Forward
                        && node.op.operands().iter().any(|&(_, operand)| operand == id)
                })
            };
            if let Some(carried) = section.carried_out.iter().find(|c| reads(c.tensor)) {
                let (name, carried) = (&section.name, &carried.name);
                return refuse(format!(
                    "the backward pass of `{name}` reads `{carried}`, which it handed on"
                ));
            }
            let passed_through =
                |id: &Option<TensorId>| id.is_some_and(|id| graph.producer(id).is_none());
            let position = backward.carried_in_gradients.iter().position(passed_through);
            if let Some(position) = position {
                let (name, carried) = (&section.name, &section.carried_in[position].name);
                return refuse(format!(
                    "`{name}` passes the gradient of `{carried}` through unchanged"
                ));
            }
        }
    }
    Ok(())
}
