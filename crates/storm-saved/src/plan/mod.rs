//! Plans what another framework saves between its forward and backward pass.
//!
//! We do not control the order of the framework's step. From one recorded step we learn what is saved,
//! when it is needed again, and how much memory everything else uses meanwhile. For later steps we then
//! decide what stays, what is offloaded, and when it is fetched back.
//!
//! Time is counted in *positions*: one for each piece that is saved, in that order, then one for each
//! piece that is needed, in the order of first need. Position `p` lasts until position `p + 1` begins.

mod range_max;

use range_max::RangeMax;
use storm_device::foreign::HOST_ALIGNMENT;

/// What one step did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// What was saved, in that order.
    pub pieces: Vec<RecordedPiece>,
    /// By position: the most memory in use during it, without the pieces that the forward pass had
    /// released. One entry for each piece, then one for each piece that was needed.
    pub other_bytes: Vec<u64>,
    /// Memory in use when the step began.
    pub baseline_bytes: u64,
}

/// A range of memory that was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedPiece {
    /// Its size.
    pub bytes: usize,
    /// The first position at which only the saved reference holds it.
    pub given_up: usize,
    /// The positions of first and last need; none if it was never needed.
    pub needed: Option<(usize, usize)>,
    /// How often it was saved: once by each tensor that shares it.
    pub saves: u32,
    /// How often it was needed.
    pub uses: u32,
    /// Something else held it all the time, or there was no host memory for it. It stays, and counts as
    /// part of everything else's memory.
    pub fixed: bool,
}

/// What is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowance {
    /// So much memory in all.
    Budget {
        /// Bytes.
        bytes: u64,
    },
    /// The least memory that offloading can reach, plus this much.
    Least {
        /// Bytes.
        window_bytes: u64,
    },
}

/// What becomes of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It stays where it is.
    Stay,
    /// It is offloaded, to this offset in the host slab.
    Move {
        /// Its first byte there.
        host_offset: usize,
    },
}

/// A fetch of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedFetch {
    /// When to give it out.
    pub position: usize,
    /// What to fetch.
    pub piece: usize,
}

/// What the steps after a recording do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPlan {
    /// By piece.
    pub fates: Vec<Fate>,
    /// Size of the slab in host memory.
    pub slab_bytes: usize,
    /// By position: how many bytes may still be on their way out, not counting pieces that the forward
    /// pass itself still holds.
    pub leaving_bytes_max: Vec<u64>,
    /// In issue order.
    pub fetches: Vec<PlannedFetch>,
    /// The peak memory under this plan.
    pub peak_bytes: u64,
    /// The least peak that any plan could reach.
    pub least_bytes: u64,
    /// What was allowed.
    pub allowed_bytes: u64,
    /// How much the baseline that this plan is for differs from the recording's.
    pub baseline_shift: i64,
}

/// Decides for every piece. `baseline_shift` is how much more memory is in use at the start of a step
/// now than at the start of the recorded one.
///
/// What the backward pass needs first was saved last. Keeping it avoids the most waiting per byte,
/// because it would have the least time to leave and return. So pieces are kept in the order of their
/// need, as long as they fit.
pub fn plan_saved(recording: &Recording, allowance: Allowance, baseline_shift: i64) -> SavedPlan {
    let pieces = &recording.pieces;
    let last = recording.other_bytes.len().saturating_sub(1);
    let others: Vec<i64> =
        recording.other_bytes.iter().map(|&bytes| bytes as i64 + baseline_shift).collect();
    let mut in_use = RangeMax::new(&others);

    let mut order: Vec<usize> = (0..pieces.len()).collect();
    // Pieces that are never needed sort last: they may belong to another graph that stays alive.
    order.sort_by_key(|&piece| pieces[piece].needed.map_or((1, 0), |(first, _)| (0, first)));

    // Every moved piece is on the device while it is needed.
    for piece in pieces.iter().filter(|piece| !piece.fixed) {
        if let Some((first, until)) = piece.needed {
            in_use.add(first, until, piece.bytes as i64);
        }
    }
    let least = if pieces.is_empty() { baseline_shift } else { in_use.max(0, last) };
    let allowed = match allowance {
        Allowance::Budget { bytes } => i64::try_from(bytes).unwrap_or(i64::MAX),
        Allowance::Least { window_bytes } => least + window_bytes as i64,
    };

    let mut stays = vec![false; pieces.len()];
    for &index in &order {
        let piece = &pieces[index];
        if piece.fixed {
            stays[index] = true;
            continue;
        }
        // Keeping it takes memory from its release to the latest time at which it would be fetched.
        let until = piece.needed.map_or(last, |(first, _)| first.saturating_sub(1));
        let bytes = piece.bytes as i64;
        let fits = piece.given_up > until || in_use.max(piece.given_up, until) + bytes <= allowed;
        if fits {
            in_use.add(piece.given_up, until, bytes);
            stays[index] = true;
        }
    }

    let mut fetches = Vec::new();
    let mut earliest = pieces.len();
    for &index in order.iter().filter(|&&index| !stays[index]) {
        let Some((first, _)) = pieces[index].needed else { continue };
        let bytes = pieces[index].bytes as i64;
        // The earliest position from which it fits until it is needed.
        let (mut low, mut high) = (earliest.min(first), first);
        while low < high {
            let middle = usize::midpoint(low, high);
            if in_use.max(middle, first - 1) + bytes <= allowed {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        if low < first {
            in_use.add(low, first - 1, bytes);
        }
        fetches.push(PlannedFetch { position: low, piece: index });
        earliest = earliest.max(low);
    }

    let (fates, slab_bytes) = place(pieces, &stays);
    let headroom = |position| (allowed - in_use.max(position, position)).max(0) as u64;
    SavedPlan {
        fates,
        slab_bytes,
        leaving_bytes_max: (0..others.len()).map(headroom).collect(),
        fetches,
        peak_bytes: if pieces.is_empty() { 0 } else { in_use.max(0, last).max(0) as u64 },
        least_bytes: least.max(0) as u64,
        allowed_bytes: allowed.max(0) as u64,
        baseline_shift,
    }
}

/// One after another, in the order of saving: between the passes all of them exist together.
fn place(pieces: &[RecordedPiece], stays: &[bool]) -> (Vec<Fate>, usize) {
    let mut end = 0;
    let fates = pieces.iter().zip(stays).map(|(piece, &stays)| {
        if stays {
            return Fate::Stay;
        }
        let host_offset = end;
        end += piece.bytes.next_multiple_of(HOST_ALIGNMENT);
        Fate::Move { host_offset }
    });
    let fates = fates.collect();
    (fates, end)
}

#[cfg(test)]
mod tests;
