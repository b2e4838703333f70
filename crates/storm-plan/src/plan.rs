//! The data model of a plan.
//!
//! A plan is a list of instructions in the order in which the host issues them to the queues. Each
//! queue runs its instructions in that order, one after another. An instruction starts when the one
//! before it in its queue is done and everything in its [`Instruction::waits`] is done.
//!
//! The list is divided into segments. A step of many micro-batches is a few segments, one of them
//! repeated, so planning and checking do not grow with the accumulation count.

use crate::collective::{Collective, RankPlace};
use crate::queue::{Link, Links, Queue};
use crate::tier::{PerTier, Tier};
use crate::{TensorKind, UpdateTime};
use serde::Serialize;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use storm_graph::{Graph, Tensor, TensorClass, work};

/// An index into [`Plan::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ValueId(pub u32);

impl ValueId {
    /// The value as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A logical tensor or a piece of one, such as the gate of layer 3 in the second micro-batch of a group. It may be in
/// several places at once. A reader must find the version that the compute queue wrote last before it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Value {
    /// For display: `layers.3.mlp.gate_up[1]`.
    pub name: String,
    /// Its size, the same in every place.
    pub size_bytes: usize,
    /// What kind of tensor it is.
    #[serde(skip)]
    pub class: TensorClass,
}

/// A value at an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Operand {
    /// The value.
    pub value: ValueId,
    /// First byte.
    pub offset: usize,
}

/// The values an instruction accesses. Stored inline if there are few, because a search builds many plans.
pub type Operands = SmallVec<[Operand; 4]>;

/// An index into [`Plan::graphs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct GraphId(pub u32);

/// An index into [`Plan::instructions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct InstructionId(pub u32);

impl InstructionId {
    /// The id as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// An index into [`Plan::segments`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct SegmentId(pub u32);

/// A kernel: one node of a graph, with addresses in the tier that kernels work in.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compute {
    /// The graph.
    pub graph: GraphId,
    /// The node's position in it.
    pub node: u32,
    /// Which layer it belongs to, for random streams; 0 outside layers.
    pub layer: u16,
    /// Offsets of the op's operands in their order, then of the node's outputs.
    pub places: SmallVec<[usize; 6]>,
    /// Values that are read. An operand in several pieces has several.
    pub reads: Operands,
    /// Values that are written, each completely.
    pub writes: Operands,
}

impl Compute {
    /// The tier that kernels work in: all their offsets are in it.
    pub const TIER: Tier = Tier::DEVICE;
}

/// A copy of consecutive values, laid out the same in both tiers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Copy {
    /// First byte that is read.
    pub from: Place,
    /// First byte that is written, in another tier.
    pub to: Place,
    /// Size.
    pub bytes: usize,
    /// The copied values, with their offsets from the first byte.
    pub values: Operands,
    /// The kind of tensor, for reports.
    pub kind: TensorKind,
}

impl Copy {
    /// The link it uses.
    pub fn link(&self) -> Link {
        Link { from: self.from.tier, to: self.to.tier }
    }

    /// Both ends: where it reads, then where it writes.
    pub fn ends(&self) -> [Place; 2] {
        [self.from, self.to]
    }
}

/// Fills the host slots of a group's inputs with the data of the step's next micro-batches. That data was read in the
/// step before, so a fetch never waits for a disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fetch {
    /// Indices into [`Plan::inputs`], each for a micro-batch of the group, which give the places to write.
    pub inputs: Vec<u32>,
    /// Number of micro-batches it takes.
    pub micro_batches: usize,
}

/// Reads ahead from the data source: the micro-batches of the next step with the same numbers as those a [`Fetch`]
/// took, into the memory that it freed. That memory belongs to the source and has no address in the plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReadAhead {
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// Their size in the input slots.
    pub bytes: usize,
}

/// What an instruction does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Work {
    /// A kernel.
    Compute(Compute),
    /// A copy between tiers.
    Copy(Copy),
    /// Moves data of this step into input slots.
    Fetch(Fetch),
    /// Reads data of the next step from its source.
    ReadAhead(ReadAhead),
    /// Communication with other ranks.
    Collective(Collective),
}

/// One entry of a queue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Instruction {
    /// The work.
    pub work: Work,
    /// Instructions in other queues that must finish before this one starts: for each, its last run issued before this
    /// one. An instruction that was never issued delays nothing.
    pub waits: Vec<InstructionId>,
}

/// A part of the instruction list that runs as a whole.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Segment {
    /// For display: `first group`.
    pub name: &'static str,
    /// Its instructions.
    pub instructions: Range<usize>,
}

/// A segment, run a number of times in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// The segment.
    pub segment: SegmentId,
    /// The number of runs.
    pub times: usize,
}

/// A tier and an offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Place {
    /// Which memory.
    pub tier: Tier,
    /// First byte.
    pub offset: usize,
}

/// A persistent tensor: a parameter, its gradient, its optimizer state.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lasting {
    /// Full name, shape, dtype.
    #[serde(skip)]
    pub tensor: Tensor,
    /// Its values, which are contiguous.
    pub pieces: Vec<ValueId>,
    /// Places that hold the whole tensor between two steps. A write must change all of them, and every step ends with
    /// the latest value in all of them.
    pub places: Vec<Place>,
    /// Places of single pieces, by index of the piece, in order. The same rules hold for them. A tensor without a
    /// place as a whole has one for each piece.
    pub parts: Vec<(u32, Place)>,
    /// The whole that this tensor is a part of, if ranks share the whole and this one owns the part.
    pub shard: Option<Shard>,
}

/// A persistent tensor that ranks share. Each rank holds the parts it owns, as separate persistent tensors.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sharded {
    /// The whole: full name, shape, dtype.
    #[serde(skip)]
    pub tensor: Tensor,
    /// The owner and the bytes of each part, in order.
    pub parts: Vec<(u32, usize)>,
}

impl Sharded {
    /// The ranges within `bytes` that a rank owns, in order.
    pub fn owned(&self, rank: u32, bytes: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let mut start = 0;
        let parts = self.parts.iter().map(move |&(owner, size)| {
            let range = start..start + size;
            start = range.end;
            (owner, range)
        });
        let own = parts.filter(move |&(owner, _)| owner == rank);
        let inside = own.map(move |(_, part)| part.start.max(bytes.start)..part.end.min(bytes.end));
        inside.filter(|range| !range.is_empty())
    }
}

/// The position of a part that a rank owns in the whole tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shard {
    /// Name of the whole tensor.
    pub tensor: String,
    /// Its offset in the whole tensor.
    pub first_byte: usize,
}

/// An input: written by the host before a segment or a step, or by a [`Fetch`] of the segment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Input {
    /// For example `tokens` or `denominator`.
    #[serde(skip)]
    pub tensor: Tensor,
    /// Its value.
    pub value: ValueId,
    /// The micro-batch of the group it belongs to; `None` if it exists once per step.
    pub micro_batch: Option<u16>,
    /// Where the host writes it.
    pub place: Place,
    /// The copies that read it. The host may write it only when all issued ones are done.
    pub copies: Vec<InstructionId>,
    /// The fetches that write it. In their segments, the host does not write it; elsewhere, only when all issued ones
    /// are done.
    pub fetches: Vec<InstructionId>,
}

/// A result: read by the host after a segment or a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanResult {
    /// For example `loss` or `step.gradient_norm`.
    #[serde(skip)]
    pub tensor: Tensor,
    /// Its value.
    pub value: ValueId,
    /// The micro-batch of the group it belongs to; `None` if it exists once per step.
    pub micro_batch: Option<u16>,
    /// Where the host finds it.
    pub place: Place,
    /// The copies that write it. The host reads it when the last issued one is done, and before it issues another
    /// segment that contains one of them.
    pub copies: Vec<InstructionId>,
}

/// A named range of a tier, for display.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Region {
    /// For example `weights of layers` or `work area`.
    pub name: String,
    /// The kind of tensor in it.
    pub kind: TensorKind,
    /// Which memory.
    pub tier: Tier,
    /// First byte.
    pub start: usize,
    /// Size.
    pub bytes: usize,
}

/// A training step as instructions on queues.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Plan {
    /// The graphs that compute instructions refer to.
    #[serde(skip)]
    pub graphs: Vec<Arc<Graph>>,
    /// All values.
    pub values: Vec<Value>,
    /// All instructions of all segments.
    pub instructions: Vec<Instruction>,
    /// The segments of the list.
    pub segments: Vec<Segment>,
    /// The runs of a step, in order. All queues are empty before and after it.
    pub step: Vec<Run>,
    /// When gradients are applied.
    pub update: UpdateTime,
    /// The segment that applies a pending update outside of a step, if updates are deferred to the
    /// next step.
    pub flush: Option<SegmentId>,
    /// The forward pass of one group of micro-batches, outside of a step. Leaves all state unchanged.
    pub evaluation: Option<SegmentId>,
    /// The persistent tensors, and where they are between steps.
    pub lasting: Vec<Lasting>,
    /// Inputs, written by the host.
    pub inputs: Vec<Input>,
    /// Results, read by the host.
    pub results: Vec<PlanResult>,
    /// Memory size in each tier.
    pub bytes: PerTier<usize>,
    /// The links that copies use, and whether there is a data source. Each has a queue.
    pub links: Links,
    /// Named ranges of memory.
    pub regions: Vec<Region>,
    /// The rank that this plan is for.
    pub rank: RankPlace,
    /// The persistent tensors that ranks share.
    pub sharded: Vec<Sharded>,
    /// Values that only this rank has, in order. The plan contains nothing of other ranks' shards.
    pub own: Vec<ValueId>,
}

impl Plan {
    /// The tiers the plan uses, always including host and device.
    pub fn tiers(&self) -> impl Iterator<Item = Tier> {
        let always = [Tier::DEVICE, Tier::HOST];
        let taken = self.bytes.iter().map(|(tier, &bytes)| (tier, bytes > 0));
        taken.filter(move |(tier, taken)| *taken || always.contains(tier)).map(|(tier, _)| tier)
    }

    /// One instruction.
    pub fn instruction(&self, id: InstructionId) -> &Instruction {
        work::count(1);
        &self.instructions[id.index()]
    }

    /// All instructions, in order.
    pub fn ids(&self) -> impl Iterator<Item = InstructionId> + use<> {
        (0..self.instructions.len() as u32).map(InstructionId)
    }

    /// The queues, in order.
    pub fn queues(&self) -> impl ExactSizeIterator<Item = Queue> + use<> {
        self.links.queues()
    }

    /// The queue of an instruction.
    ///
    /// # Panics
    /// The instruction is a copy over a link that the plan lacks, takes data although the plan has no source, or is a
    /// collective although the plan is for one rank.
    pub fn queue(&self, id: InstructionId) -> Queue {
        match &self.instructions[id.index()].work {
            Work::Compute(_) => Queue::COMPUTE,
            Work::Copy(copy) => {
                let link = copy.link();
                self.links.queue(link).unwrap_or_else(|| panic!("no link from {link}"))
            }
            Work::Fetch(_) => self.links.staging_queue().expect("a plan with data"),
            Work::ReadAhead(_) => self.links.data_queue().expect("a plan with data"),
            Work::Collective(_) => self.links.rank_queue().expect("a plan with ranks"),
        }
    }

    /// One value.
    pub fn value(&self, id: ValueId) -> &Value {
        work::count(1);
        &self.values[id.index()]
    }

    /// One segment.
    pub fn segment(&self, id: SegmentId) -> &Segment {
        &self.segments[id.0 as usize]
    }

    /// The inputs that a fetch writes.
    pub fn fetched<'a>(&'a self, fetch: &'a Fetch) -> impl Iterator<Item = &'a Input> {
        fetch.inputs.iter().map(|&index| &self.inputs[index as usize])
    }

    /// For display: the node and its layer, what is copied, or how much data is taken.
    pub fn describe(&self, id: InstructionId) -> String {
        match &self.instruction(id).work {
            Work::Compute(compute) => {
                let node = &self.graphs[compute.graph.0 as usize].nodes()[compute.node as usize];
                format!("{} `{}` of layer {}", node.op.name(), node.name, compute.layer)
            }
            Work::Copy(copy) => {
                let names: Vec<&str> =
                    copy.values.iter().map(|o| self.value(o.value).name.as_str()).take(3).collect();
                let more = if copy.values.len() > names.len() { ", …" } else { "" };
                format!("copy of `{}`{more} to the {}", names.join("`, `"), copy.to.tier)
            }
            Work::Fetch(fetch) => format!("fetch of {}", micro_batches(fetch.micro_batches)),
            Work::ReadAhead(read) => {
                format!("read of {} of the next step", micro_batches(read.micro_batches))
            }
            Work::Collective(collective) => {
                let first = collective.pieces.iter().flat_map(|piece| piece.operands()).next();
                let name = first.map_or("nothing", |operand| &self.value(operand.value).name);
                let more = if collective.pieces.len() > 1 { ", …" } else { "" };
                format!("{} of `{name}`{more}", collective.kind.name())
            }
        }
    }
}

fn micro_batches(count: usize) -> String {
    format!("{count} micro-batch{}", if count == 1 { "" } else { "es" })
}
