//! Plans offloading for the tensors that another framework saves between forward and backward.
//!
//! We do not control the order of the framework's step. One recorded step shows what is saved, when
//! it is needed again, and how much memory everything else uses meanwhile. For later steps the plan
//! then decides which pieces stay, which are offloaded, and when they are fetched back.
//!
//! Time is counted in *positions*: one for each saved piece, in the order of saving, then one for
//! each needed piece, in the order of first need. Position `p` lasts until position `p + 1` begins.

mod range_max;

use range_max::RangeMax;
use storm_device::foreign::HOST_ALIGNMENT;

/// A record of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// The saved pieces, in the order of saving.
    pub pieces: Vec<RecordedPiece>,
    /// Peak memory use during each position, without the pieces that the forward pass had released.
    /// One entry for each piece, then one for each piece that was needed.
    pub other_bytes: Vec<u64>,
    /// Memory in use when the step began.
    pub baseline_bytes: u64,
}

/// A saved range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedPiece {
    /// Size in bytes.
    pub bytes: usize,
    /// The first position at which only the saved reference holds it.
    pub given_up: usize,
    /// The positions of first and last need. `None` if it was never needed.
    pub needed: Option<(usize, usize)>,
    /// Number of saves: one by each tensor that shares it.
    pub saves: u32,
    /// Number of uses.
    pub uses: u32,
    /// Something else held it all the time, or there was no host memory for it. It stays, and its
    /// bytes count in `other_bytes`.
    pub fixed: bool,
}

/// The memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowance {
    /// A limit on total memory.
    Budget {
        /// Bytes.
        bytes: u64,
    },
    /// The least memory that offloading can reach, plus a margin.
    Least {
        /// Bytes.
        window_bytes: u64,
    },
}

/// Whether a piece is offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It stays on the device.
    Stay,
    /// It is offloaded to the host slab.
    Move {
        /// Offset in the slab.
        host_offset: usize,
    },
}

/// A planned fetch of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedFetch {
    /// The position at which to issue it.
    pub position: usize,
    /// The index of the piece.
    pub piece: usize,
}

/// A plan for the steps after a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPlan {
    /// The fate of each piece.
    pub fates: Vec<Fate>,
    /// Size of the host slab.
    pub slab_bytes: usize,
    /// By position: the maximum number of bytes still being offloaded, not counting pieces that the
    /// forward pass itself still holds.
    pub leaving_bytes_max: Vec<u64>,
    /// In issue order.
    pub fetches: Vec<PlannedFetch>,
    /// The peak memory under this plan.
    pub peak_bytes: u64,
    /// The least peak that any plan could reach.
    pub least_bytes: u64,
    /// The limit that this plan was made for.
    pub allowed_bytes: u64,
    /// How much more memory is in use at the start of a step than when recorded.
    pub baseline_shift: i64,
}

/// Makes a plan. `baseline_shift` is how much more memory is in use at the start of a step now than
/// at the start of the recorded one.
///
/// The backward pass needs first what was saved last. Keeping those pieces avoids the most waiting
/// per byte, because they would have the least time to leave and return. So pieces are kept in the
/// order of need, as long as they fit.
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
        // Find the earliest position from which it fits until it is needed.
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

/// Places moved pieces one after another, in the order of saving: they all exist at the same time
/// between forward and backward.
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
