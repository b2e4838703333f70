//! Collectives between ranks, whatever carries them.

use crate::error::RankError;
use std::ops::Range;

/// Which rank of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number, below `ranks`.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
}

/// Moves bytes between ranks. Every rank calls the same collectives in the same order. Nothing is ever added up on the
/// way: what arrives is what was sent, so results do not depend on the engine.
///
/// An engine that has failed stays failed, because the progress of the other ranks is unknown.
pub trait Engine: Send {
    /// Which rank this is.
    fn place(&self) -> Place;

    /// Sends `send[sends[i]]` to rank `i` and puts what rank `i` sent here into `receive[receives[i]]`. The ranges that
    /// are received are disjoint; those that are sent may overlap.
    fn exchange(
        &mut self,
        send: &[u8],
        sends: &[Range<usize>],
        receive: &mut [u8],
        receives: &[Range<usize>],
    ) -> Result<(), RankError>;

    /// Puts the `piece` of rank `i` into `all[ranges[i]]`, on every rank.
    fn gather(
        &mut self,
        piece: &[u8],
        all: &mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<(), RankError>;

    /// Puts the bytes of rank `from` in place of those of all others.
    fn broadcast(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), RankError>;

    /// Puts the largest of all ranks in place of each number. With 0 and 1, that is whether any rank says yes.
    fn agree(&mut self, numbers: &mut [i64]) -> Result<(), RankError>;

    /// Waits until every rank is here.
    fn barrier(&mut self) -> Result<(), RankError>;

    /// Ends the run of all ranks. An engine between processes does not return.
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
