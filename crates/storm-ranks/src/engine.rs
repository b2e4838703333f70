//! Collectives between ranks, independent of the transport.

use crate::error::RankError;
use std::ops::Range;

/// A rank and the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank, less than `ranks`.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
}

/// Moves bytes between ranks. Every rank calls the same collectives in the same order. No engine
/// reduces data in transit: bytes arrive as sent, so results do not depend on the engine.
///
/// A failed engine stays failed, because the progress of the other ranks is unknown.
pub trait Engine: Send {
    /// This rank and the number of ranks.
    fn place(&self) -> Place;

    /// Sends `send[sends[i]]` to rank `i` and stores the bytes from rank `i` in
    /// `receive[receives[i]]`. Receive ranges must be disjoint. Send ranges may overlap.
    fn exchange(
        &mut self,
        send: &[u8],
        sends: &[Range<usize>],
        receive: &mut [u8],
        receives: &[Range<usize>],
    ) -> Result<(), RankError>;

    /// Stores the `piece` of rank `i` in `all[ranges[i]]`, on every rank.
    fn gather(
        &mut self,
        piece: &[u8],
        all: &mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<(), RankError>;

    /// Overwrites `bytes` on every rank with the bytes of rank `from`.
    fn broadcast(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), RankError>;

    /// Replaces each number with its maximum over all ranks. For 0 and 1, this is a logical OR.
    fn agree(&mut self, numbers: &mut [i64]) -> Result<(), RankError>;

    /// Waits until every rank has called this.
    fn barrier(&mut self) -> Result<(), RankError>;

    /// Ends the run on all ranks. An engine that connects processes does not return.
    fn abort(&mut self, reason: &str);
}

/// Checks the arguments of [`Engine::exchange`] before anything is sent.
pub(crate) fn check_exchange(
    place: Place,
    send: &[u8],
    sends: &[Range<usize>],
    receive: &[u8],
    receives: &[Range<usize>],
) -> Result<(), RankError> {
    check_inside(place.ranks, send.len(), sends)?;
    check_inside(place.ranks, receive.len(), receives)?;
    check_disjoint(receives)
}

/// Checks the arguments of [`Engine::gather`].
pub(crate) fn check_gather(
    place: Place,
    all: &[u8],
    ranges: &[Range<usize>],
) -> Result<(), RankError> {
    check_inside(place.ranks, all.len(), ranges)?;
    check_disjoint(ranges)
}

/// Checks that a rank exists.
pub(crate) fn check_rank(place: Place, rank: u32) -> Result<(), RankError> {
    match rank < place.ranks {
        true => Ok(()),
        false => Err(RankError::NoSuchRank { rank, ranks: place.ranks }),
    }
}

fn check_inside(ranks: u32, length: usize, ranges: &[Range<usize>]) -> Result<(), RankError> {
    if ranges.len() != ranks as usize {
        return Err(RankError::Ranges { given: ranges.len(), ranks });
    }
    match (0..ranks).zip(ranges).find(|(_, range)| range.start > range.end || range.end > length) {
        Some((rank, range)) => Err(RankError::Outside { rank, range: range.clone(), length }),
        None => Ok(()),
    }
}

fn check_disjoint(ranges: &[Range<usize>]) -> Result<(), RankError> {
    let mut sorted: Vec<(u32, &Range<usize>)> =
        (0..).zip(ranges).filter(|(_, range)| !range.is_empty()).collect();
    sorted.sort_by_key(|(_, range)| range.start);
    match sorted.windows(2).find(|pair| pair[0].1.end > pair[1].1.start) {
        Some(pair) => Err(RankError::Overlap { first: pair[0].0, second: pair[1].0 }),
        None => Ok(()),
    }
}
