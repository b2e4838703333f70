//! Proves that the plans of all ranks of a step fit together. Each must have passed [`verify`](super::verify) by itself.
//!
//! # Why this is enough
//! A plan by itself cannot deadlock: queues run in order, and waits refer back. Collectives are on one queue, and all ranks issue
//! the same ones in the same order, so the first that not all ranks have reached is always reached: there is no deadlock among them,
//! and what one rank sends is what another expects.
//!
//! Each rank finds what it reads as its own plan left it. What remains is that ranks mean the same by it. A kernel is of a shard if it
//! touches what one rank alone has, or writes what that rank then gathers. All other kernels are the same on all ranks, in the same
//! order, and so is the order of collectives and of the kernels that use what they move. A piece that is gathered is written by kernels of its owner alone, and after such a write no kernel
//! reads it, and no program ends, before it is gathered. So whenever ranks run a common kernel, all have the piece as its owner wrote it
//! last.

use crate::collective::{CollectiveKind, Moved, received_name};
use crate::plan::{Compute, InstructionId, Plan, SegmentId, ValueId, Work};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Why plans of several ranks do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    /// There is not one plan for each rank.
    #[error("plan {position} of {count} is for rank {rank} of {ranks}")]
    Place {
        /// Its position.
        position: usize,
        /// How many plans there are.
        count: usize,
        /// Which rank it is for.
        rank: u32,
        /// Of how many.
        ranks: u32,
    },
    /// Ranks run other segments, or run them another number of times.
    #[error("rank {rank} runs other segments than rank 0")]
    Segments {
        /// Which.
        rank: u32,
    },
    /// Ranks do something else at some point of a segment.
    #[error("rank {rank} has {found} in `{segment}` where rank 0 has {expected}")]
    Differs {
        /// Which.
        rank: u32,
        /// Where.
        segment: String,
        /// What it does there.
        found: String,
        /// What rank 0 does there.
        expected: String,
    },
    /// A piece is gathered from two ranks, or written by a rank that does not own it.
    #[error("`{value}` is written on rank {rank}, and comes from rank {owner}")]
    Owners {
        /// What.
        value: String,
        /// Where it is written.
        rank: u32,
        /// Who owns it.
        owner: u32,
    },
    /// A piece is used, or left behind, before other ranks have it.
    #[error("rank {rank} updates `{value}`, and {user} comes before it is gathered")]
    NotGathered {
        /// Which.
        rank: u32,
        /// What.
        value: String,
        /// What comes too early.
        user: String,
    },
}

/// Checks the plans of all ranks, in their order.
///
/// # Errors
/// The first difference.
pub fn verify_ranks(plans: &[&Plan]) -> Result<(), RanksError> {
    let count = plans.len();
    for (position, plan) in plans.iter().enumerate() {
        let (rank, ranks) = (plan.rank.rank, plan.rank.ranks);
        if rank as usize != position || ranks as usize != count {
            return Err(RanksError::Place { position, count, rank, ranks });
        }
    }
    let Some((first, others)) = plans.split_first() else { return Ok(()) };
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
        for (index, segment) in plan.segments.iter().enumerate() {
            let [mine, theirs] =
                [&found, &expected].map(|view| view.common(SegmentId(index as u32)));
            if let Some((found, expected)) = mine.difference(&theirs) {
                let segment = segment.name.to_owned();
                return Err(RanksError::Differs { rank, segment, found, expected });
            }
        }
    }
    plans.iter().try_for_each(|plan| check_gathered(plan))
}

/// A digest of what all ranks must do alike: equal if [`verify_ranks`] finds no difference between two plans.
pub fn shared_digest(plan: &Plan) -> u64 {
    let mut hasher = DefaultHasher::new();
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

/// What all ranks must do alike.
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

/// A collective or a kernel that uses a piece, by its number among those of its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Use {
    Collective(usize),
    Kernel(usize),
}

/// What a segment does that all ranks must do alike. Kernels and collectives that have nothing in common may come in any order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Common {
    collectives: Vec<Event>,
    kernels: Vec<Event>,
    /// By the name of what is moved: what uses it, in order.
    uses: BTreeMap<String, Vec<Use>>,
}

impl Common {
    /// The first difference, in words.
    fn difference(&self, expected: &Common) -> Option<(String, String)> {
        let word =
            |event: Option<&Event>| event.map_or_else(|| "nothing".to_owned(), Event::describe);
        for (mine, theirs) in
            [(&self.collectives, &expected.collectives), (&self.kernels, &expected.kernels)]
        {
            let length = mine.len().max(theirs.len());
            if let Some(at) = (0..length).find(|&at| mine.get(at) != theirs.get(at)) {
                return Some((word(mine.get(at)), word(theirs.get(at))));
            }
        }
        let differs = |(name, uses): &(&String, &Vec<Use>)| expected.uses.get(*name) != Some(uses);
        let (name, _) = self.uses.iter().find(differs)?;
        let order = "another order of kernels and collectives";
        Some((format!("{order} of `{name}`"), "its own".to_owned()))
    }
}

/// A plan as others see it.
struct View<'a> {
    plan: &'a Plan,
    own: BTreeSet<ValueId>,
    gathered: BTreeSet<ValueId>,
    /// Of what is gathered, by name.
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

    /// What a segment does that all ranks must do alike.
    fn common(&self, segment: SegmentId) -> Common {
        let name = |value: ValueId| self.plan.value(value).name.clone();
        let mut common = Common::default();
        // First what is moved: only its uses matter.
        for index in self.plan.segment(segment).instructions.clone() {
            if let Work::Collective(collective) = &self.plan.instructions[index].work {
                for piece in &collective.pieces {
                    common.uses.entry(self.piece_name(collective.kind, piece)).or_default();
                }
            }
        }
        for index in self.plan.segment(segment).instructions.clone() {
            match &self.plan.instructions[index].work {
                Work::Collective(collective) => {
                    let mut pieces = Vec::new();
                    let at = Use::Collective(common.collectives.len());
                    for piece in &collective.pieces {
                        let name = self.piece_name(collective.kind, piece);
                        common.uses.entry(name.clone()).or_default().push(at);
                        pieces.push((piece.owner, piece.size_bytes(self.plan), name));
                    }
                    common.collectives.push(Event::Collective(collective.kind, pieces));
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

    /// What a piece is called on the ranks that send it.
    fn piece_name(&self, kind: CollectiveKind, piece: &Moved) -> String {
        match (kind, &piece.received[..]) {
            (CollectiveKind::Exchange, received @ [_, ..]) => {
                self.exchanged_name(received.iter().map(|(from, operand)| (*from, operand.value)))
            }
            _ => {
                let operand = piece.operands().next();
                operand.map_or_else(String::new, |o| self.plan.value(o.value).name.clone())
            }
        }
    }

    /// The name under which others send what is received.
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

/// Everything that is gathered, with its owner.
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

/// Kernels of the owner alone write what is gathered, and nothing uses it before all ranks have it.
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
