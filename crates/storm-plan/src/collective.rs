//! What ranks send each other in a step.
//!
//! Several ranks may share a step. Each computes some of its lanes, under a plan of its own, and owns a shard of the optimizer
//! state. Pieces of parameters are the unit of ownership. Every rank issues the same collectives in the same order, on one queue.

use crate::TensorKind;
use crate::plan::{Operand, Plan};
use serde::Serialize;

/// Which of the ranks that share a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankPlace {
    /// Its number, below `ranks`.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
}

impl RankPlace {
    /// Whether others share the step.
    pub fn is_shared(self) -> bool {
        self.ranks > 1
    }

    /// All other ranks, in order.
    pub fn others(self) -> impl Iterator<Item = u32> {
        (0..self.ranks).filter(move |&other| other != self.rank)
    }
}

/// One rank, which makes the step alone.
impl Default for RankPlace {
    fn default() -> RankPlace {
        RankPlace { rank: 0, ranks: 1 }
    }
}

/// Which way a collective moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum CollectiveKind {
    /// Every rank sends the owner of each piece what it has of it. The owner adds these up, in the order of the ranks.
    Exchange,
    /// The owner of each piece sends it to all others.
    Gather,
}

impl CollectiveKind {
    /// For display.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::Exchange => "exchange",
            CollectiveKind::Gather => "gather",
        }
    }
}

/// One step of the queue between ranks. All its offsets are in the tier of the kernels.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Collective {
    /// Which way.
    pub kind: CollectiveKind,
    /// What is moved. Every rank lists the same pieces in the same order.
    pub pieces: Vec<Moved>,
    /// What users think of it as, for reports.
    pub moves: TensorKind,
}

/// One piece of a [`Collective`], as a rank sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moved {
    /// The rank that it is sent to in an exchange, and comes from in a gather.
    pub owner: u32,
    /// What this rank sends: in an exchange if another owns the piece, in a gather if it does itself.
    pub sent: Option<Operand>,
    /// What it receives, with the rank that sends it: in an exchange, if it owns the piece, from every other one, in order;
    /// in a gather from the owner. An owner may also receive its own piece, which puts it elsewhere.
    pub received: Vec<(u32, Operand)>,
}

impl Moved {
    /// Everything it touches on this rank.
    pub fn operands(&self) -> impl Iterator<Item = &Operand> {
        self.sent.iter().chain(self.received.iter().map(|(_, operand)| operand))
    }

    /// The size of the piece.
    pub fn size_bytes(&self, plan: &Plan) -> usize {
        self.operands().next().map_or(0, |operand| plan.value(operand.value).size_bytes)
    }
}

impl Collective {
    /// What it reads on this rank.
    pub fn reads(&self) -> impl Iterator<Item = &Operand> {
        self.pieces.iter().filter_map(|piece| piece.sent.as_ref())
    }

    /// What it writes on this rank, with the rank that sends it.
    pub fn writes(&self) -> impl Iterator<Item = &(u32, Operand)> {
        self.pieces.iter().flat_map(|piece| &piece.received)
    }

    /// Bytes that the busiest rank sends or receives.
    pub fn busiest_bytes(&self, plan: &Plan) -> usize {
        busiest_bytes(self.kind, &self.owned_bytes(plan))
    }

    /// By rank: bytes of the pieces that it owns.
    pub(crate) fn owned_bytes(&self, plan: &Plan) -> Vec<usize> {
        let mut owned = vec![0; plan.rank.ranks as usize];
        for piece in &self.pieces {
            owned[piece.owner as usize] += piece.size_bytes(plan);
        }
        owned
    }
}

/// Bytes that the busiest rank sends or receives, given those of each rank's pieces. In a gather, what an owner sends reaches the
/// others one by one or is passed on by them, so every rank sends as much as it receives.
pub(crate) fn busiest_bytes(kind: CollectiveKind, owned: &[usize]) -> usize {
    let total: usize = owned.iter().sum();
    let least = owned.iter().copied().min().unwrap_or(0);
    let most = owned.iter().copied().max().unwrap_or(0);
    match kind {
        // What it has of others' pieces, or what the others have of its own.
        CollectiveKind::Exchange => (total - least).max(most * owned.len().saturating_sub(1)),
        CollectiveKind::Gather => total - least,
    }
}

/// The name of what an owner receives of a value from another rank.
pub(crate) fn received_name(name: &str, from: u32) -> String {
    format!("{name} of rank {from}")
}
