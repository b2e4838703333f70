//! What a device needs for the queue of collectives: a connection to other ranks, and what to send
//! where.

use std::fmt;
use std::ops::Range;
use storm_plan::{Collective, CollectiveKind, Compute, Moved, Operand, Place, Plan, RankPlace};

/// A connection to all other ranks of a step.
pub trait Collectives: fmt::Debug + Send + Sync {
    /// Sends `send[sends[i]]` to rank `i`, and receives what rank `i` sends into
    /// `receive[receives[i]]`.
    ///
    /// # Errors
    /// A rank is gone.
    fn exchange(
        &self,
        send: &[u8],
        sends: &[Range<usize>],
        receive: &mut [u8],
        receives: &[Range<usize>],
    ) -> Result<(), String>;
}

/// Some bytes of device memory, and their position in the send or receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) place: Place,
    pub(crate) at: usize,
    pub(crate) bytes: usize,
}

/// Messages that all ranks send at once: one to each rank, and one from each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Messages {
    pub(crate) pack: Vec<Packed>,
    pub(crate) sends: Vec<Range<usize>>,
    pub(crate) receives: Vec<Range<usize>>,
    pub(crate) unpack: Vec<Packed>,
    /// Own pieces to copy to another place: from, to, bytes.
    pub(crate) kept: Vec<(Place, Place, usize)>,
}

/// Where pieces go in one round of a collective, as a rank sees it.
struct Route<'a> {
    /// What is sent, and to which ranks.
    sends: Vec<(&'a Operand, Vec<u32>)>,
    /// What is received, and from which rank.
    receives: Vec<(u32, &'a Operand)>,
}

impl Messages {
    /// The rounds of a collective. A round may send what an earlier one received.
    pub(crate) fn rounds(plan: &Plan, collective: &Collective) -> Vec<Messages> {
        let place = plan.rank;
        let routes = match collective.kind {
            CollectiveKind::Exchange | CollectiveKind::ExchangeSums => {
                vec![exchange(place, collective)]
            }
            CollectiveKind::Gather if place.has_relays() => {
                let to_relays = gather(place, collective, place.relay_peers().collect(), |o| o);
                let group = place.relay_group().collect();
                vec![to_relays, gather(place, collective, group, |o| place.relay_of(o))]
            }
            CollectiveKind::Gather => {
                vec![gather(place, collective, (0..place.ranks).collect(), |o| o)]
            }
        };
        let mut rounds: Vec<Messages> =
            routes.iter().map(|route| Messages::new(plan, route)).collect();
        rounds[0].kept = kept(plan, collective);
        rounds
    }

    fn new(plan: &Plan, route: &Route<'_>) -> Messages {
        let packed = |operand: &Operand, at: usize| Packed {
            place: place_of(operand),
            at,
            bytes: plan.value(operand.value).size_bytes,
        };
        let mut messages = Messages::default();
        let mut sent: Vec<(&[u32], Range<usize>)> = Vec::new();
        // Ranks that get the same pieces share a message.
        let mut receivers: Vec<&[u32]> = Vec::new();
        for (_, to) in &route.sends {
            if !receivers.contains(&&to[..]) {
                receivers.push(to);
            }
        }
        let mut end = 0;
        for to in receivers {
            let start = end;
            for (operand, _) in route.sends.iter().filter(|(_, other)| other == to) {
                let packed = packed(operand, end);
                messages.pack.push(packed);
                end += packed.bytes;
            }
            sent.push((to, start..end));
        }
        let mut received = 0;
        for rank in 0..plan.rank.ranks {
            let to_rank = sent.iter().find(|(to, _)| to.contains(&rank));
            messages.sends.push(to_rank.map_or(0..0, |(_, range)| range.clone()));
            let start = received;
            for (_, operand) in route.receives.iter().filter(|(from, _)| *from == rank) {
                let packed = packed(operand, received);
                messages.unpack.push(packed);
                received += packed.bytes;
            }
            messages.receives.push(start..received);
        }
        messages
    }

    /// What is sent to a rank, in order.
    pub(crate) fn sent_to(&self, rank: u32) -> impl Iterator<Item = &Packed> {
        within(&self.pack, self.sends[rank as usize].clone())
    }

    /// What is received from a rank, in order.
    pub(crate) fn received_from(&self, rank: u32) -> impl Iterator<Item = &Packed> {
        within(&self.unpack, self.receives[rank as usize].clone())
    }

    /// Lengths of the send and receive buffers.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let end = |ranges: &[Range<usize>]| ranges.iter().map(|range| range.end).max();
        (end(&self.sends).unwrap_or(0), end(&self.receives).unwrap_or(0))
    }
}

fn place_of(operand: &Operand) -> Place {
    Place { tier: Compute::TIER, offset: operand.offset }
}

/// Every rank sends each piece to the one that adds it up.
fn exchange(place: RankPlace, collective: &Collective) -> Route<'_> {
    let to = |piece: &Moved| collective.kind.receiver(place, piece.owner).into_iter().collect();
    let sends = collective.pieces.iter();
    let sends = sends.filter_map(|piece| Some((piece.sent.as_ref()?, to(piece)))).collect();
    Route { sends, receives: collective.writes().map(|(from, operand)| (*from, operand)).collect() }
}

/// Every member gets the pieces whose source is a member. The source of a piece depends on its
/// owner. A source that does not own the piece received it in an earlier round.
fn gather(
    place: RankPlace,
    collective: &Collective,
    members: Vec<u32>,
    source: impl Fn(u32) -> u32,
) -> Route<'_> {
    let others: Vec<u32> = members.iter().copied().filter(|&rank| rank != place.rank).collect();
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for Moved { owner, sent, received } in &collective.pieces {
        let source = source(*owner);
        let received = received.first().map(|(_, operand)| operand);
        if source == place.rank {
            sends.extend(sent.as_ref().or(received).map(|operand| (operand, others.clone())));
        } else if others.contains(&source) {
            receives.extend(received.map(|operand| (source, operand)));
        }
    }
    Route { sends, receives }
}

/// Own pieces that a rank copies to another place.
fn kept(plan: &Plan, collective: &Collective) -> Vec<(Place, Place, usize)> {
    let mut kept = Vec::new();
    for Moved { sent, received, .. } in &collective.pieces {
        for (from, operand) in received {
            if let (Some(sent), true) = (sent, *from == plan.rank.rank) {
                let bytes = plan.value(operand.value).size_bytes;
                kept.push((place_of(sent), place_of(operand), bytes));
            }
        }
    }
    kept
}

/// What is in a range of the send or receive buffer.
fn within(packed: &[Packed], range: Range<usize>) -> impl Iterator<Item = &Packed> {
    packed.iter().filter(move |packed| range.contains(&packed.at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::TensorClass;
    use storm_plan::{TensorKind, Tier, Value, ValueId};

    const PIECE: usize = 64;

    /// A gather on a rank, with a piece for each of these owners. An owner has its piece where the
    /// others receive it.
    fn gather_on(place: RankPlace, owners: &[u32]) -> (Plan, Collective) {
        let mut plan = Plan { rank: place, ..Plan::default() };
        let mut pieces = Vec::new();
        for (number, &owner) in owners.iter().enumerate() {
            let (name, class) = (format!("w{number}"), TensorClass::Gradient);
            plan.values.push(Value { name, size_bytes: PIECE, class });
            let operand = Operand { value: ValueId(number as u32), offset: PIECE * number };
            let is_own = owner == place.rank;
            let received = if is_own { vec![] } else { vec![(owner, operand)] };
            pieces.push(Moved { owner, sent: is_own.then_some(operand), received });
        }
        (plan, Collective { kind: CollectiveKind::Gather, pieces, moves: TensorKind::Weights })
    }

    /// The owner of the contents that a rank has of each piece.
    type Pieces = Vec<Option<u32>>;

    /// Runs the rounds of all ranks. Returns what each has of every piece, and the sender and
    /// receiver of each piece sent.
    fn run(places: &[RankPlace], owners: &[u32]) -> (Vec<Pieces>, Vec<(u32, u32)>) {
        let has = |rank: u32, owner: u32| (rank == owner).then_some(owner);
        let mut pieces: Vec<Pieces> = (0..places.len() as u32)
            .map(|rank| owners.iter().map(|&owner| has(rank, owner)).collect())
            .collect();
        let rounds: Vec<Vec<Messages>> = places
            .iter()
            .map(|&place| {
                let (plan, collective) = gather_on(place, owners);
                Messages::rounds(&plan, &collective)
            })
            .collect();
        let mut sent = Vec::new();
        for round in 0..rounds[0].len() {
            let before = pieces.clone();
            let number = |packed: &Packed| {
                assert_eq!((packed.place.tier, packed.bytes), (Tier::DEVICE, PIECE));
                packed.place.offset / PIECE
            };
            for (to, receiver) in (0..).zip(&rounds) {
                for (from, sender) in (0..).zip(&rounds) {
                    let out: Vec<usize> = sender[round].sent_to(to).map(number).collect();
                    let arrived: Vec<usize> =
                        receiver[round].received_from(from).map(number).collect();
                    assert_eq!(out, arrived, "round {round}: {from} sends {to}");
                    for number in out {
                        pieces[to as usize][number] = before[from as usize][number];
                        sent.push((from, to));
                    }
                }
            }
        }
        (pieces, sent)
    }

    #[test]
    fn every_rank_gets_every_piece_through_relays_too() {
        // Owners of several pieces, of one and of none, in no order.
        let owners = [4, 0, 5, 1, 4, 3, 0];
        for relay in [1, 2, 3, 6] {
            let place = |rank| RankPlace { relay, ..RankPlace::flat(rank, 6) };
            let places: Vec<RankPlace> = (0..6).map(place).collect();
            let (pieces, sent) = run(&places, &owners);
            for found in pieces {
                assert_eq!(found, owners.map(Some));
            }
            // A piece goes to each of the other machines once, and once to each of the other ranks.
            let between = sent.iter().filter(|(from, to)| from / relay != to / relay).count();
            assert_eq!(between, owners.len() * (6 / relay as usize - 1), "{relay} on a machine");
            assert_eq!(sent.len(), owners.len() * 5);
        }
    }
}
