//! Proves that the plans of all ranks of a step fit together. Each must have passed
//! [`verify`](super::verify) by itself.
//!
//! # Why this is enough
//! A plan by itself cannot deadlock: queues run in order, and waits refer back. Collectives are on
//! one queue, and all ranks issue the same ones in the same order. So all ranks always reach the
//! first collective that some have not reached: ranks cannot deadlock, and each receives what it
//! expects.
//!
//! Each rank reads what its own plan wrote. It remains to show that all ranks mean the same by it.
//! A kernel belongs to a shard if it touches values that only one rank has, or writes values that
//! are gathered. All other kernels are the same on all ranks, in the same order. The order of
//! collectives and of the kernels that use what they move is the same, too. Only kernels of its
//! owner write a gathered piece. After such a write, no kernel reads the piece, and no program
//! ends, before it is gathered. So whenever ranks run a common kernel, all have the piece as its
//! owner last wrote it.
//!
//! Machines may exchange sums of their lanes. Every rank takes part in each of these exchanges, so
//! the order of collectives is still the same on all ranks. But only ranks with the same local rank
//! send each other something, and these list the same pieces. In every exchange, what a rank sends
//! was written since it was last sent, and what it receives is read once before it is received
//! again. So no lane and no sum is left out or counted twice.

use crate::collective::{Collective, CollectiveKind, Moved, received_name};
use crate::plan::{Compute, InstructionId, Operand, Plan, SegmentId, ValueId, Work};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Why plans of several ranks do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    /// There is not exactly one plan for each rank, in order.
    #[error("plan {position} of {count} is for rank {rank} of {ranks}")]
    Place {
        /// The position of the plan.
        position: usize,
        /// The number of plans.
        count: usize,
        /// The rank that the plan is for.
        rank: u32,
        /// The number of ranks in the plan.
        ranks: u32,
    },
    /// Ranks are spread over machines in different ways.
    #[error("rank {rank} is one of {found} on its machine, and rank 0 one of {expected}")]
    Machines {
        /// The rank.
        rank: u32,
        /// The number of ranks on its machine.
        found: u32,
        /// The number of ranks on the machine of rank 0.
        expected: u32,
    },
    /// Ranks run different segments, or run them a different number of times.
    #[error("rank {rank} runs other segments than rank 0")]
    Segments {
        /// The rank.
        rank: u32,
    },
    /// Ranks differ at some point of a segment.
    #[error("rank {rank} has {found} in `{segment}` where rank {other} has {expected}")]
    Differs {
        /// The rank.
        rank: u32,
        /// The segment.
        segment: String,
        /// What it has there.
        found: String,
        /// The rank it is compared with: the first, or the first with the same local rank.
        other: u32,
        /// What that rank has there.
        expected: String,
    },
    /// A piece is gathered from two ranks, or written by a rank that does not own it.
    #[error("`{value}` is written on rank {rank}, and comes from rank {owner}")]
    Owners {
        /// The piece.
        value: String,
        /// The rank that writes it.
        rank: u32,
        /// The owner.
        owner: u32,
    },
    /// A lane or a sum is left out or counted twice.
    #[error("rank {rank} exchanges `{value}` that is not new: {problem}")]
    NotNew {
        /// The rank.
        rank: u32,
        /// The value.
        value: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// A piece is used, or left behind, before other ranks have it.
    #[error("rank {rank} updates `{value}`, and {user} comes before it is gathered")]
    NotGathered {
        /// The rank.
        rank: u32,
        /// The value.
        value: String,
        /// What comes too early.
        user: String,
    },
}

/// Checks the plans of all ranks, in rank order.
///
/// # Errors
/// The first problem found.
pub fn verify_ranks(plans: &[&Plan]) -> Result<(), RanksError> {
    let count = plans.len();
    for (position, plan) in plans.iter().enumerate() {
        let (rank, ranks) = (plan.rank.rank, plan.rank.ranks);
        if rank as usize != position || ranks as usize != count {
            return Err(RanksError::Place { position, count, rank, ranks });
        }
    }
    let Some((first, others)) = plans.split_first() else { return Ok(()) };
    let machine = first.rank.machine;
    for on_one in [|plan: &Plan| plan.rank.machine, |plan: &Plan| plan.rank.relay] {
        let expected = on_one(first);
        if let Some(other) = others.iter().find(|plan| on_one(plan) != expected) {
            let (rank, found) = (other.rank.rank, on_one(other));
            return Err(RanksError::Machines { rank, found, expected });
        }
    }
    let expected = View::new(first)?;
    for plan in others {
        let rank = plan.rank.rank;
        let shape = |plan: &Plan| (plan.step.clone(), plan.flush, plan.evaluation);
        let names = |plan: &Plan| plan.segments.iter().map(|s| s.name).collect::<Vec<_>>();
        if shape(plan) != shape(first) || names(plan) != names(first) {
            return Err(RanksError::Segments { rank });
        }
        let found = View::new(plan)?;
        if found.owners != expected.owners {
            let differs =
                |(name, owner): &(&String, &u32)| expected.owners.get(*name) != Some(owner);
            let other = found.owners.iter().find(differs);
            let name = other.map_or_else(String::new, |(name, _)| (*name).clone());
            let owner = expected.owners.get(&name).copied().unwrap_or_default();
            return Err(RanksError::Owners { value: name, rank, owner });
        }
        let peer = View::new(plans[(rank % machine) as usize])?;
        for (index, segment) in plan.segments.iter().enumerate() {
            let id = SegmentId(index as u32);
            let [mine, theirs] = [&found, &expected].map(|view| view.common(id));
            let [my_sums, their_sums] = [&found, &peer].map(|view| view.sums(id));
            if let Some((found, expected)) = mine.difference(&theirs) {
                let (segment, other) = (segment.name.to_owned(), 0);
                return Err(RanksError::Differs { rank, segment, found, other, expected });
            }
            if let Some((found, expected)) = first_difference(&my_sums, &their_sums) {
                let (segment, other) = (segment.name.to_owned(), rank % machine);
                return Err(RanksError::Differs { rank, segment, found, other, expected });
            }
        }
    }
    plans.iter().try_for_each(|plan| {
        check_exchanged(plan)?;
        check_gathered(plan)
    })
}

/// A digest of what must be the same on all ranks, except for sums that machines exchange. Equal
/// for two plans if [`verify_ranks`] finds no difference between them.
pub fn shared_digest(plan: &Plan) -> u64 {
    let mut hasher = DefaultHasher::new();
    (plan.rank.machine, plan.rank.relay).hash(&mut hasher);
    for run in &plan.step {
        (run.segment.0, run.times).hash(&mut hasher);
    }
    plan.flush.hash(&mut hasher);
    plan.evaluation.hash(&mut hasher);
    match View::new(plan) {
        Ok(view) => {
            view.owners.hash(&mut hasher);
            for (index, segment) in plan.segments.iter().enumerate() {
                segment.name.hash(&mut hasher);
                view.common(SegmentId(index as u32)).hash(&mut hasher);
            }
        }
        Err(error) => error.to_string().hash(&mut hasher),
    }
    hasher.finish()
}

/// A digest of the sums that machines exchange. Equal for ranks with the same local rank if
/// [`verify_ranks`] finds no difference between their plans.
pub fn sums_digest(plan: &Plan) -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Ok(view) = View::new(plan) {
        let segments = 0..plan.segments.len();
        segments.for_each(|index| view.sums(SegmentId(index as u32)).hash(&mut hasher));
    }
    hasher.finish()
}

/// What must be the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Event {
    /// A collective: owner, bytes and name of each piece.
    Collective(CollectiveKind, Vec<(u32, usize, String)>),
    /// A kernel: op, node, layer, and the names of what it reads and writes.
    Kernel(&'static str, String, u16, Vec<String>),
}

impl Event {
    fn describe(&self) -> String {
        match self {
            Event::Collective(kind, pieces) => {
                let names: Vec<&str> = pieces.iter().take(2).map(|(.., name)| &name[..]).collect();
                format!("{} of {} pieces `{}`", kind.name(), pieces.len(), names.join("`, `"))
            }
            Event::Kernel(op, node, layer, _) => format!("{op} `{node}` of layer {layer}"),
        }
    }
}

/// A use of a piece, by its number among the collectives or kernels of its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Use {
    Collective(usize),
    Kernel(usize),
}

/// What must be the same on all ranks in a segment. Kernels and collectives that have nothing in
/// common may come in any order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Common {
    collectives: Vec<Event>,
    kernels: Vec<Event>,
    /// Uses of each moved value, by name, in order.
    uses: BTreeMap<String, Vec<Use>>,
}

impl Common {
    /// The first difference, in words.
    fn difference(&self, expected: &Common) -> Option<(String, String)> {
        for (mine, theirs) in
            [(&self.collectives, &expected.collectives), (&self.kernels, &expected.kernels)]
        {
            if let Some(difference) = first_difference(mine, theirs) {
                return Some(difference);
            }
        }
        let differs = |(name, uses): &(&String, &Vec<Use>)| expected.uses.get(*name) != Some(uses);
        let (name, _) = self.uses.iter().find(differs)?;
        let order = "another order of kernels and collectives";
        Some((format!("{order} of `{name}`"), "its own".to_owned()))
    }
}

/// The first difference between events, in words.
fn first_difference(mine: &[Event], theirs: &[Event]) -> Option<(String, String)> {
    let word = |event: Option<&Event>| event.map_or_else(|| "nothing".to_owned(), Event::describe);
    let length = mine.len().max(theirs.len());
    let at = (0..length).find(|&at| mine.get(at) != theirs.get(at))?;
    Some((word(mine.get(at)), word(theirs.get(at))))
}

/// A plan as other ranks see it.
struct View<'a> {
    plan: &'a Plan,
    own: BTreeSet<ValueId>,
    gathered: BTreeSet<ValueId>,
    /// Owners of gathered values, by name.
    owners: BTreeMap<String, u32>,
}

impl<'a> View<'a> {
    fn new(plan: &'a Plan) -> Result<View<'a>, RanksError> {
        let (mut gathered, mut owners) = (BTreeSet::new(), BTreeMap::new());
        for (value, owner) in gathers(plan) {
            gathered.insert(value);
            let name = &plan.value(value).name;
            let known = *owners.entry(name.clone()).or_insert(owner);
            if known != owner {
                let (value, rank) = (name.clone(), owner);
                return Err(RanksError::Owners { value, rank, owner: known });
            }
        }
        Ok(View { plan, own: plan.own.iter().copied().collect(), gathered, owners })
    }

    fn is_of_shard(&self, compute: &Compute) -> bool {
        let touched = || compute.reads.iter().chain(&compute.writes);
        touched().any(|operand| self.own.contains(&operand.value))
            || compute.writes.iter().any(|operand| self.gathered.contains(&operand.value))
    }

    /// What must be the same on all ranks in a segment.
    fn common(&self, segment: SegmentId) -> Common {
        let name = |value: ValueId| self.plan.value(value).name.clone();
        let mut common = Common::default();
        // First the moved values, because only their uses matter.
        for collective in self.collectives(segment) {
            for piece in of_all(collective) {
                common.uses.entry(self.piece_name(collective.kind, piece)).or_default();
            }
        }
        for index in self.plan.segment(segment).instructions.clone() {
            match &self.plan.instructions[index].work {
                Work::Collective(collective) => {
                    let at = Use::Collective(common.collectives.len());
                    for piece in of_all(collective) {
                        let name = self.piece_name(collective.kind, piece);
                        common.uses.entry(name).or_default().push(at);
                    }
                    common.collectives.push(self.event(collective.kind, of_all(collective)));
                }
                Work::Compute(compute) if !self.is_of_shard(compute) => {
                    let graph = &self.plan.graphs[compute.graph.0 as usize];
                    let node = &graph.nodes()[compute.node as usize];
                    let touched = compute.reads.iter().chain(&compute.writes);
                    let names: Vec<String> = touched.map(|operand| name(operand.value)).collect();
                    for name in &names {
                        if let Some(uses) = common.uses.get_mut(name) {
                            uses.push(Use::Kernel(common.kernels.len()));
                        }
                    }
                    let (op, layer) = (node.op.name(), compute.layer);
                    common.kernels.push(Event::Kernel(op, node.name.clone(), layer, names));
                }
                _ => {}
            }
        }
        common
    }

    /// The sums that a segment exchanges with the ranks of the same local rank, on which they must
    /// be the same.
    fn sums(&self, segment: SegmentId) -> Vec<Event> {
        let is_of_sums = |c: &&Collective| c.kind == CollectiveKind::ExchangeSums;
        let exchanges = self.collectives(segment).filter(is_of_sums);
        exchanges.map(|collective| self.event(collective.kind, &collective.pieces)).collect()
    }

    fn collectives(&self, segment: SegmentId) -> impl Iterator<Item = &'a Collective> {
        let plan = self.plan;
        plan.segment(segment).instructions.clone().filter_map(move |index| {
            match &plan.instructions[index].work {
                Work::Collective(collective) => Some(collective),
                _ => None,
            }
        })
    }

    fn event(&self, kind: CollectiveKind, pieces: &[Moved]) -> Event {
        let named = |piece: &Moved| {
            (piece.owner, piece.size_bytes(self.plan), self.piece_name(kind, piece))
        };
        Event::Collective(kind, pieces.iter().map(named).collect())
    }

    /// The name of a piece on the ranks that send it.
    fn piece_name(&self, kind: CollectiveKind, piece: &Moved) -> String {
        match (kind, &piece.received[..]) {
            (CollectiveKind::Exchange | CollectiveKind::ExchangeSums, received @ [_, ..]) => {
                self.exchanged_name(received.iter().map(|(from, operand)| (*from, operand.value)))
            }
            _ => {
                let operand = piece.operands().next();
                operand.map_or_else(String::new, |o| self.plan.value(o.value).name.clone())
            }
        }
    }

    /// The name under which other ranks send what this one receives.
    fn exchanged_name(&self, received: impl Iterator<Item = (u32, ValueId)>) -> String {
        let mut sent = BTreeSet::new();
        for (from, value) in received {
            let name = &self.plan.value(value).name;
            let suffix = received_name("", from);
            sent.insert(name.strip_suffix(&suffix).unwrap_or("something else").to_owned());
        }
        sent.into_iter().collect::<Vec<_>>().join(" and ")
    }
}

/// The pieces of a collective that every rank lists: all but sums, which only some ranks list.
fn of_all(collective: &Collective) -> &[Moved] {
    match collective.kind {
        CollectiveKind::Exchange | CollectiveKind::Gather => &collective.pieces,
        CollectiveKind::ExchangeSums => &[],
    }
}

/// Every gathered value, with its owner.
fn gathers(plan: &Plan) -> impl Iterator<Item = (ValueId, u32)> {
    let collectives = plan.instructions.iter().filter_map(|instruction| match &instruction.work {
        Work::Collective(collective) => Some(collective),
        _ => None,
    });
    let gathers = collectives.filter(|collective| collective.kind == CollectiveKind::Gather);
    gathers.flat_map(|collective| &collective.pieces).filter_map(|piece| {
        let operand = piece.operands().next()?;
        Some((operand.value, piece.owner))
    })
}

/// Checks that values are new when they are sent, and read once after they are received.
fn check_exchanged(plan: &Plan) -> Result<(), RanksError> {
    let rank = plan.rank.rank;
    let exchanges = plan.instructions.iter().filter_map(|instruction| match &instruction.work {
        Work::Collective(collective) if collective.kind != CollectiveKind::Gather => {
            Some(collective)
        }
        _ => None,
    });
    let received: BTreeSet<ValueId> =
        exchanges.flat_map(Collective::writes).map(|(_, operand)| operand.value).collect();
    let refuse = |value: ValueId, problem: &'static str| {
        let value = plan.value(value).name.clone();
        Err(RanksError::NotNew { rank, value, problem })
    };
    let (mut written, mut unread) = (BTreeSet::new(), BTreeSet::new());
    for segment in plan.step.iter().flat_map(|run| [run.segment].repeat(run.times.min(2))) {
        for index in plan.segment(segment).instructions.clone() {
            match &plan.instructions[index].work {
                Work::Compute(compute) => {
                    let read = compute.reads.iter().map(|operand| operand.value);
                    for value in read.filter(|value| received.contains(value)) {
                        if !unread.remove(&value) {
                            return refuse(value, "it is read again before another arrives");
                        }
                    }
                    written.extend(compute.writes.iter().map(|operand| operand.value));
                }
                Work::Collective(collective) if collective.kind != CollectiveKind::Gather => {
                    for Operand { value, .. } in collective.reads() {
                        if !written.remove(value) {
                            return refuse(*value, "it was sent before");
                        }
                    }
                    for (_, Operand { value, .. }) in collective.writes() {
                        if !unread.insert(*value) {
                            return refuse(*value, "it arrives again before it is read");
                        }
                    }
                }
                _ => {}
            }
        }
    }
    match unread.first() {
        Some(&value) => refuse(value, "it is never read"),
        None => Ok(()),
    }
}

/// Checks that only kernels of its owner write a gathered value, and that nothing uses it before
/// all ranks have it.
fn check_gathered(plan: &Plan) -> Result<(), RanksError> {
    let rank = plan.rank.rank;
    let owners: BTreeMap<ValueId, u32> = gathers(plan).collect();
    let name = |value: ValueId| plan.value(value).name.clone();
    let step: Vec<SegmentId> = plan.step.iter().map(|run| run.segment).collect();
    let outside = [plan.flush, plan.evaluation].into_iter().flatten().map(|id| vec![id]);
    for program in std::iter::once(step).chain(outside) {
        let mut changed: BTreeSet<ValueId> = BTreeSet::new();
        for segment in &program {
            for index in plan.segment(*segment).instructions.clone() {
                match &plan.instructions[index].work {
                    Work::Compute(compute) => {
                        for value in compute.reads.iter().map(|operand| operand.value) {
                            if changed.contains(&value) {
                                let user = plan.describe(InstructionId(index as u32));
                                let value = name(value);
                                return Err(RanksError::NotGathered { rank, value, user });
                            }
                        }
                        for value in compute.writes.iter().map(|operand| operand.value) {
                            match owners.get(&value) {
                                Some(&owner) if owner != rank => {
                                    let value = name(value);
                                    return Err(RanksError::Owners { value, rank, owner });
                                }
                                Some(_) => drop(changed.insert(value)),
                                None => {}
                            }
                        }
                    }
                    Work::Collective(collective) if collective.kind == CollectiveKind::Gather => {
                        for operand in collective.reads() {
                            changed.remove(&operand.value);
                        }
                    }
                    _ => {}
                }
            }
        }
        if let Some(&value) = changed.first() {
            let user = "the end".to_owned();
            return Err(RanksError::NotGathered { rank, value: name(value), user });
        }
    }
    Ok(())
}
