//! The values of everything that is not a temporary.

use super::Lowering;
use super::emit::Pieces;
use super::layout::{ActivationSlab, Layout};
use super::shards::partials_bytes;
use super::slab::Slab;
use crate::Decisions;
use crate::collective::received_name;
use crate::plan::{Plan, Value, ValueId};
use std::collections::BTreeMap;
use std::sync::Arc;
use storm_graph::{Block, Tensor, TensorClass};

pub(super) struct Values {
    /// By input and micro-batch.
    pub(super) inputs: Vec<Vec<ValueId>>,
    pub(super) scalars: BTreeMap<String, ValueId>,
    /// By result and micro-batch.
    pub(super) results: Vec<Vec<ValueId>>,
    /// By block and slab entry.
    pub(super) weights: Vec<Vec<Pieces>>,
    pub(super) gradients: Vec<Vec<Pieces>>,
    pub(super) sums: Vec<Vec<Pieces>>,
    /// Empty if lanes have no groups.
    pub(super) group_sums: Vec<Vec<Pieces>>,
    pub(super) states: Vec<Vec<Pieces>>,
    /// What other ranks send of gradients, by block.
    pub(super) received: Vec<ReceivedValues>,
    /// Partial sums of squares, by block and trainable parameter; empty if one rank makes the step.
    pub(super) squares: Vec<Vec<Pieces>>,
    /// By block and index among what it changes in place.
    pub(super) changing: Vec<Vec<ValueId>>,
    /// By decided group.
    pub(super) saved: Vec<SavedValues>,
    /// What blocks receive from the block before, by block, micro-batch and slab entry.
    pub(super) seams: Vec<Vec<Vec<Pieces>>>,
    /// Their gradients.
    pub(super) carries: Vec<Vec<Vec<ValueId>>>,
    /// A tensor that bypasses blocks, and its gradient, by skip and micro-batch.
    pub(super) skips: Vec<Vec<(ValueId, ValueId)>>,
    pub(super) exports: Vec<BTreeMap<String, ValueId>>,
}

/// What a block's gradients become on the way to their owners, by trainable parameter and piece; none where this rank has no part.
#[derive(Default)]
pub(super) struct ReceivedValues {
    /// What other ranks of the machine send, by number among these.
    pub(super) lanes: Vec<Vec<Option<Pieces>>>,
    /// The sum of the machine, if the exchange has two levels.
    pub(super) machine: Vec<Vec<Option<Pieces>>>,
    /// What other machines send, by number among these.
    pub(super) sums: Vec<Vec<Option<Pieces>>>,
}

/// Saved tensors of a group, by block, micro-batch and slab entry.
pub(super) struct SavedValues {
    pub(super) kept: Vec<Vec<Vec<Pieces>>>,
    pub(super) offloaded: Vec<Vec<Vec<Pieces>>>,
}

pub(super) fn push_value(
    plan: &mut Plan,
    name: String,
    size_bytes: usize,
    class: TensorClass,
) -> ValueId {
    plan.values.push(Value { name, size_bytes, class });
    ValueId(plan.values.len() as u32 - 1)
}

fn push_pieces(plan: &mut Plan, name: &str, sizes: &[usize], class: TensorClass) -> Pieces {
    let first = ValueId(plan.values.len() as u32);
    for (index, &size) in sizes.iter().enumerate() {
        let name =
            if sizes.len() == 1 { name.to_owned() } else { format!("{name} (part {index})") };
        push_value(plan, name, size, class);
    }
    Pieces { first, count: sizes.len() as u32 }
}

impl Values {
    pub(super) fn new(
        plan: &mut Plan,
        lowering: &Lowering<'_>,
        decisions: &Decisions,
        layout: &Layout,
    ) -> Values {
        let group = decisions.group_max();
        let f32_bytes = 4;
        let activation = TensorClass::Activation;
        let mut inputs = Vec::new();
        for input in &layout.inputs {
            let (bytes, name) = (input.tensor.size_bytes(), &input.tensor.name);
            let value = |m| push_value(plan, numbered(name, m), bytes, TensorClass::Input);
            inputs.push((0..input.count).map(value).collect());
        }
        let scalars = (lowering.shared.scalars.keys())
            .map(|name| (name.clone(), push_value(plan, name.clone(), f32_bytes, activation)))
            .collect();
        let mut results = Vec::new();
        for result in &lowering.shared.results {
            let (bytes, name) = (result.tensor.size_bytes(), &result.tensor.name);
            let value = |m| push_value(plan, numbered(name, m), bytes, activation);
            results.push((0..group).map(value).collect());
        }
        let mut values = Values {
            inputs,
            scalars,
            results,
            weights: Vec::new(),
            gradients: Vec::new(),
            sums: Vec::new(),
            group_sums: Vec::new(),
            states: Vec::new(),
            received: Vec::new(),
            squares: Vec::new(),
            changing: Vec::new(),
            saved: Vec::new(),
            seams: Vec::new(),
            carries: Vec::new(),
            skips: Vec::new(),
            exports: Vec::new(),
        };
        for block in 0..lowering.blocks.count() {
            values.push_parameters(plan, lowering, layout, block);
        }
        if lowering.task.rank.is_shared() {
            for block in 0..lowering.blocks.count() {
                values.push_of_ranks(plan, lowering, decisions, layout, block);
            }
            values.name_own(plan);
        }
        for block in 0..lowering.blocks.count() {
            values.push_seams(plan, lowering, block, group);
        }
        for (decided, places) in decisions.groups.iter().zip(&layout.groups) {
            let mut of_slabs = |slabs: &[Arc<ActivationSlab>]| -> Vec<_> {
                let blocks = slabs.iter().enumerate();
                blocks
                    .map(|(block, slab)| {
                        saved_values(plan, lowering, block, slab, decided.micro_batches)
                    })
                    .collect()
            };
            values.saved.push(SavedValues {
                kept: of_slabs(&places.kept_slabs),
                offloaded: of_slabs(&places.offloaded_slabs),
            });
        }
        for skip in &lowering.blocks.skips {
            let (bytes, name) = (skip.tensor.size_bytes(), &skip.tensor.name);
            let mut value = |name: String| push_value(plan, name, bytes, activation);
            let mut pair =
                |m| (value(numbered(name, m)), value(numbered(&format!("{name}.grad"), m)));
            values.skips.push((0..group).map(&mut pair).collect());
        }
        for m in 0..group {
            let mut exports = BTreeMap::new();
            for section in lowering.task.program().templates() {
                for (name, id) in &section.exports {
                    let bytes = section.graph.tensor(*id).size_bytes();
                    let value = push_value(plan, numbered(name, m), bytes, activation);
                    exports.insert(name.clone(), value);
                }
            }
            values.exports.push(exports);
        }
        values
    }

    fn push_parameters(
        &mut self,
        plan: &mut Plan,
        lowering: &Lowering<'_>,
        layout: &Layout,
        number: usize,
    ) {
        let block = lowering.blocks.get(number);
        let program = lowering.task.program();
        let full = |name: &str| program.stages()[block.stage].full_name(block.index, name);
        let (set, slabs) = (&lowering.sets[block.stage], &layout.cut.stages[block.stage]);
        let mut weights = Vec::new();
        for (parameter, entry) in set.parameters.iter().zip(&slabs.weights.entries) {
            let name = full(&parameter.tensor.name);
            weights.push(push_pieces(plan, &name, &entry.pieces, parameter.tensor.class));
        }
        let mut gradients = Vec::new();
        for (gradient, entry) in set.gradients.iter().zip(&slabs.gradients.entries) {
            let name = program.gradient_name(block, &gradient.name);
            gradients.push(push_pieces(plan, &name, &entry.pieces, TensorClass::Gradient));
        }
        let mut sums = Vec::new();
        for (gradient, entry) in set.gradients.iter().zip(&slabs.sums.entries) {
            let name = format!("{}.lanes", program.gradient_name(block, &gradient.name));
            sums.push(push_pieces(plan, &name, &entry.pieces, TensorClass::Gradient));
        }
        let mut group_sums = Vec::new();
        let has_groups = lowering.task.lane_groups > 1;
        for (gradient, entry) in set.gradients.iter().zip(&slabs.sums.entries) {
            if has_groups && !lowering.task.rank.has_levels() {
                let name = format!("{}.group", program.gradient_name(block, &gradient.name));
                let class = TensorClass::Gradient;
                group_sums.push(push_pieces(plan, &name, &entry.pieces, class));
            }
        }
        let mut states = Vec::new();
        let mut entries = slabs.states.entries.iter();
        for kind in set.kinds() {
            for (parameter, entry) in set.trainable().zip(&mut entries) {
                let name = full(&set.parameters[parameter].tensor.name);
                let name = format!("{name}.{kind}");
                let class = TensorClass::OptimizerState;
                states.push(push_pieces(plan, &name, &entry.pieces, class));
            }
        }
        let statistic = |tensor: &Tensor| {
            push_value(plan, full(&tensor.name), tensor.size_bytes(), tensor.class)
        };
        self.changing.push(set.changing.iter().map(statistic).collect());
        self.weights.push(weights);
        self.gradients.push(gradients);
        self.sums.push(sums);
        self.group_sums.push(group_sums);
        self.states.push(states);
    }

    /// What a block has because others share the step.
    fn push_of_ranks(
        &mut self,
        plan: &mut Plan,
        lowering: &Lowering<'_>,
        decisions: &Decisions,
        layout: &Layout,
        number: usize,
    ) {
        let block = lowering.blocks.get(number);
        let set = &lowering.sets[block.stage];
        let (slabs, shards) = (&layout.cut.stages[block.stage], &layout.cut.shards);
        let (mut received, mut squares) = (ReceivedValues::default(), Vec::new());
        let place = shards.place;
        for (t, parameter) in set.trainable().enumerate() {
            let pieces = &slabs.gradients.entries[t].pieces;
            let (mut lanes, mut machine, mut sums) = (Vec::new(), Vec::new(), Vec::new());
            for (piece, &bytes) in pieces.iter().enumerate() {
                let (adds, is_own) =
                    (shards.adds(block.stage, t, piece), shards.is_own(block.stage, t, piece));
                let gradient = self.gradients[number][t].piece(piece);
                let name = plan.value(gradient).name.clone();
                let mut push = |names: Vec<String>, bytes: usize| {
                    let first = ValueId(plan.values.len() as u32);
                    let count = names.len() as u32;
                    for name in names {
                        push_value(plan, name, bytes, TensorClass::Gradient);
                    }
                    Pieces { first, count }
                };
                let others = |members: &mut dyn Iterator<Item = u32>, name: &str| {
                    let others = members.filter(|&other| other != place.rank);
                    others.map(|from| received_name(name, from)).collect()
                };
                lanes.push(adds.then(|| push(others(&mut place.in_machine(), &name), bytes)));
                let has_sum = adds && place.has_levels();
                let sum_bytes = bytes / set.gradients[t].dtype.size_bytes() * size_of::<f32>();
                let name = format!("{name}.machine");
                machine.push(has_sum.then(|| push(vec![name.clone()], sum_bytes)));
                sums.push(is_own.then(|| push(others(&mut place.peers(), &name), sum_bytes)));
            }
            received.lanes.push(lanes);
            received.machine.push(machine);
            received.sums.push(sums);
            let elements = set.parameters[parameter].tensor.shape.elements();
            let size = |piece: usize| {
                let first = piece * decisions.piece_elements;
                partials_bytes(decisions.piece_elements.min(elements - first))
            };
            let sizes: Vec<usize> = (0..pieces.len()).map(size).collect();
            let name = lowering.task.program().gradient_name(block, &set.gradients[t].name);
            let name = format!("{name}.partial_squares");
            squares.push(push_pieces(plan, &name, &sizes, TensorClass::Activation));
        }
        self.received.push(received);
        self.squares.push(squares);
    }

    /// Lists what no other rank has.
    fn name_own(&self, plan: &mut Plan) {
        let kept = self.sums.iter().chain(&self.group_sums).chain(&self.states).flatten().copied();
        let parts = |values: &'_ ReceivedValues| {
            let all = [&values.lanes, &values.machine, &values.sums];
            all.into_iter().flatten().flatten().flatten().copied().collect::<Vec<_>>()
        };
        let received = self.received.iter().flat_map(parts);
        let all = kept.chain(received);
        let mut own: Vec<ValueId> = all
            .flat_map(|pieces| (0..pieces.count as usize).map(move |at| pieces.piece(at)))
            .collect();
        own.sort_unstable();
        plan.own = own;
    }

    fn push_seams(
        &mut self,
        plan: &mut Plan,
        lowering: &Lowering<'_>,
        number: usize,
        group: usize,
    ) {
        let Block { stage, index } = lowering.blocks.get(number);
        let program = lowering.task.program();
        let (section, s) = (program.section(stage), &program.stages()[stage]);
        let class = TensorClass::Activation;
        let seam = &lowering.blocks.seams[number];
        let slab: &Slab = &seam.slab;
        let name = |input: usize, m: usize, suffix: &str| {
            let carried = &section.carried_in[input].name;
            numbered(&s.full_name(index, &format!("input.{carried}{suffix}")), m)
        };
        let entries = || seam.tensors.iter().zip(&slab.entries);
        let (mut seams, mut carries) = (Vec::new(), Vec::new());
        for m in 0..group {
            let pieces = |(&(input, _), entry): (&(usize, usize), &super::slab::Entry)| {
                push_pieces(plan, &name(input, m, ""), &entry.pieces, class)
            };
            seams.push(entries().map(pieces).collect());
            let carry = |(&(input, _), entry): (&(usize, usize), &super::slab::Entry)| {
                push_value(plan, name(input, m, ".grad"), entry.size_bytes, class)
            };
            carries.push(entries().map(carry).collect());
        }
        self.seams.push(seams);
        self.carries.push(carries);
    }
}

/// The tensors of a block's slab, by micro-batch.
fn saved_values(
    plan: &mut Plan,
    lowering: &Lowering<'_>,
    number: usize,
    slab: &ActivationSlab,
    group: usize,
) -> Vec<Vec<Pieces>> {
    let Block { stage, index } = lowering.blocks.get(number);
    let program = lowering.task.program();
    let (section, s) = (program.section(stage), &program.stages()[stage]);
    let of_micro_batch = |m| {
        let mut pieces = Vec::new();
        for (&(_, id), entry) in slab.tensors.iter().zip(&slab.slab.entries) {
            let name = numbered(&s.full_name(index, &section.graph.tensor(id).name), m);
            pieces.push(push_pieces(plan, &name, &entry.pieces, TensorClass::Activation));
        }
        pieces
    };
    (0..group).map(of_micro_batch).collect()
}

/// `name` of a micro-batch of the group.
fn numbered(name: &str, micro_batch: usize) -> String {
    format!("{name}[{micro_batch}]")
}
