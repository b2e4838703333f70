//! What a device needs for the queue of collectives: a way to other ranks, and what to send where.

use std::fmt;
use std::ops::Range;
use storm_plan::{Collective, CollectiveKind, Compute, Moved, Operand, Place, Plan};

/// A way to all other ranks of a step.
pub trait Collectives: fmt::Debug + Send + Sync {
    /// Sends `send[sends[i]]` to rank `i` and puts what rank `i` sent here into `receive[receives[i]]`.
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

/// Some bytes of device memory, and where they are in what is sent or received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) place: Place,
    pub(crate) at: usize,
    pub(crate) bytes: usize,
}

/// A collective as messages: one to each rank, and one from each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Messages {
    pub(crate) pack: Vec<Packed>,
    pub(crate) sends: Vec<Range<usize>>,
    pub(crate) receives: Vec<Range<usize>>,
    pub(crate) unpack: Vec<Packed>,
    /// Own pieces that are put elsewhere: from, to, bytes.
    pub(crate) kept: Vec<(Place, Place, usize)>,
}

impl Messages {
    pub(crate) fn new(plan: &Plan, collective: &Collective) -> Messages {
        let ranks = plan.rank.ranks;
        let place = |operand: &Operand| Place { tier: Compute::TIER, offset: operand.offset };
        let bytes = |operand: &Operand| plan.value(operand.value).size_bytes;
        let mut messages = Messages::default();
        let mut sent = 0;
        let mut pack = |messages: &mut Messages, pieces: &mut dyn Iterator<Item = &Moved>| {
            let start = sent;
            for operand in pieces.filter_map(|piece| piece.sent.as_ref()) {
                let packed = Packed { place: place(operand), at: sent, bytes: bytes(operand) };
                messages.pack.push(packed);
                sent += packed.bytes;
            }
            start..sent
        };
        match collective.kind {
            CollectiveKind::Exchange | CollectiveKind::ExchangeSums => {
                for rank in 0..ranks {
                    let receiver =
                        |piece: &&Moved| collective.kind.receiver(plan.rank, piece.owner);
                    let is_to = |piece: &&Moved| receiver(piece) == Some(rank);
                    let mut to = collective.pieces.iter().filter(is_to);
                    let range = pack(&mut messages, &mut to);
                    messages.sends.push(range);
                }
            }
            CollectiveKind::Gather => {
                // The same to everyone.
                let range = pack(&mut messages, &mut collective.pieces.iter());
                for rank in 0..ranks {
                    let is_own = rank == plan.rank.rank;
                    messages.sends.push(if is_own { 0..0 } else { range.clone() });
                }
            }
        }
        let mut received = 0;
        for rank in 0..ranks {
            let start = received;
            for (from, operand) in collective.writes() {
                if *from == rank && rank != plan.rank.rank {
                    let packed =
                        Packed { place: place(operand), at: received, bytes: bytes(operand) };
                    messages.unpack.push(packed);
                    received += packed.bytes;
                }
            }
            messages.receives.push(start..received);
        }
        for Moved { sent, received, .. } in &collective.pieces {
            for (from, operand) in received {
                if let (Some(sent), true) = (sent, *from == plan.rank.rank) {
                    messages.kept.push((place(sent), place(operand), bytes(operand)));
                }
            }
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

    /// How much is sent, and how much is received.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let end = |ranges: &[Range<usize>]| ranges.iter().map(|range| range.end).max();
        (end(&self.sends).unwrap_or(0), end(&self.receives).unwrap_or(0))
    }
}

/// What lies in a range of what is sent or received.
fn within(packed: &[Packed], range: Range<usize>) -> impl Iterator<Item = &Packed> {
    packed.iter().filter(move |packed| range.contains(&packed.at))
}
