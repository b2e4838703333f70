//! What ranks send each other in a step.
//!
//! Several ranks may share a step. Each computes some of its lanes under its own plan, and owns a
//! shard of the optimizer state. Pieces of parameters are the unit of ownership. Every rank issues
//! the same collectives in the same order, on one queue.
//!
//! Gradients are exchanged on one level or on two. On one level, every rank sends its lane of each
//! piece to the piece's owner. On two levels, the ranks of a machine first add up their lanes, and
//! only the sums go between machines. One level treats all ranks as one machine, wherever they are.
//!
//! Pieces of weights are gathered directly or through relays. Directly, the owner of a piece sends
//! it to every other rank. Through relays, it sends the piece to one rank of every other machine,
//! which sends it to the rest of its machine.

use crate::TensorKind;
use crate::plan::{Operand, Plan};
use serde::{Deserialize, Serialize};

/// The place of a rank among those that share a step, and how they exchange gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// Its number, below `ranks`.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// How many consecutive ranks, those of a machine, add up their lanes before the sums go to the
    /// owners of their pieces. Equals `ranks` if the exchange has one level.
    pub machine: u32,
    /// How many consecutive ranks, those of a machine, receive a gathered piece from other machines
    /// through one of them. Equals `ranks` if owners send to every rank.
    pub relay: u32,
}

impl RankPlace {
    /// A rank that exchanges gradients on one level and gathers weights directly.
    pub fn flat(rank: u32, ranks: u32) -> RankPlace {
        RankPlace { rank, ranks, machine: ranks, relay: ranks }
    }

    /// A rank on machines of `machine` ranks, which exchange gradients on two levels and gather
    /// weights through relays.
    pub fn on_machines(rank: u32, ranks: u32, machine: u32) -> RankPlace {
        RankPlace { rank, ranks, machine, relay: machine }
    }

    /// Whether other ranks share the step.
    pub fn is_shared(self) -> bool {
        self.ranks > 1
    }

    /// Whether gradients are exchanged inside machines, and sums of these between machines.
    pub fn has_levels(self) -> bool {
        self.machine < self.ranks
    }

    /// Whether a gathered piece reaches a machine once, and goes from rank to rank inside it.
    pub fn has_relays(self) -> bool {
        self.relay < self.ranks
    }

    /// The ranks with the same local rank on their machines, in order. A piece goes between these
    /// first.
    pub fn relay_peers(self) -> impl Iterator<Item = u32> {
        self.on_machines_of(self.relay).peers()
    }

    /// The ranks to which this one relays, itself included, in order.
    pub fn relay_group(self) -> impl Iterator<Item = u32> {
        self.on_machines_of(self.relay).in_machine()
    }

    /// The rank of this machine that relays a piece with this owner.
    pub fn relay_of(self, owner: u32) -> u32 {
        self.on_machines_of(self.relay).counterpart(owner)
    }

    /// The number of machines that exchange sums.
    pub fn machines(self) -> u32 {
        self.ranks / self.machine.max(1)
    }

    /// All other ranks, in order.
    pub fn others(self) -> impl Iterator<Item = u32> {
        (0..self.ranks).filter(move |&other| other != self.rank)
    }

    /// The ranks of its machine, in order.
    pub fn in_machine(self) -> impl Iterator<Item = u32> {
        self.on_machines_of(self.machine).in_machine()
    }

    /// The ranks with the same local rank on their machines, in order.
    pub fn peers(self) -> impl Iterator<Item = u32> {
        self.on_machines_of(self.machine).peers()
    }

    /// The rank of its machine that adds up the machine's lanes of a piece with this owner.
    pub fn adder(self, owner: u32) -> u32 {
        self.on_machines_of(self.machine).counterpart(owner)
    }

    /// This rank among machines of so many consecutive ranks.
    fn on_machines_of(self, size: u32) -> OnMachines {
        OnMachines { rank: self.rank, ranks: self.ranks, size }
    }
}

/// A rank among machines of `size` consecutive ranks each.
#[derive(Clone, Copy)]
struct OnMachines {
    rank: u32,
    ranks: u32,
    size: u32,
}

impl OnMachines {
    /// The local rank: the number of a rank on its machine.
    fn local(self, rank: u32) -> u32 {
        rank % self.size.max(1)
    }

    /// The first rank of this machine.
    fn first(self) -> u32 {
        self.rank - self.local(self.rank)
    }

    /// The ranks of this machine, in order.
    fn in_machine(self) -> impl Iterator<Item = u32> {
        self.first()..self.first() + self.size
    }

    /// The ranks with the same local rank on their machines, in order.
    fn peers(self) -> impl Iterator<Item = u32> {
        (self.local(self.rank)..self.ranks).step_by(self.size.max(1) as usize)
    }

    /// The rank of this machine with the same local rank as another rank.
    fn counterpart(self, other: u32) -> u32 {
        self.first() + self.local(other)
    }
}

/// One rank, which computes the step alone.
impl Default for RankPlace {
    fn default() -> RankPlace {
        RankPlace::flat(0, 1)
    }
}

/// How a collective moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum CollectiveKind {
    /// Every rank sends its share of each piece to the rank of its machine that adds it up, in rank
    /// order. If the exchange has one level, that is the owner of the piece.
    Exchange,
    /// The second level: ranks with the same local rank send their machine's sum of each piece to
    /// its owner, which adds them up in the order of the machines.
    ExchangeSums,
    /// Every rank gets each piece from its owner, directly or through a relay of its machine.
    Gather,
}

impl CollectiveKind {
    /// The name for display.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::Exchange => "exchange",
            CollectiveKind::ExchangeSums => "exchange of sums",
            CollectiveKind::Gather => "gather",
        }
    }

    /// The rank to which a rank sends its share of a piece with this owner. This may be the rank
    /// itself. `None` if the rank takes no part in the exchange of the piece. Also `None` for a
    /// gather, where every piece comes from its owner.
    pub fn receiver(self, place: RankPlace, owner: u32) -> Option<u32> {
        match self {
            CollectiveKind::Exchange => Some(place.adder(owner)),
            CollectiveKind::ExchangeSums => (place.adder(owner) == place.rank).then_some(owner),
            CollectiveKind::Gather => None,
        }
    }

    /// The ranks that exchange with a rank, itself included, in order.
    pub fn members(self, place: RankPlace) -> Vec<u32> {
        match self {
            CollectiveKind::Exchange => place.in_machine().collect(),
            CollectiveKind::ExchangeSums => place.peers().collect(),
            CollectiveKind::Gather => (0..place.ranks).collect(),
        }
    }
}

/// One operation on the queue between ranks. All its offsets are in the tier of the kernels.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Collective {
    /// How it moves data.
    pub kind: CollectiveKind,
    /// The pieces to move. Every rank that takes part in the exchange of a piece lists it, all in
    /// the same order. A rank may have no sums to exchange.
    pub pieces: Vec<Moved>,
    /// The kind of tensor, for reports.
    pub moves: TensorKind,
}

/// One piece of a [`Collective`], as a rank sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moved {
    /// The rank that adds up all lanes of it and updates it.
    pub owner: u32,
    /// What this rank sends. In an exchange, it sends if another rank is the receiver. In a gather,
    /// it sends if it owns the piece.
    pub sent: Option<Operand>,
    /// What it receives, with the sending rank. In an exchange, the receiver gets it from every
    /// other member, in order. In a gather, it comes from the owner. An owner may also receive its
    /// own piece, which copies it to another place.
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
        busiest_bytes(self.kind, plan.rank, &self.owned_bytes(plan))
    }

    /// Bytes of the pieces that each rank owns.
    pub(crate) fn owned_bytes(&self, plan: &Plan) -> Vec<usize> {
        let mut owned = vec![0; plan.rank.ranks as usize];
        for piece in &self.pieces {
            owned[piece.owner as usize] += piece.size_bytes(plan);
        }
        owned
    }
}

/// Bytes that the busiest rank sends or receives, given the bytes that each rank owns. In a gather,
/// every rank receives what others own, with or without relays. What a rank sends to several others
/// counts once.
pub(crate) fn busiest_bytes(kind: CollectiveKind, place: RankPlace, owned: &[usize]) -> usize {
    let received: Vec<usize> = match kind {
        // By local rank.
        CollectiveKind::Exchange => {
            let of = |number: usize| owned.iter().skip(number).step_by(place.machine as usize);
            (0..place.machine as usize).map(|number| of(number).sum()).collect()
        }
        CollectiveKind::ExchangeSums => place.peers().map(|peer| owned[peer as usize]).collect(),
        CollectiveKind::Gather => owned.to_vec(),
    };
    let total: usize = received.iter().sum();
    let least = received.iter().copied().min().unwrap_or(0);
    let most = received.iter().copied().max().unwrap_or(0);
    match kind {
        // What it sends of others' pieces, or what others send it of its own.
        CollectiveKind::Exchange | CollectiveKind::ExchangeSums => {
            (total - least).max(most * received.len().saturating_sub(1))
        }
        CollectiveKind::Gather => total - least,
    }
}

/// The name of a value received from another rank.
pub(crate) fn received_name(name: &str, from: u32) -> String {
    format!("{name} of rank {from}")
}
