//! The checker's errors.

use crate::plan::{InstructionId, Plan, ValueId};
use crate::queue::Link;
use crate::tier::Tier;
use std::fmt;
use std::ops::Range;

/// Something that touches memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Actor {
    /// An instruction of a queue.
    Instruction {
        /// Which.
        id: InstructionId,
        /// For people.
        description: String,
    },
    /// The host, which writes inputs and reads results.
    Host,
}

impl Actor {
    pub(super) fn instruction(plan: &Plan, id: InstructionId) -> Actor {
        Actor::Instruction { id, description: plan.describe(id) }
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Actor::Instruction { id, description } => {
                write!(f, "{description} (instruction {})", id.0)
            }
            Actor::Host => f.write_str("the host"),
        }
    }
}

/// A value at some bytes of a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    /// The value's name; none for bytes between the values of a copy.
    pub value: Option<String>,
    /// Which memory.
    pub tier: Tier,
    /// Where in it.
    pub bytes: Range<usize>,
}

impl Spot {
    pub(super) fn new(
        plan: &Plan,
        value: Option<ValueId>,
        tier: Tier,
        bytes: Range<usize>,
    ) -> Spot {
        Spot { value: value.map(|id| plan.value(id).name.clone()), tier, bytes }
    }
}

impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(name) => write!(f, "`{name}`")?,
            None => f.write_str("padding")?,
        }
        let Range { start, end } = self.bytes;
        write!(f, " at {} bytes {start}..{end}", self.tier)
    }
}

/// What lies where something else was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing that this step wrote, and no persistent tensor.
    Nothing,
    /// An outdated version of the right value.
    Stale,
    /// Other bytes of the right value.
    Shifted,
    /// Another value.
    Other(String),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Nothing => f.write_str("nothing was written"),
            Found::Stale => f.write_str("an outdated version lies"),
            Found::Shifted => f.write_str("other bytes of it lie"),
            Found::Other(name) => write!(f, "`{name}` lies"),
        }
    }
}

/// Why a plan is not safe to run: the first problem in issue order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// Bytes are read while their write may still be in progress.
    #[error("{reader} reads {spot}, but does not wait for {writer}, which writes there")]
    UnorderedRead {
        /// The reader.
        reader: Actor,
        /// What.
        spot: Spot,
        /// The writer.
        writer: Actor,
    },
    /// Bytes are overwritten while an instruction may still read them.
    #[error("{writer} overwrites {spot}, but does not wait for {reader}, which reads there")]
    OverwriteBeforeRead {
        /// The instruction that overwrites.
        writer: Actor,
        /// What is written.
        spot: Spot,
        /// The reader that may not be done.
        reader: Actor,
    },
    /// Two instructions may write the same bytes at once.
    #[error("{writer} writes {spot}, but does not wait for {earlier}, which writes there too")]
    UnorderedWrite {
        /// The later writer.
        writer: Actor,
        /// What it writes.
        spot: Spot,
        /// The earlier writer that may not be done.
        earlier: Actor,
    },
    /// Bytes do not hold what their reader expects.
    #[error("{reader} expects {spot}, where {found}")]
    WrongContent {
        /// The reader.
        reader: Actor,
        /// What it expects.
        spot: Spot,
        /// What is there.
        found: Found,
    },
    /// Data is read into memory that a fetch may still take data from.
    #[error("{reader} does not wait for {fetch}, whose memory it reads into")]
    UnorderedReadAhead {
        /// What reads.
        reader: Actor,
        /// What may not be done.
        fetch: Actor,
    },
    /// More or less data is read than there is memory for.
    #[error("{reader} reads {micro_batches} micro-batches into the memory of {free}")]
    ReadAheadOf {
        /// What reads.
        reader: Actor,
        /// How many.
        micro_batches: usize,
        /// How many the fetch before it took.
        free: usize,
    },
    /// The next step would have no data.
    #[error("nothing is read in place of the {micro_batches} micro-batches of {fetch}")]
    NotReadAhead {
        /// What took data.
        fetch: Actor,
        /// Of how many micro-batches.
        micro_batches: usize,
    },
    /// An input, and the fetches that write it, contradict each other.
    #[error("input {index} `{tensor}`: {problem}")]
    Fetched {
        /// Its position in the plan's inputs.
        index: usize,
        /// Its name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// A plan that takes data, but has no source of it.
    #[error("{whom} takes data, and the plan has no data source")]
    NoDataSource {
        /// The instruction.
        whom: String,
    },
    /// A plan with collectives, for one rank.
    #[error("{whom} moves data between ranks, and the plan is for one rank")]
    NoRanks {
        /// The instruction.
        whom: String,
    },
    /// A rank that does not exist, or ranks without a queue for collectives.
    #[error("the plan is for rank {rank} of {ranks}, and its queues are not")]
    RankPlace {
        /// Which rank.
        rank: u32,
        /// Of how many.
        ranks: u32,
    },
    /// A wait that nothing ever fulfills.
    #[error("{waiter} waits for {awaited}, which is never issued before it")]
    WaitNeverRecorded {
        /// The waiting instruction.
        waiter: Actor,
        /// The instruction it waits for.
        awaited: Actor,
    },
    /// Bytes beyond the end of a tier.
    #[error("{what} takes {tier} bytes {}..{} of {size}", bytes.start, bytes.end)]
    OutOfBounds {
        /// What uses them.
        what: String,
        /// Which memory.
        tier: Tier,
        /// Where.
        bytes: Range<usize>,
        /// How large that memory is.
        size: usize,
    },
    /// A tier that is larger than allowed.
    #[error("the plan needs {needed} {tier} bytes, the budget is {budget}")]
    OverBudget {
        /// Which memory.
        tier: Tier,
        /// What the plan takes.
        needed: usize,
        /// What it may take.
        budget: usize,
    },
    /// A tier that nothing can be copied to or from.
    #[error(
        "the plan takes {tier} memory, which no link connects to another tier: add a link, or take \
         no memory of it"
    )]
    NoLinkToTier {
        /// Which memory.
        tier: Tier,
    },
    /// A copy between tiers that have no link.
    #[error("{whom} copies from {link}, and the plan has no such link")]
    NoLink {
        /// The instruction.
        whom: String,
        /// The link it would use.
        link: Link,
    },
    /// An offset that a kernel or the host cannot use.
    #[error("{what} starts at byte {offset}, which is not a multiple of {alignment}")]
    Misaligned {
        /// What lies there.
        what: String,
        /// Where.
        offset: usize,
        /// What it must be a multiple of.
        alignment: usize,
    },
    /// A tensor or value that is needed and has no address.
    #[error("{whom} has no address for {what}")]
    NoAddress {
        /// What needs it.
        whom: String,
        /// What is missing.
        what: String,
    },
    /// Values that do not make up the bytes that an instruction touches.
    #[error("{instruction}: {problem}")]
    BadCoverage {
        /// Which.
        instruction: Actor,
        /// What is wrong.
        problem: String,
    },
    /// A kernel's operands and outputs overlap where they must not, or do not where they must.
    #[error("{instruction}: {first} and {second} {}", if *must_share { "must be in one place" } else { "overlap" })]
    Aliasing {
        /// Which.
        instruction: Actor,
        /// One tensor.
        first: String,
        /// The other.
        second: String,
        /// What the op requires.
        must_share: bool,
    },
    /// A persistent tensor is not where the next step expects it.
    #[error("after the {program}, {spot} of tensor `{tensor}` must rest, but {found} there")]
    NotAtRest {
        /// `step`, `flush` or `evaluation`.
        program: &'static str,
        /// The tensor.
        tensor: String,
        /// What must be there.
        spot: Spot,
        /// What is there.
        found: Found,
    },
    /// The plan also uses the memory of an input or a result for something else.
    #[error("{tier} memory of `{tensor}`: {problem}")]
    HostMemory {
        /// Which memory.
        tier: Tier,
        /// The input or result.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// An index beyond the end of its list.
    #[error("{whom} refers to {what} {index} of {count}")]
    Unknown {
        /// What refers to it.
        whom: String,
        /// Of what kind.
        what: &'static str,
        /// Which.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The segments do not partition the list of instructions.
    #[error("segment `{segment}`: {problem}")]
    Segments {
        /// Which.
        segment: String,
        /// What is wrong.
        problem: String,
    },
    /// Memory never reaches a state that repeats.
    #[error(
        "what lies in memory after segment `{segment}` still changes after {times} repetitions"
    )]
    Unsettled {
        /// Which.
        segment: String,
        /// How many were looked at.
        times: usize,
    },
}
