//! The plan under construction: the instructions of the current segment, and the state of the rings.

use super::Lowering;
use super::disk::DiskSlots;
use super::flow::Exchanged;
use super::layout::{GroupLayout, Layout};
use super::residency::{Residency, Turns};
use super::slab::{COPY_BYTES_MAX, CopyRun};
use super::values::{SavedValues, Values};
use super::variant::{Memory, Pass, PassNode, Variant};
use crate::plan::{
    Compute, Copy, Fetch, GraphId, Instruction, InstructionId, Operand, Operands, Place, Plan,
    ReadAhead, Segment, SegmentId, ValueId, Work,
};
use crate::queue::Link;
use crate::tier::Tier;
use crate::{Collective, CollectiveKind, Decisions, GroupDecisions, Moved, TensorKind};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use storm_graph::{DType, Tensor, TensorId};

/// A tensor at an offset: one value or several consecutive ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub(super) offset: usize,
    pub(super) first: ValueId,
    pub(super) count: u32,
}

impl Bound {
    pub(super) fn one(offset: usize, value: ValueId) -> Bound {
        Bound { offset, first: value, count: 1 }
    }
}

/// Consecutive values: the pieces of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    pub(super) first: ValueId,
    pub(super) count: u32,
}

impl Pieces {
    pub(super) fn at(self, offset: usize) -> Bound {
        Bound { offset, first: self.first, count: self.count }
    }

    pub(super) fn piece(self, index: usize) -> ValueId {
        ValueId(self.first.0 + index as u32)
    }
}

/// What the host must know about a copy, once its index is known.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mark {
    None,
    Input(usize),
    Result(usize),
    Fetch,
}

/// The two ends of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    /// Of what.
    pub(super) kind: TensorKind,
    pub(super) device: usize,
    pub(super) host: usize,
}

impl Ends {
    fn at(self, tier: Tier) -> Place {
        let offset = if tier == Tier::DEVICE { self.device } else { self.host };
        Place { tier, offset }
    }

    pub(super) fn shifted(self, bytes: usize) -> Ends {
        Ends { device: self.device + bytes, host: self.host + bytes, ..self }
    }
}

pub(super) struct Emit<'a> {
    pub(super) lowering: &'a Lowering<'a>,
    pub(super) decisions: &'a Decisions,
    pub(super) layout: Layout,
    /// Which of the decided groups is being emitted.
    kind: usize,
    pub(super) plan: Plan,
    pub(super) values: Values,
    /// Graphs of updates, by stage, gradient and piece.
    pub(super) update_graphs: BTreeMap<(usize, usize, usize), GraphId>,
    /// Graphs that add parts of tied gradients, by elements.
    pub(super) fold_graphs: BTreeMap<(storm_graph::DType, usize), GraphId>,
    /// Graphs that add lanes, by dtype of the gradient and elements.
    pub(super) lane_graphs: BTreeMap<(storm_graph::DType, usize), GraphId>,
    pub(super) state_turns: Turns,
    pub(super) disk_slots: DiskSlots,
    pub(super) frozen_turns: Turns,
    pub(super) activation_turns: Turns,
    pub(super) input_turns: Turns,
    pub(super) residency: Residency,
    pub(super) norm_graph: GraphId,
    /// After how many kernels the weights and gradients of the block being updated may be fetched; none
    /// if they are on the device.
    pub(super) arriving: [Option<usize>; 2],
    /// Gradients that are on their way between ranks.
    pub(super) exchanged: Option<Exchanged>,
    /// The same, and the sums of machines were sent on.
    pub(super) exchanged_sums: Option<Exchanged>,
    pub(super) square_graphs: BTreeMap<(DType, usize), GraphId>,
    pub(super) partial_graphs: BTreeMap<usize, GraphId>,
    variants: Vec<(Arc<Variant>, GraphId)>,
    /// By graph and tensor.
    temporaries: Vec<Vec<Option<ValueId>>>,
    computes: Vec<Instruction>,
    /// Everything else, and after how many of the segment's kernels it is issued.
    copies: Vec<(usize, Instruction, Mark)>,
    /// Host memory written in this segment: by first byte, the end, and after how many kernels.
    host_written: BTreeMap<usize, (usize, usize)>,
}

impl<'a> Emit<'a> {
    pub(super) fn new(lowering: &'a Lowering<'a>, decisions: &'a Decisions) -> Emit<'a> {
        let layout = Layout::new(lowering, decisions);
        let mut plan = Plan {
            bytes: layout.bytes(),
            update: decisions.update,
            regions: layout.regions().cloned().collect(),
            rank: lowering.task.rank,
            ..Plan::default()
        };
        if layout.disk.size_bytes > 0 {
            plan.links = plan.links.and_between(Tier::HOST, Tier::DISK);
        }
        if lowering.fetches() {
            plan.links = plan.links.and_data();
        }
        if lowering.shares_step() {
            plan.links = plan.links.and_ranks();
        }
        let values = Values::new(&mut plan, lowering, decisions, &layout);
        plan.graphs.extend(lowering.norm.clone());
        Emit {
            lowering,
            decisions,
            residency: Residency::new(&layout),
            state_turns: Turns::new(layout.state_ring.slots),
            disk_slots: DiskSlots::new(lowering, decisions, &layout),
            frozen_turns: Turns::new(layout.frozen_ring.slots),
            activation_turns: Turns::new(0),
            input_turns: Turns::new(0),
            layout,
            kind: 0,
            plan,
            values,
            update_graphs: BTreeMap::new(),
            fold_graphs: BTreeMap::new(),
            lane_graphs: BTreeMap::new(),
            norm_graph: GraphId(0),
            arriving: [None, None],
            exchanged: None,
            exchanged_sums: None,
            square_graphs: BTreeMap::new(),
            partial_graphs: BTreeMap::new(),
            variants: Vec::new(),
            temporaries: Vec::new(),
            computes: Vec::new(),
            copies: Vec::new(),
            host_written: BTreeMap::new(),
        }
    }

    // ---- groups -------------------------------------------------------------------------------

    /// Switches to groups of this kind.
    pub(super) fn begin_group(&mut self, kind: usize) {
        self.kind = kind;
        let places = &self.layout.groups[kind];
        self.activation_turns = Turns::new(places.activation_ring.slots);
        self.input_turns = Turns::new(places.input_ring.slots);
    }

    /// Decisions about the groups being emitted.
    pub(super) fn decided(&self) -> &'a GroupDecisions {
        &self.decisions.groups[self.kind]
    }

    /// How many micro-batches such a group has.
    pub(super) fn group_size(&self) -> usize {
        self.decided().micro_batches
    }

    /// Where everything of such a group is.
    pub(super) fn places(&self) -> &GroupLayout {
        &self.layout.groups[self.kind]
    }

    /// Its saved tensors.
    pub(super) fn saved_values(&self) -> &SavedValues {
        &self.values.saved[self.kind]
    }

    // ---- segments -----------------------------------------------------------------------------

    /// How many kernels the segment has so far.
    pub(super) fn position(&self) -> usize {
        self.computes.len()
    }

    /// Moves the collected instructions into the plan: each copy right after the kernel before it.
    pub(super) fn end_segment(&mut self, name: &'static str) -> SegmentId {
        let start = self.plan.instructions.len();
        let mut copies: Vec<Option<_>> =
            std::mem::take(&mut self.copies).into_iter().map(Some).collect();
        let after = |copy: &Option<(usize, Instruction, Mark)>| copy.as_ref().map_or(0, |c| c.0);
        let mut order: Vec<(usize, usize)> =
            copies.iter().enumerate().map(|(index, copy)| (after(copy), index)).collect();
        order.sort_unstable();
        let mut order = order.into_iter().peekable();
        let computes = std::mem::take(&mut self.computes);
        let count = computes.len();
        let mut computes = computes.into_iter();
        for position in 0..=count {
            while let Some((_, index)) = order.next_if(|&(after, _)| after <= position) {
                let (_, copy, mark) = copies[index].take().expect("each is issued once");
                let id = InstructionId(self.plan.instructions.len() as u32);
                match mark {
                    Mark::None => {}
                    Mark::Input(index) => self.plan.inputs[index].copies.push(id),
                    Mark::Result(index) => self.plan.results[index].copies.push(id),
                    Mark::Fetch => {
                        let Work::Fetch(fetch) = &copy.work else { unreachable!("it is marked") };
                        for &input in &fetch.inputs {
                            self.plan.inputs[input as usize].fetches.push(id);
                        }
                    }
                }
                self.plan.instructions.push(copy);
            }
            self.plan.instructions.extend(computes.next());
        }
        self.host_written.clear();
        self.residency.begin_segment();
        self.disk_slots.begin_segment();
        for turns in [
            &mut self.state_turns,
            &mut self.frozen_turns,
            &mut self.activation_turns,
            &mut self.input_turns,
        ] {
            turns.begin_segment();
        }
        let instructions = start..self.plan.instructions.len();
        self.plan.segments.push(Segment { name, instructions });
        SegmentId(self.plan.segments.len() as u32 - 1)
    }

    // ---- kernels ------------------------------------------------------------------------------

    /// The number of a variant's graph.
    fn graph_of(&mut self, variant: &Arc<Variant>) -> GraphId {
        if let Some((_, id)) = self.variants.iter().find(|(known, _)| Arc::ptr_eq(known, variant)) {
            return *id;
        }
        let id = GraphId(self.plan.graphs.len() as u32);
        self.plan.graphs.push(Arc::clone(&variant.graph));
        self.variants.push((Arc::clone(variant), id));
        id
    }

    /// Emits the nodes of a pass. `bound` holds the tensors that are not temporaries; `after_each` is
    /// called with each node of the pass after it.
    pub(super) fn run_pass(
        &mut self,
        variant: &Arc<Variant>,
        pass: &Pass,
        index: usize,
        bound: &[Option<Bound>],
        mut after_each: impl FnMut(&mut Emit<'a>, &PassNode),
    ) {
        let graph = self.graph_of(variant);
        let work = self.layout.work;
        for node in &pass.nodes {
            let resolve = |emit: &mut Emit<'a>, id: TensorId| -> Bound {
                let root = variant.storage[id.index()];
                let place =
                    |id: TensorId| bound[id.index()].unwrap_or_else(|| unbound(variant, id)).offset;
                let temporary = pass.temporaries[root.index()];
                let offset = match temporary {
                    Some(Memory::Work(offset)) => work + offset,
                    Some(Memory::Gradient(gradient, offset)) => place(gradient) + offset,
                    None => place(root),
                };
                match bound[id.index()] {
                    Some(bound) if temporary.is_none() => bound,
                    _ => Bound::one(offset, emit.temporary(graph, variant, id)),
                }
            };
            let mut all = |ids: &[TensorId]| -> SmallVec<[Bound; 8]> {
                ids.iter().map(|&id| resolve(self, id)).collect()
            };
            let (reads, writes) = (all(&node.operands), all(&node.outputs));
            self.compute(graph, node.index, index, &reads, &writes);
            after_each(self, node);
        }
    }

    fn temporary(&mut self, graph: GraphId, variant: &Variant, id: TensorId) -> ValueId {
        self.value_of(graph, id, variant.section.graph.tensor(id))
    }

    /// The value of a scratch tensor of the norm graph.
    pub(super) fn norm_scratch(&mut self, tensor: &Tensor, id: TensorId) -> ValueId {
        self.value_of(self.norm_graph, id, tensor)
    }

    /// The value of an output of the only node of a graph.
    pub(super) fn graph_value(&mut self, graph: GraphId, output: usize) -> ValueId {
        let made = Arc::clone(&self.plan.graphs[graph.0 as usize]);
        let id = made.nodes()[0].outputs[output];
        self.value_of(graph, id, made.tensor(id))
    }

    /// The value of a tensor of a graph that is shared by all blocks.
    fn value_of(&mut self, graph: GraphId, id: TensorId, tensor: &Tensor) -> ValueId {
        let graph = graph.0 as usize;
        if self.temporaries.len() <= graph {
            self.temporaries.resize(graph + 1, Vec::new());
        }
        let of_graph = &mut self.temporaries[graph];
        if of_graph.len() <= id.index() {
            of_graph.resize(id.index() + 1, None);
        }
        let plan = &mut self.plan;
        *of_graph[id.index()].get_or_insert_with(|| {
            super::values::push_value(plan, tensor.name.clone(), tensor.size_bytes(), tensor.class)
        })
    }

    /// One kernel; `index` is the number of its block in its series, or of a parameter's among those that share an update.
    pub(super) fn compute(
        &mut self,
        graph: GraphId,
        node: u32,
        index: usize,
        reads: &[Bound],
        writes: &[Bound],
    ) {
        let places = reads.iter().chain(writes).map(|bound| bound.offset).collect();
        let operands = |bounds: &[Bound]| -> Operands {
            let mut operands = Operands::with_capacity(bounds.len());
            for bound in bounds {
                let mut offset = bound.offset;
                for index in 0..bound.count {
                    let value = ValueId(bound.first.0 + index);
                    operands.push(Operand { value, offset });
                    offset += self.plan.values[value.index()].size_bytes;
                }
            }
            operands
        };
        let (reads, writes) = (operands(reads), operands(writes));
        let layer = index as u16;
        let work = Work::Compute(Compute { graph, node, layer, places, reads, writes });
        self.computes.push(Instruction { work, waits: Vec::new() });
    }

    // ---- copies -------------------------------------------------------------------------------

    /// Copies bytes in, as soon as `after` kernels of the segment are issued and the copies that wrote
    /// them to host memory are, too. Returns after how many kernels that is.
    pub(super) fn copy_in(
        &mut self,
        after: usize,
        ends: Ends,
        run: &CopyRun,
        values: Operands,
    ) -> usize {
        let after = after.max(self.written_after(ends.host..ends.host + run.size_bytes));
        self.copy(after, Link::HOST_TO_DEVICE, ends, run.size_bytes, values, Mark::None);
        after
    }

    /// After how many kernels of the segment host memory was last written.
    fn written_after(&self, bytes: Range<usize>) -> usize {
        // Copies have this maximum size, so none that starts earlier reaches into the range.
        let first = bytes.start.saturating_sub(COPY_BYTES_MAX);
        let near = self.host_written.range(first..bytes.end);
        let overlapping = near.filter(|(_, (end, _))| *end > bytes.start);
        overlapping.map(|(_, &(_, after))| after).max().unwrap_or(0)
    }

    /// Copies bytes out, right after the last kernel so far.
    pub(super) fn copy_out(&mut self, ends: Ends, run: &CopyRun, values: Operands) {
        let after = self.position();
        self.host_written.insert(ends.host, (ends.host + run.size_bytes, after));
        self.copy(after, Link::DEVICE_TO_HOST, ends, run.size_bytes, values, Mark::None);
    }

    pub(super) fn copy(
        &mut self,
        after: usize,
        link: Link,
        ends: Ends,
        bytes: usize,
        values: Operands,
        mark: Mark,
    ) {
        let (from, to) = (ends.at(link.from), ends.at(link.to));
        let work = Work::Copy(Copy { from, to, bytes, values, kind: ends.kind });
        self.copies.push((after, Instruction { work, waits: Vec::new() }, mark));
    }

    /// Copies bytes from the disk to their slot, once `after` kernels of the segment are issued.
    pub(super) fn read_disk(
        &mut self,
        after: usize,
        kind: TensorKind,
        disk: usize,
        host: usize,
        bytes: usize,
        values: Operands,
    ) {
        self.host_written.insert(host, (host + bytes, after));
        let (from, to) =
            (Place { tier: Tier::DISK, offset: disk }, Place { tier: Tier::HOST, offset: host });
        self.copy_disk(after, kind, from, to, bytes, values);
    }

    /// Copies state from its slot to the disk, right after the last kernel so far.
    pub(super) fn write_disk(&mut self, disk: usize, host: usize, bytes: usize, values: Operands) {
        let (from, to) =
            (Place { tier: Tier::HOST, offset: host }, Place { tier: Tier::DISK, offset: disk });
        self.copy_disk(self.position(), TensorKind::OptimizerState, from, to, bytes, values);
    }

    fn copy_disk(
        &mut self,
        after: usize,
        kind: TensorKind,
        from: Place,
        to: Place,
        bytes: usize,
        values: Operands,
    ) {
        let work = Work::Copy(Copy { from, to, bytes, values, kind });
        self.copies.push((after, Instruction { work, waits: Vec::new() }, Mark::None));
    }

    /// Sends and receives, right after the last kernel so far. All ranks come here in the same order.
    pub(super) fn collective(
        &mut self,
        kind: CollectiveKind,
        moves: TensorKind,
        pieces: Vec<Moved>,
    ) {
        let work = Work::Collective(Collective { kind, pieces, moves });
        let after = self.position();
        self.copies.push((after, Instruction { work, waits: Vec::new() }, Mark::None));
    }

    /// Takes data, at the start of the segment.
    pub(super) fn take_data(&mut self, fetch: Fetch, read: ReadAhead) {
        for (work, mark) in [(Work::Fetch(fetch), Mark::Fetch), (Work::ReadAhead(read), Mark::None)]
        {
            self.copies.push((0, Instruction { work, waits: Vec::new() }, mark));
        }
    }

    /// Fetches a slab's entries, after that many kernels.
    pub(super) fn bring_runs(
        &mut self,
        after: usize,
        runs: &[CopyRun],
        pieces: &[Pieces],
        ends: Ends,
    ) {
        for run in runs {
            let values = copy_values(run, |entry, piece| pieces[entry].piece(piece));
            self.copy_in(after, ends.shifted(run.offset), run, values);
        }
    }

    /// Takes out a slab's entries.
    pub(super) fn send_runs(&mut self, runs: &[CopyRun], pieces: &[Pieces], ends: Ends) {
        for run in runs {
            let values = copy_values(run, |entry, piece| pieces[entry].piece(piece));
            self.copy_out(ends.shifted(run.offset), run, values);
        }
    }
}

/// What a run contains, and where each value lies in it.
pub(super) fn copy_values(run: &CopyRun, value: impl Fn(usize, usize) -> ValueId) -> Operands {
    let operand = |&(entry, piece, offset): &(usize, usize, usize)| Operand {
        value: value(entry, piece),
        offset,
    };
    run.pieces.iter().map(operand).collect()
}

fn unbound(variant: &Variant, id: TensorId) -> Bound {
    let name = &variant.section.graph.tensor(id).name;
    unreachable!("`{name}` of `{}` has no place", variant.section.name)
}
